"""Members that compute together by the cluster's own protocol, with each other and with one that knows no tags."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fastrt.errors import CollectiveMismatch, CollectiveTimeout, FastrtError, PeerDied
from fastrt.membership import MemberGroup, MemberUnreachableError, Role, wire
from fastrt.membership.framing import Kind
from fastrt.membership.mailbox import MESSAGE, Mailbox, Tag
from fastrt.membership.wire import Command

WORKER = Role.WORKER
ONE, TWO = (WORKER, 1), (WORKER, 2)
BOTH = {ONE: 0, TWO: 0}


def workers(serve: Any, join: Any, count: int, here: int | None = None) -> tuple[Any, list[Any]]:
    """A cluster of workers, and those of them that are fastrt's: all, or the first `here`."""
    service = serve(count, 0)
    return service, [join(service.address, WORKER, member_id=f"w{i}") for i in range(count if here is None else here)]


def each(members: list[Any], work: Callable[[MemberGroup], Any], name: str = "default", **options: Any) -> list[Any]:
    """What each member's work comes to, all at once; an error in the place of a value."""

    def one(member: Any) -> Any:
        member.wait_ready(60)
        with MemberGroup(member, name, **options) as group:
            try:
                return work(group)
            except FastrtError as error:
                return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_members_compute_together_what_one_process_computes(serve: Any, join: Any, count: int) -> None:
    _, members = workers(serve, join, count)

    def work(group: MemberGroup) -> list[bytes]:
        results = []
        for n in (0, 1, count - 1, count, count + 1, 1000, 70_001):
            for dtype in ("float32", "float16", "int64"):
                for op in ("sum", "max", "avg"):
                    rng = np.random.default_rng(n)
                    every = [(rng.normal(size=n) * 100).astype(dtype) for _ in range(count)]
                    mine = every[group.rank].copy()
                    assert group.all_reduce(mine, op) is mine
                    exact = np.asarray(every, "f8")
                    wanted = exact.max(0) if op == "max" else exact.sum(0) / (count if op == "avg" else 1)
                    close = {"rtol": 1e-2, "atol": 1.0} if dtype == "float16" else {"rtol": 1e-4, "atol": 1e-2}
                    if dtype == "int64":
                        wanted = np.trunc(wanted)
                    assert np.allclose(mine, wanted, **close), (n, dtype, op)
                    results.append(mine.tobytes())
        gathered = group.all_gather(np.full((2, 3), group.rank))
        assert (gathered == np.arange(count).reshape(count, 1, 1)).all()
        told = np.full(5, group.rank)
        assert group.broadcast(told, count - 1).tolist() == [count - 1] * 5
        group.barrier()
        return results

    results = each(members, work)
    assert all(not isinstance(one, FastrtError) for one in results), results
    assert results == [results[0]] * count  # the same bits


def test_groups_of_some_members_and_users_messages_do_not_disturb_each_other(serve: Any, join: Any) -> None:
    _, members = workers(serve, join, 3)
    each(members, lambda group: group.barrier())
    sent = members[0].collective_send_async(1, b"the user's own")
    with ThreadPoolExecutor(1) as pool:
        pair = pool.submit(each, members[:2], lambda g: float(g.all_reduce(np.ones(9))[0]), "pair", ranks=[0, 1])
        assert each(members, lambda g: float(g.all_reduce(np.ones(9))[0]), "all") == [3.0] * 3
        assert pair.result() == [2.0, 2.0]
    sent.result(60)
    assert members[1].collective_receive(0) == b"the user's own"
    with pytest.raises(ValueError, match="cannot make a group of"):
        MemberGroup(members[0], ranks=[1, 2])
    with pytest.raises(ValueError, match="200 bytes"):
        MemberGroup(members[0], "n" * 201)


def test_late_member_harms_no_other_operation(serve: Any, join: Any) -> None:
    _, members = workers(serve, join, 3)
    gate = threading.Event()

    def work(group: MemberGroup) -> Any:
        group.barrier()
        if group.rank == 2:
            gate.wait(50)
        with pytest.raises(CollectiveTimeout) as told:
            group.all_reduce(np.full(100, 1e30), timeout_s=0.3)
        if group.rank == 0:
            gate.set()
        return str(told.value), [float(group.all_reduce(np.full(n, group.rank + 1.0))[0]) for n in (1, 1000, 3)]

    results = each(members, work)
    assert [sums for _, sums in results] == [[6.0] * 3] * 3
    assert "rank 2 did not come in time" in results[0][0]


