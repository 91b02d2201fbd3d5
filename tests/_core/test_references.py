"""Counts and waiter lists when several processes change them at once."""

from fastrt._core.objects import handles
from fastrt._core.repair import fsck
from fastrt._core.tasks import submission


def test_sealers_and_submitters_race_for_dependencies(node, client, function):
    """Each task waits for results that other processes are sealing at this moment: none is missed or run twice."""
    workers = [node.peer(), node.peer()]
    for peer in workers:
        peer.start(
            """
ran = 0
while (t := tasks.next_task(client, 2.0, 0.00005)) >= 0:
    _, args, refs = tasks.arguments(client, t)
    value = sum(handles.read_scalar(client, a, None) if isinstance(a, handles.Ref) else a for a in args)
    del args, refs
    tasks.finish_scalar(client, t, value)
    ran += 1
ran
"""
        )
    submitted = 0
    last = []
    for _ in range(300):
        layer = [submission.submit(client, submission.TaskOptions(function), (1,)) for _ in range(8)]
        submitted += 8
        while len(layer) > 1:
            layer = [
                submission.submit(client, submission.TaskOptions(function), (a, b))
                for a, b in zip(layer[::2], layer[1::2], strict=True)
            ]
            submitted += len(layer)
        last += layer
    assert handles.wait_all(client, last, 20.0, 0.0)
    assert handles.read_scalars(client, last, None) == [8] * 300
    assert sum(peer.finish() for peer in workers) == submitted
    assert fsck.fsck(client, quiet=True) == []


def test_containers_are_made_and_dropped_by_all_at_once(node, client):
    """Counts of one object change in three processes while each may hold the last one."""
    shared = [handles.put_scalar(client, k) for k in range(5)]
    names = [(ref.objref, ref.index) for ref in shared]
    peers = [node.peer() for _ in range(2)]
    for seed, peer in enumerate(peers):
        peer.start(
            f"""
import random
rng = random.Random({seed})
shared = [handles.acquire(client, *name) for name in {names}]
boxes = []
for _ in range(15_000):
    inner = rng.sample(shared, 2) + ([rng.choice(boxes)] if boxes else [])
    boxes.append(handles.create(client, 8, 16, len(inner)).seal(inner))
    if len(boxes) > 10:
        del boxes[rng.randrange(10)]
    del inner
del boxes, shared
"""
        )
    for peer in peers:
        peer.finish()
    assert [handles.describe(client, ref)["counted"] for ref in shared] == [0] * 5
    assert fsck.usage(client)["objects"] == 5
