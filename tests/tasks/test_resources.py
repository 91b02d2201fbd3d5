"""Tasks that demand resources, on one node: who waits, who runs, who gets what back, and what is refused."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import fastrt
from fastrt.errors import InfeasibleTaskError

MEMORY = 1 << 30


@pytest.fixture(scope="module")
def rt(runtime_dir):
    folders = {"runtime_dir": runtime_dir, "spill_dir": runtime_dir.parent / "spill"}
    with fastrt.init(2, "64MiB", memory=MEMORY, resources={"gpu": 1, "seat": 1.5}, **folders) as runtime:
        yield runtime


@fastrt.remote
def add(a, b=1):
    return a + b


@fastrt.remote(max_retries=3)
def hold(folder, name):
    """Say that it runs, by a file with its pid, and end when another file is there."""
    mine = Path(folder, name)
    mine.with_suffix(".new").write_text(str(os.getpid()))
    mine.with_suffix(".new").rename(mine)
    pause = threading.Event()
    while not mine.with_suffix(".gate").exists():
        pause.wait(0.002)
    return name


class Holder:
    """Tasks that run until they are told to end."""

    def __init__(self, folder, wait_until):
        self.folder, self.wait_until, self.refs = folder, wait_until, {}

    def start(self, name, **options):
        self.refs[name] = hold.options(**options).remote(str(self.folder), name)

    def runs(self, name):
        return (self.folder / name).exists()

    def wait(self, *names):
        self.wait_until(lambda: all(self.runs(name) for name in names), f"{names} to run", 30)

    def pid(self, name):
        return int((self.folder / name).read_text())

    def end(self, *names):
        for name in names:
            (self.folder / f"{name}.gate").touch()
            assert fastrt.get(self.refs[name], timeout=30) == name


@pytest.fixture
def holder(tmp_path, wait_until):
    holder = Holder(tmp_path, wait_until)
    yield holder
    for name in holder.refs:
        (tmp_path / f"{name}.gate").touch()
    fastrt.wait(list(holder.refs.values()), num_returns=len(holder.refs), timeout=30)
    holder.refs.clear()


def barrier_of_tasks():
    """A task of each kind in its turn: by then everything submitted before has been looked at."""
    assert fastrt.get(add.options(num_cpus=0).remote(1), timeout=30) == 2
    assert fastrt.get(add.remote(1), timeout=30) == 2


GPU = {"resources": {"gpu": 1}, "num_cpus": 0}


def test_arguments_and_results_are_those_of_any_task(rt):
    needy = add.options(num_gpus=1)
    assert fastrt.get(needy.remote(1, b=2)) == 3
    assert fastrt.get(needy.remote(needy.remote(1), needy.remote(2))) == 5
    assert fastrt.get(needy.remote([1] * 100_000, [2])) == [1] * 100_000 + [2]
    assert fastrt.get(needy.options(name="x").remote(b"a", b"b")) == b"ab"
    with pytest.raises(TypeError, match="unsupported operand"):
        fastrt.get(needy.remote(1, "b"))


def test_task_whose_resources_are_taken_waits_and_keeps_nobody_from_theirs(rt, holder):
    holder.start("first", **GPU)
    holder.wait("first")
    holder.start("second", **GPU)
    holder.start("seat", num_cpus=0, resources={"seat": 1})
    holder.wait("seat")
    barrier_of_tasks()
    assert not holder.runs("second")
    holder.end("first")
    holder.wait("second")


def test_fractions_count_exactly(rt, holder):
    for k in range(21):
        holder.start(f"tenth{k}", num_cpus=0.1)
    holder.wait_until(lambda: sum(holder.runs(f"tenth{k}") for k in range(21)) == 20, "twenty of them", 60)
    barrier_of_tasks()
    assert sum(holder.runs(f"tenth{k}") for k in range(21)) == 20
    ran = [f"tenth{k}" for k in range(21) if holder.runs(f"tenth{k}")]
    holder.end(ran[0])
    holder.wait_until(lambda: sum(holder.runs(f"tenth{k}") for k in range(21)) == 21, "the last one")


def test_a_third_and_two_thirds_of_a_seat_are_one(rt, holder):
    holder.start("half", num_cpus=0, resources={"seat": 0.5})
    holder.start("one", num_cpus=0, resources={"seat": 1})
    holder.wait("half", "one")
    holder.start("least", num_cpus=0, resources={"seat": 0.0001})
    barrier_of_tasks()
    assert not holder.runs("least")
    holder.end("half")
    holder.wait("least")


def test_task_that_waits_in_get_lends_its_cpus_to_what_it_waits_for(rt):
    @fastrt.remote(num_cpus=2)
    def nested(depth):
        return 0 if depth == 0 else 1 + fastrt.get(nested.remote(depth - 1))

    assert fastrt.get(nested.remote(5), timeout=60) == 5


def test_killed_workers_resources_come_back_and_its_task_runs_again(rt, holder):
    holder.start("victim", **GPU)
    holder.wait("victim")
    pid = holder.pid("victim")
    holder.start("next", **GPU)
    (holder.folder / "victim").unlink()
    os.kill(pid, signal.SIGKILL)
    holder.wait_until(lambda: holder.runs("victim") != holder.runs("next"), "one of the two to have it")
    holder.end(*sorted(holder.refs, key=lambda name: not holder.runs(name)))


@pytest.mark.parametrize("force", [False, True])
def test_cancelled_tasks_resources_come_back(rt, holder, force):
    holder.start("running", **GPU)
    holder.wait("running")
    holder.start("waiting", **GPU)
    holder.start("next", **GPU)
    for name in ("waiting", "running"):
        fastrt.cancel(holder.refs[name], force=force)
        with pytest.raises(fastrt.TaskCancelledError):
            fastrt.get(holder.refs[name], timeout=30)
    holder.wait("next")
    assert not holder.runs("waiting")
    holder.end("next")


def test_task_that_raises_is_retried_with_its_resources(rt, tmp_path):
    @fastrt.remote(num_gpus=1, retry_exceptions=True)
    def second_time(path):
        if not os.path.exists(path):
            Path(path).touch()
            raise OSError("the first time")
        return os.getpid()

    refs = [second_time.remote(str(tmp_path / str(k))) for k in range(10)]
    assert all(pid > 0 for pid in fastrt.get(refs, timeout=30))


def test_many_tasks_use_one_gpu_in_turn(rt, tmp_path):
    @fastrt.remote(num_gpus=1)
    def alone(path):
        fd = os.open(path, os.O_CREAT | os.O_EXCL)  # fails when another has it
        os.close(fd)
        os.unlink(path)
        return 1

    assert sum(fastrt.get([alone.remote(str(tmp_path / "gpu")) for _ in range(60)], timeout=60)) == 60


def test_what_nothing_here_has_is_refused_at_once_in_words(rt):
    for options, words in (
        (
            {"num_cpus": 3},
            "'add' demands CPU 3, which no node has .this node: CPU 2, GPU 1, memory 1,024.0 MiB, seat 1.5.",
        ),
        ({"num_gpus": 2}, "demands CPU 1, GPU 2"),
        ({"resources": {"moon": 1}}, "demands CPU 1, moon 1"),
        ({"scheduling": "elsewhere"}, "demands CPU 1 on node 'elsewhere'"),
    ):
        with pytest.raises(fastrt.InfeasibleTaskError, match=words):
            fastrt.get(add.options(**options).remote(1), timeout=30)
    kept = [row for row in fastrt.list_tasks(state="failed") if row["type"] == "InfeasibleTaskError"]
    moon = [row for row in kept if "moon 1, which no node has" in row["message"]]
    assert [(row["name"], row["pid"], row["attempt"]) for row in moon] == [("add", 0, 0)]


def test_places_that_one_node_has_are_this_one(rt):
    here = rt.session
    affinities = [fastrt.NodeAffinity(here), fastrt.NodeAffinity("gone", soft=True)]
    for scheduling in ("spread", "pack", "SPREAD", here, *affinities):
        assert fastrt.get(add.options(scheduling_strategy=scheduling).remote(1), timeout=30) == 2
    assert fastrt.get(add.options(scheduling_strategy="DEFAULT", num_cpus=1).remote(1)) == 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_cpus": -1}, ValueError, "num_cpus=-1"),
        ({"num_cpus": "two"}, ValueError, "num_cpus='two'"),
        ({"num_cpus": 0.00001}, ValueError, "smallest part"),
        ({"num_gpus": 1, "resources": {"gpu": 1}}, ValueError, "not both"),
        ({"resources": {"CPU": 1}}, ValueError, "say num_cpus"),
        ({"resources": {"": 1}}, ValueError, "name"),
        ({"resources": [1]}, ValueError, "amounts by name"),
        ({"resources": dict.fromkeys(map(str, range(100_000)), 1)}, ValueError, "ask for fewer"),
        ({"scheduling": 7}, TypeError, "scheduling is 7"),
        ({"scheduling": "spread", "scheduling_strategy": "SPREAD"}, TypeError, "two names"),
    ],
)
def test_wrong_demands_are_refused_where_they_are_written(options, error, words):
    with pytest.raises(error, match=words):
        fastrt.remote(**options)(lambda: None)
    with pytest.raises(error, match=words):
        add.options(**options)


def test_demands_survive_options_and_pickle(rt):
    needy = add.options(resources={"gpu": 0.5}, num_cpus=0.5).options(max_retries=0)

    @fastrt.remote
    def submit(function):
        return fastrt.get(function.remote(1)), function._demand

    assert fastrt.get(submit.remote(needy)) == (2, needy._demand)
    assert needy._demand is not None
    assert add.options(num_cpus=1)._demand is add._demand is None


def test_memory_is_counted_in_bytes_and_admits_the_tasks_that_fit(rt, wait_until):
    half = fastrt.remote(memory=600 << 20)(fastrt.available_resources)
    wait_until(lambda: fastrt.available_resources()["memory"] == MEMORY, "the memory to be free")
    assert fastrt.cluster_resources()["memory"] == MEMORY
    assert {found["memory"] for found in fastrt.get([half.remote(), half.remote()])} == {MEMORY - (600 << 20)}
    with pytest.raises(InfeasibleTaskError, match=r"memory 2,048.0 MiB, which no node has .*memory 1,024.0 MiB"):
        fastrt.get(half.options(memory=2 << 30).remote())
    with pytest.raises(ValueError, match="memory is not set in resources: say memory"):
        half.options(resources={"memory": 1}).remote()


def test_actor_and_bundle_take_memory_while_they_exist(rt, wait_until):
    group = fastrt.placement_group([{"CPU": 1, "memory": 100 << 20}])
    assert group.wait(30)
    actor = fastrt.remote(memory=50 << 20)(dict).remote()
    wait_until(lambda: fastrt.available_resources()["memory"] == MEMORY - (150 << 20), "the memory that both take")
    inside = fastrt.PlacementGroupSchedulingStrategy(group, 0)
    assert fastrt.get(fastrt.remote(memory=100 << 20, scheduling_strategy=inside)(abs).remote(-1)) == 1
    with pytest.raises(ValueError, match=r"memory 200\.0 MiB is demanded of a placement group"):
        fastrt.remote(memory=200 << 20, scheduling_strategy=inside)(abs).remote(-1)
    fastrt.kill(actor)
    fastrt.remove_placement_group(group)
    wait_until(lambda: fastrt.available_resources()["memory"] == MEMORY, "the memory to be free")


def test_node_has_the_resources_that_ray_gives_each_node(rt):
    found = fastrt.cluster_resources(implied=True)
    (address,) = [name for name in found if name.startswith("node:") and name != "node:__internal_head__"]
    assert found[address] == found["node:__internal_head__"] == 1
    assert found["object_store_memory"] == 64 << 20
    assert fastrt.available_resources(implied=True)["object_store_memory"] <= 64 << 20
    assert not [name for name in fastrt.cluster_resources() if "node:" in name or "store" in name]
    here = fastrt.remote(resources={address: 0.01, "node:__internal_head__": 0.01})(abs)
    assert fastrt.get(here.remote(-3)) == 3


def test_task_of_several_cpus_waits_for_tasks_without_options_and_they_for_it(rt, holder):
    holder.start("first")
    holder.wait("first")
    holder.start("wide", num_cpus=2)
    assert fastrt.get([add.remote(k) for k in range(20)]) == list(range(1, 21))  # the other CPU works meanwhile
    assert not holder.runs("wide")
    holder.end("first")
    holder.wait("wide")
    small = [add.remote(k) for k in range(20)]
    assert fastrt.wait(small, timeout=0.2) == ([], small)
    holder.end("wide")
    assert fastrt.get(small) == list(range(1, 21))


def test_small_task_has_its_turn_among_wide_ones(rt, holder):
    @fastrt.remote
    def add_and_time(x):
        return x + 1, time.monotonic()

    holder.start("all", num_cpus=2)
    holder.wait("all")  # none of the others ends before the last one is submitted
    wide = [add_and_time.options(num_cpus=2).remote(k) for k in range(400)]
    small = add_and_time.remote(1)
    holder.end("all")
    value, ended = fastrt.get(small)
    values, ends = zip(*fastrt.get(wide), strict=True)
    assert (value, list(values)) == (2, list(range(1, 401)))
    assert ended < max(ends)


def test_wide_task_begins_after_small_ones_that_were_queued_before(rt):
    @fastrt.remote
    def nap():
        began = time.monotonic()
        threading.Event().wait(0.02)
        return began

    small = [nap.remote() for _ in range(40)]
    wide = nap.options(num_cpus=2).remote()
    assert max(fastrt.get(small)) < fastrt.get(wide)


@pytest.mark.long
def test_small_tasks_pause_shortly_while_a_wide_one_waits_for_a_long_one(rt, holder):
    holder.start("first")
    holder.wait("first")
    holder.start("wide", num_cpus=2)
    began, longest = time.monotonic(), 0.0
    while time.monotonic() - began < 5:
        submitted = time.monotonic()
        fastrt.get(add.remote(1))
        longest = max(longest, time.monotonic() - submitted)
    assert longest < 0.4, longest
    assert not holder.runs("wide")
    holder.end("first")
    holder.wait("wide")
    holder.end("wide")


@pytest.mark.long
def test_wide_task_has_its_turn_among_small_ones_that_never_end_together(rt):
    @fastrt.remote
    def nap(seconds):
        threading.Event().wait(seconds)

    running = [nap.remote(0.3), nap.remote(0.45)]
    wide = add.options(num_cpus=2).remote(1)
    began = time.monotonic()
    while not fastrt.wait([wide], timeout=0)[0] and time.monotonic() - began < 20:
        ended, running = fastrt.wait(running, timeout=0.01)
        running += [nap.remote(0.3) for _ in ended]
    assert fastrt.wait([wide], timeout=0)[0]
    fastrt.get(running)


def test_wide_task_does_not_stop_what_a_running_one_waits_for(rt, tmp_path):
    @fastrt.remote
    def waits(path):
        while not Path(path).exists():
            threading.Event().wait(0.002)

    running = waits.remote(str(tmp_path / "queued ran"))
    wide = add.options(num_cpus=2).remote(1)
    fastrt.remote(Path.touch).remote(tmp_path / "queued ran")
    assert fastrt.get([running, wide], timeout=30) == [None, 2]