def test_different_operations_are_a_mismatch_in_words(serve: Any, join: Any) -> None:
    _, members = workers(serve, join, 2)
    for one in each(members, lambda group: group.all_reduce(np.ones(4 + group.rank))):
        assert isinstance(one, CollectiveMismatch)
        assert "all_reduce of 4 float64, sum, among 2" in str(one)
        assert "all_reduce of 5 float64, sum, among 2" in str(one)
    for wrong, error in ((np.ones((4, 4))[:, 1], ValueError), ([1, 2], TypeError), (np.ones(3, "c8"), ValueError)):
        with MemberGroup(members[0]) as group, pytest.raises(error):
            group.all_reduce(wrong)  # type: ignore[arg-type]
    with pytest.raises(FastrtError, match="is closed"):
        group.barrier()


def test_lost_member_is_named_to_all_that_wait_and_the_others_go_on(serve: Any, join: Any) -> None:
    _, members = workers(serve, join, 3)
    passed = threading.Barrier(3)  # whoever leaves first is news that may overtake its last message

    def work(group: MemberGroup) -> Any:
        group.barrier()
        passed.wait(50)
        if group.rank == 2:
            members[2].close()
            return None
        with pytest.raises(PeerDied) as told:
            group.all_reduce(np.ones(100), timeout_s=50)
        return told.value.rank

    assert each(members, work) == [2, 2, None]
    again = each(members[:2], lambda group: float(group.all_reduce(np.ones(8))[0]), "again", ranks=[0, 1])
    assert again == [2.0, 2.0]


def test_group_of_a_member_whose_place_another_one_has_ends(serve: Any, join: Any) -> None:
    """Who is in its place is in no group of before, which would be waited in until the time is up."""
    service, members = workers(serve, join, 2)
    for member in members:
        member.wait_ready(60)
    with MemberGroup(members[0], ranks=[0, 1]) as group, MemberGroup(members[1], ranks=[0, 1]) as lost:
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(lost.barrier)
            group.barrier()
            there.result()
        members[1].close()
        newcomer = join(service.address, WORKER, member_id="another")
        assert newcomer.wait_ready(60) == 1
        members[0].wait_for(lambda: any(view.member_id == "another" for view in members[0].members), 60, "the newcomer")
        with pytest.raises(PeerDied, match="has left the cluster") as told:
            group.barrier(timeout_s=50)
        assert told.value.rank == 1
    again = each([members[0], newcomer], lambda group: float(group.all_reduce(np.ones(8))[0]), "again", ranks=[0, 1])
    assert again == [2.0, 2.0]


class Foreign:
    """A worker by hand, as the original is: it matches bytes by their order alone, and knows nothing of tags."""

    def __init__(self, address: str, raw: Any, listener: Any, name: str) -> None:
        self.own = listener()
        self.raw = raw
        self.scheduler = raw(address)
        message = wire.RegisterMessage(ip="127.0.0.1", port=self.own.port, node_id=name, role=int(WORKER))
        self.scheduler.request(Command.REGISTER, message.SerializeToString(), 1, rank=None)
        self.incoming: Any = None
        self.number = 0

    def meet(self, rank: int) -> int:
        """Wait for all members, and connect to one of them; returns the own rank."""
        told = wire.SendMetadata.FromString(self.own.acknowledge(self.own.accept())[1].data)
        there = next(one for one in told.servers_meta if one.rank_id == rank)
        self.peer = self.raw(f"{there.ip}:{there.port}")
        self.rank = int(told.rank_id)
        return self.rank

    def send(self, data: bytes) -> None:
        self.number += 1
        self.peer.request(Command.COLLECTIVE_SEND_DATA, data, self.number, rank=self.rank, kind=Kind.RAW)

    def sent(self, data: bytes) -> None:
        meta, frame = self.peer.read()
        assert (meta.cmd, meta.request_id, frame.data) == (Command.COLLECTIVE_SEND_DATA, self.number, data)

    def receive(self) -> bytes:
        if self.incoming is None:
            self.incoming = self.own.accept()
        return bytes(self.own.acknowledge(self.incoming)[1].data)


