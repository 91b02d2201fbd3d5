"""Processes that have ended are listed, with the cause in Ray's words and the details in ours."""

import os
import signal
import subprocess
import sys

import pytest

from fastrt import ray
from fastrt.ray.util.state import get_worker, list_actors, list_nodes, list_tasks, list_workers
from fastrt.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Ends:
    def __init__(self, path=""):
        if path:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            raise ValueError("no such thing")

    def pid(self):
        return os.getpid()

    def leave(self):
        ray.actor.exit_actor()

    def exit(self, code):
        sys.exit(code)


@ray.remote(max_retries=0)
def pause(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    signal.pause()


@pytest.fixture
def session(runtime_dir, monkeypatch):
    monkeypatch.setenv("FASTRT_RUNTIME_DIR", str(runtime_dir))
    with ray.init(num_cpus=1, object_store_memory=64 << 20) as context:
        yield context


@pytest.fixture
def ended(wait_until):
    """The row of the process with a pid, once it is listed as ended."""

    def row_of(pid):
        def rows():
            return [row for row in list_workers(filters=[("pid", "=", pid)], limit=0) if not row.is_alive]

        wait_until(rows, f"the row of process {pid}")
        (row,) = rows()
        assert 0 < row.start_time_ms <= row.end_time_ms
        assert get_worker(row.worker_id) == row
        return row.exit_type, row.exit_detail

    return row_of


def pid_in(path, wait_until):
    wait_until(lambda: path.exists() and path.read_text(), "the process to start")
    return int(path.read_text())


def test_actors_that_their_programs_end(session, ended, tmp_path, wait_until):
    actor = Ends.remote()
    pid = ray.get(actor.pid.remote())
    (alive,) = list_workers(filters=[("pid", "=", pid)])
    assert (alive.is_alive, alive.exit_type, alive.end_time_ms) == (True, None, 0)
    ray.kill(actor)
    cause, detail = ended(pid)
    assert cause == "INTENDED_SYSTEM_EXIT"
    assert "kill" in detail
    actor = Ends.remote()
    pid = ray.get(actor.pid.remote())
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.leave.remote())
    cause, detail = ended(pid)
    assert cause == "INTENDED_USER_EXIT"
    assert "exit_actor" in detail
    broken = Ends.remote(str(tmp_path / "pid"))
    cause, detail = ended(pid_in(tmp_path / "pid", wait_until))
    assert cause == "USER_ERROR"
    assert "no such thing" in detail
    del broken
    group = ray.util.placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    actor = Ends.options(num_cpus=1, scheduling_strategy=strategy).remote()
    pid = ray.get(actor.pid.remote())
    ray.util.remove_placement_group(group)
    cause, detail = ended(pid)
    assert cause == "INTENDED_SYSTEM_EXIT"
    assert "placement group was removed" in detail


def test_crashes_have_the_signal_or_the_exit_code(session, ended, tmp_path, wait_until):
    actors = [Ends.remote() for _ in range(3)]
    killed, terminated, exited = ray.get([actor.pid.remote() for actor in actors])
    os.kill(killed, signal.SIGKILL)
    os.kill(terminated, signal.SIGTERM)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors[2].exit.remote(4))
    for pid, words in ((killed, ("SIGKILL", "OOM")), (terminated, ("SIGTERM",)), (exited, ("exit code 4",))):
        cause, detail = ended(pid)
        assert (cause, [detail.count(word) for word in words]) == ("SYSTEM_ERROR", [1] * len(words)), detail
    call = pause.remote(str(tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid", wait_until)
    (task,) = list_tasks(filters=[("name", "=", "pause")])
    assert task.state == "RUNNING"
    assert get_worker(task.worker_id).pid == task.worker_pid == pid
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(call)
    assert ended(pid)[0] == "SYSTEM_ERROR"
    (task,) = list_tasks(filters=[("name", "=", "pause")])
    assert task.state == "FAILED"
    assert get_worker(task.worker_id).pid == task.worker_pid == pid


def test_signal_without_a_name(session, ended, tmp_path, wait_until):
    """The daemon died of it, again and again."""
    call = pause.remote(str(tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid", wait_until)
    os.kill(pid, signal.SIGRTMIN + 6)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(call)
    cause, detail = ended(pid)
    assert cause == "SYSTEM_ERROR"
    assert f"signal {signal.SIGRTMIN + 6}" in detail


def test_workers_that_are_not_needed_any_more(session, ended, tmp_path, wait_until):
    pid = ray.get(ray.remote(max_calls=1)(os.getpid).remote())
    assert ended(pid)[0] == "INTENDED_SYSTEM_EXIT"
    call = pause.remote(str(tmp_path / "pid"))
    pid = pid_in(tmp_path / "pid", wait_until)
    ray.cancel(call, force=True)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(call)
    cause, detail = ended(pid)
    assert cause == "INTENDED_USER_EXIT"
    assert "cancelled" in detail


def test_other_programs_of_the_session(session, ended):
    text = f"import os; from fastrt import ray; ray.init({session['address']!r}); print(os.getpid()); ray.shutdown()"
    done = subprocess.run([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, check=True)
    assert ended(int(done.stdout))[0] == "INTENDED_USER_EXIT"
    assert list_nodes()[0].state == "ALIVE"


def test_number_of_dead_actors_that_are_listed(session, wait_until, monkeypatch):
    monkeypatch.setenv("RAY_maximum_gcs_destroyed_actor_cached_count", "2")
    actors = [Ends.options(lifetime="detached").remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    assert [row.state for row in list_actors()] == ["ALIVE"] * 3
    for actor in actors:
        ray.kill(actor)
    wait_until(lambda: [row.state for row in list_actors()] == ["DEAD"] * 2, "two rows of dead actors")
