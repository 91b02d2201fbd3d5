"""Objects of a lost node: made again by running again what made them there, or lost with a reason."""

import threading
from pathlib import Path

import numpy as np
import pytest

import fastrt


@pytest.fixture
def head(start, runtime_dir):
    """A head without workers, and this process at it."""
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        yield head


def lose(node, refs, start, head, gate):
    """Kill the node once it has refs that are not ready, and let another do its work."""
    assert fastrt.wait(refs, num_returns=len(refs), timeout=0.2)[0] == []
    node.kill()
    Path(gate).touch()
    return start("--address", head.head, "--num-workers", "2", "--name", "three")


@fastrt.remote
def part(gate, k):
    """An array, once there is a file."""
    while not Path(gate).exists():
        threading.Event().wait(0.005)
    return np.full(20_000, k)


@fastrt.remote
def late(gate, *values):
    """References, once there is a file."""
    while not Path(gate).exists():
        threading.Event().wait(0.005)
    return [fastrt.put(value) for value in values]


@fastrt.remote
def parts(gate, runs, first):
    """References to what is not ready, among others, and one to a value that contains references in its turn."""
    Path(runs, str(len(list(Path(runs).iterdir())))).touch()
    return {
        "ready": fastrt.put(7),
        "parts": [part.remote(gate, first + k) for k in range(3)],
        "late": late.remote(gate, 5, "x"),
    }


@fastrt.remote
def total(array, ref):
    return int(array.sum()) + int(fastrt.get(ref[0]).sum())


@pytest.mark.long
def test_lost_objects_are_made_again_with_what_depends_on_them(head, start, tmp_path):
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    runs.mkdir()
    two = start("--address", head.head, "--num-workers", "4", "--name", "two")
    made = fastrt.get(parts.remote(str(gate), str(runs), fastrt.put(10)), timeout=60)
    assert fastrt.get(made["ready"], timeout=60) == 7
    sums = [total.remote(made["parts"][k], [made["parts"][k + 1]]) for k in range(2)]
    lose(two, [*made["parts"], made["late"], *sums], start, head, gate)
    assert [int(array[0]) for array in fastrt.get(made["parts"], timeout=40)] == [10, 11, 12]
    assert fastrt.get(fastrt.get(made["late"], timeout=40), timeout=40) == [5, "x"]
    assert fastrt.get(sums, timeout=40) == [20_000 * 21, 20_000 * 23]
    assert fastrt.get(made["ready"], timeout=60) == 7
    assert len(list(runs.iterdir())) == 2


@pytest.mark.long
def test_two_losses_one_after_the_other_are_survived_and_a_third_is_not(head, start, tmp_path):
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    runs.mkdir()
    node = start("--address", head.head, "--num-workers", "4", "--name", "two")
    many = parts.options(max_retries=2)
    made = fastrt.get(many.remote(str(gate), str(runs), 10), timeout=60)["parts"]
    for round_ in range(3):
        assert fastrt.wait(made, num_returns=3, timeout=0.5)[0] == []
        node.kill()
        if round_ == 2:
            break
        node = start("--address", head.head, "--num-workers", "4", "--name", f"node{round_}")
        deadline = threading.Event()
        while len(list(runs.iterdir())) < round_ + 2:
            deadline.wait(0.01)
    with pytest.raises(fastrt.ObjectLostError, match=r"task 'parts' .* may not run again .max_retries"):
        fastrt.get(made, timeout=40)


@pytest.mark.long
def test_object_that_may_not_be_made_again_says_why(head, start, tmp_path):
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    runs.mkdir()
    two = start("--address", head.head, "--num-workers", "4", "--name", "two")
    once = parts.options(max_retries=0).remote(str(gate), str(runs), 10)
    made = fastrt.get(once, timeout=60)["parts"]
    lose(two, made, start, head, gate)
    with pytest.raises(
        fastrt.ObjectLostError, match=r"task 'parts' .*node two was lost.*may not run again .max_retries"
    ):
        fastrt.get(made, timeout=40)


@pytest.mark.long
def test_object_that_an_actors_method_returned_is_lost_with_a_reason(head, start, tmp_path):
    gate = tmp_path / "gate"
    two = start("--address", head.head, "--num-workers", "4", "--name", "two")

    @fastrt.remote
    class Giver:
        def give(self):
            return [part.remote(str(gate), 1)]

    giver = Giver.remote()
    given = fastrt.get(giver.give.remote(), timeout=60)
    lose(two, given, start, head, gate)
    with pytest.raises(fastrt.ObjectLostError, match=r"node two was lost.*no task returned it, but an actor's method"):
        fastrt.get(given, timeout=40)


@pytest.mark.long
def test_what_is_remembered_is_bounded(start, runtime_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTRT_LINEAGE_BYTES", "100KiB")
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    gate, runs = tmp_path / "gate", tmp_path / "runs"
    runs.mkdir()
    two = start("--address", head.head, "--num-workers", "6", "--name", "two")

    @fastrt.remote
    def with_much(gate, much):
        return [part.remote(gate, len(much))]

    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        first = fastrt.get(with_much.remote(str(gate), b"x" * 90_000), timeout=60)
        second = fastrt.get(with_much.remote(str(gate), b"x" * 20_000), timeout=60)
        lose(two, [*first, *second], start, head, gate)
        assert fastrt.get(second, timeout=40)[0][0] == 20_000
        with pytest.raises(
            fastrt.ObjectLostError, match=r"task .*with_much.*dropped because lineage_bytes was exceeded"
        ):
            fastrt.get(first, timeout=40)


@fastrt.remote
def large():
    return np.ones(25 * 10**6, np.uint8)


@fastrt.remote
def passed_on(array):
    return array


@pytest.mark.long
def test_a_chain_over_more_than_the_small_stores_of_its_nodes_is_made_again(start, runtime_dir):
    head = start("--head", "--port", "0", "--num-workers", "0", "--object-store-memory", "64MiB", "--name", "one")
    two = start("--address", head.head, "--num-workers", "1", "--object-store-memory", "64MiB", "--name", "two")
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        made = large.remote()
        for _ in range(3):
            made = passed_on.remote(made)
        assert fastrt.wait([made], timeout=60)[0] == [made]
        two.kill()
        start("--address", head.head, "--num-workers", "1", "--object-store-memory", "128MiB", "--name", "three")
        assert fastrt.get(passed_on.remote(made), timeout=100).sum() == 25 * 10**6


@pytest.mark.long
def test_task_that_makes_something_else_the_second_time_is_told(head, start, tmp_path):
    gate = tmp_path / "gate"

    @fastrt.remote
    def fewer(gate, ran):
        if Path(ran).exists():
            return []
        Path(ran).touch()
        return [part.remote(gate, 1)]

    two = start("--address", head.head, "--num-workers", "4", "--name", "two")
    made = fastrt.get(fewer.remote(str(gate), str(tmp_path / "ran")), timeout=60)
    lose(two, made, start, head, gate)
    with pytest.raises(fastrt.ObjectLostError, match="when it ran again it made no such object"):
        fastrt.get(made, timeout=40)