def test_member_without_tags_takes_part_as_in_the_original(serve: Any, join: Any, raw: Any, listener: Any) -> None:
    service, [member] = workers(serve, join, 2, here=1)
    foreign = Foreign(service.address, raw, listener, "foreign")
    member.wait_ready(60)
    assert foreign.meet(member.rank) == 1
    group = MemberGroup(member)
    mine, theirs = np.arange(5, dtype=np.float32), np.full(5, 10, np.float32)
    with ThreadPoolExecutor(1) as pool:
        # The ring of two: chunks of 3 and 2 elements; rank 1 gives its own chunk 1, and adds to chunk 0.
        done = pool.submit(group.all_reduce, mine)
        foreign.send(theirs[3:].tobytes())
        theirs[:3] += np.frombuffer(foreign.receive(), np.float32)
        foreign.sent(theirs[3:].tobytes())
        foreign.send(theirs[:3].tobytes())
        theirs[3:] = np.frombuffer(foreign.receive(), np.float32)
        assert done.result(50).tolist() == theirs.tolist() == [10, 11, 12, 13, 14]
        foreign.sent(theirs[:3].tobytes())
        # Fewer elements than members: to the first, and back.
        done = pool.submit(group.all_reduce, np.full(1, 5, np.int32))
        foreign.send(np.full(1, 7, np.int32).tobytes())
        assert np.frombuffer(foreign.receive(), np.int32) == [12]
        assert done.result(50) == [12]
        foreign.sent(np.full(1, 7, np.int32).tobytes())
        foreign.send(b"bytes")
        assert member.collective_receive(1) == b"bytes"
        foreign.sent(b"bytes")
        done = pool.submit(group.all_reduce, mine)
        foreign.send(b"three")
        assert foreign.receive()
        with pytest.raises(CollectiveMismatch, match="rank 1 sent 5 bytes, 8 were expected"):
            done.result(50)
    foreign.own.socket.close()
    foreign.incoming.socket.close()
    with pytest.raises(MemberUnreachableError):
        member.collective_send(1, b"nobody is there")


# What three workers of MindSpore 2.7 were seen to send when they summed [100, 101, ...], [200, ...] and [300, ...] on
# the CPU: five elements, then one. The first member's own messages, and those to it, by the other's rank.
CAPTURED_TO_FIRST = {2: [[304], [504, 506], [600, 603], [612], [300]], 1: [[200]]}
CAPTURED_OF_FIRST = {1: [[100, 101], [408], [606, 609], [600, 603], [600]], 2: [[600]]}


def test_conversation_captured_from_the_original_comes_out_the_same(
    serve: Any, join: Any, raw: Any, listener: Any
) -> None:
    service, [member] = workers(serve, join, 3, here=1)
    others = {rank: Foreign(service.address, raw, listener, f"foreign {rank}") for rank in (1, 2)}
    member.wait_ready(60)
    assert [one.meet(0) for one in others.values()] == [1, 2]
    group = MemberGroup(member)
    with ThreadPoolExecutor(1) as pool:
        for rank, messages in CAPTURED_TO_FIRST.items():
            for message in messages:
                others[rank].send(np.array(message, np.float32).tobytes())
        five = pool.submit(group.all_reduce, np.arange(5, dtype=np.float32) + 100)
        one = pool.submit(group.all_reduce, np.full(1, 100, np.float32))
        for rank, messages in CAPTURED_OF_FIRST.items():
            got = [np.frombuffer(others[rank].receive(), np.float32).tolist() for _ in messages]
            assert got == messages
        assert five.result(50).tolist() == [600, 603, 606, 609, 612]
        assert one.result(50).tolist() == [600]


def test_mailbox_gives_each_asker_its_own() -> None:
    box = Mailbox()
    first, second = Tag("g", 1, 0, "sum"), Tag("g", 2, 0, "sum")
    for tag, data in ((MESSAGE, b"user 1"), (first, b"late"), (second, b"step"), (MESSAGE, b"user 2"), (None, b"old")):
        box.put(ONE, tag, data)
    assert box.take_step(ONE, second, 0, BOTH) == b"step"
    box.put(ONE, Tag("g", 3, 0, "sum"), b"next")
    with pytest.raises(CollectiveTimeout, match="given up by worker 1"):
        box.take_step(ONE, second, 0, BOTH)
    assert [box.take(ONE, 0) for _ in range(4)] == [b"user 1", b"user 2", b"old", None]
    with pytest.raises(CollectiveMismatch, match="worker 1 runs sum, but this member runs max"):
        box.take_step(ONE, Tag("g", 3, 0, "max"), 0, BOTH)
    box.forget("g")
    assert box.take_step(ONE, Tag("g", 3, 0, "sum"), 0, BOTH) is None
    names = {ONE: "one", TWO: "two"}
    box.set_members(names, frozenset())
    box.set_members(names, frozenset([TWO]))
    box.put(ONE, second, b"already here")
    assert box.take_step(ONE, second, 0, BOTH) == b"already here"
    assert box.take_step(ONE, second, 50, BOTH) is None
    assert box.lost(BOTH) == TWO
    box.set_members(names, frozenset())
    assert box.lost(BOTH) == TWO
    assert box.lost(box.ends(BOTH)) is None
    now = box.ends(BOTH)
    box.set_members({**names, TWO: "another"}, frozenset())
    assert box.lost(now) == TWO
