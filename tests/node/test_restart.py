"""A node daemon that is killed under a live driver: another takes its place, and nothing is lost."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

import fastrt
from fastrt._core.objects import spill
from fastrt._core.repair import fsck
from fastrt.store import client as store_client
from fastrt.store.messages import Spill


@pytest.fixture
def runtime_of_its_own(tmp_path: Path) -> Iterator[fastrt.Runtime]:
    with fastrt.init(num_workers=2, object_store_memory=32 << 20, spill_dir=tmp_path) as started:
        yield started


@pytest.fixture
def kill_daemon(runtime_of_its_own, wait_until):
    def kill(wait: bool = True) -> None:
        old = daemon_pid(runtime_of_its_own)
        os.kill(old, signal.SIGKILL)
        if wait:
            wait_until(lambda: daemon_pid(runtime_of_its_own) not in (old, 0), "another daemon")

    return kill


def daemon_pid(runtime: fastrt.Runtime) -> int:
    pid, _ = store_client.require().client.segment.daemon
    return pid if psutil.pid_exists(pid) else 0


@fastrt.remote
def pid_after(path: str) -> int:
    """Say that it runs, wait for the file, and return the worker."""
    Path(path + ".started").touch()
    until = time.monotonic() + 20
    while not os.path.exists(path) and time.monotonic() < until:
        os.sched_yield()
    return os.getpid()


@fastrt.remote
def add_one(x: int) -> int:
    return x + 1


@fastrt.remote
def nested(depth: int) -> int:
    return 0 if depth == 0 else 1 + fastrt.get(nested.remote(depth - 1))


@fastrt.remote
def die_once(path: str) -> str:
    if not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "ran again"


def test_worker_paused_for_a_task_of_two_cpus_works_again(kill_daemon, tmp_path, wait_until):
    gates = [str(tmp_path / name) for name in ("wide", "one", "two")]
    refs = [pid_after.options(num_cpus=2).remote(gates[0])]
    wait_until(lambda: os.path.exists(gates[0] + ".started"), "the task to run")
    wait_until(lambda: any(row["parked"] for row in workers()), "the other worker to pause")
    kill_daemon()
    Path(gates[0]).touch()
    refs += [pid_after.remote(gate) for gate in gates[1:]]
    wait_until(lambda: all(os.path.exists(gate + ".started") for gate in gates[1:]), "both workers to run a task")
    for gate in gates[1:]:
        Path(gate).touch()
    assert len(set(fastrt.get(refs[1:], timeout=60))) == 2


def test_running_tasks_go_on_in_their_workers(kill_daemon, tmp_path, wait_until):
    gate = str(tmp_path / "gate")
    ref = pid_after.remote(gate)
    wait_until(lambda: os.path.exists(gate + ".started"), "the task to run")
    runner = next(row["pid"] for row in workers() if row["task"] is not None)
    kill_daemon()
    Path(gate).touch()
    assert fastrt.get(ref, timeout=60) == runner


def workers():
    from fastrt._core.memory import clients

    rows = clients.table(store_client.require().client.segment)
    return [row for row in rows if row["kind"] == clients.KIND_WORKER]


def test_tasks_are_submitted_and_run_while_no_daemon_is_there(kill_daemon):
    assert fastrt.get(add_one.remote(0)) == 1
    kill_daemon(wait=False)
    assert fastrt.get([add_one.remote(i) for i in range(1000)], timeout=60) == list(range(1, 1001))


def test_worker_death_is_noticed_by_the_new_daemon(kill_daemon, tmp_path):
    kill_daemon()
    assert fastrt.get(die_once.remote(str(tmp_path / "once")), timeout=60) == "ran again"


def test_worker_that_dies_while_no_daemon_is_there_is_recovered(kill_daemon, tmp_path, wait_until):
    gate = str(tmp_path / "gate")
    ref = pid_after.remote(gate)
    wait_until(lambda: os.path.exists(gate + ".started"), "the task to run")
    runner = next(row["pid"] for row in workers() if row["task"] is not None)
    kill_daemon(wait=False)
    os.kill(runner, signal.SIGKILL)
    Path(gate).touch()
    assert fastrt.get(ref, timeout=60) not in (runner, 0)


def test_put_that_waits_for_room_goes_on_with_the_next_daemon(runtime_of_its_own, kill_daemon, monkeypatch):
    store, asked = store_client.require(), threading.Event()
    tell = store.tell

    def noted(message):
        answer = tell(message)
        if isinstance(message, Spill):
            asked.set()
        return answer

    monkeypatch.setattr(store, "tell", noted)
    refs = [fastrt.put(np.full(7 << 20, k, np.uint8)) for k in range(4)]
    asked.clear()
    os.kill(daemon_pid(runtime_of_its_own), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(fastrt.put, np.full(7 << 20, 4, np.uint8))
        assert asked.wait(30)
        kill_daemon()  # and what it was asked for is gone
        refs.append(late.result(timeout=30))
    assert [int(fastrt.get(ref)[-1]) for ref in refs] == [0, 1, 2, 3, 4]


def test_nested_tasks_find_workers_after_a_restart(kill_daemon):
    assert fastrt.get(nested.remote(4), timeout=60) == 4
    kill_daemon()
    assert fastrt.get(nested.remote(10), timeout=60) == 10


def test_daemon_can_be_killed_again_and_again(kill_daemon):
    for k in range(3):
        kill_daemon()
        assert fastrt.get(add_one.remote(k), timeout=60) == k + 1
    assert fsck.fsck(store_client.require().client) == []


def test_output_arrives_after_a_restart(kill_daemon, monkeypatch, wait_until):
    output = io.StringIO()  # not capfd: text that comes while it is read is lost
    monkeypatch.setattr(sys, "stdout", output)

    @fastrt.remote
    def say(word: str) -> None:
        print(word)  # noqa: T201  (this is what is tested)

    def arrives(word: str) -> None:
        fastrt.get(say.remote(word), timeout=60)
        wait_until(lambda: word in output.getvalue(), word)

    arrives("before")
    kill_daemon(wait=False)
    arrives("after")


def test_spilled_values_come_back_through_the_new_daemon(kill_daemon):
    refs = [fastrt.put(np.full(1 << 20, k, np.uint8)) for k in range(48)]
    assert any(spill.is_spilled(store_client.require().client, ref) for ref in refs)
    kill_daemon()
    assert [int(fastrt.get(ref)[-1]) for ref in refs] == list(range(48))


def test_daemon_that_dies_too_often_is_given_up_with_a_clear_error(kill_daemon, wait_until):
    ref = fastrt.put([1, 2, 3])
    for _ in range(5):
        kill_daemon()
    kill_daemon(wait=False)
    wait_until(lambda: not fastrt.is_initialized(), "the end of the session")
    with pytest.raises(fastrt.FastrtError, match="daemon died"):
        fastrt.get(ref)


@fastrt.remote(resources={"license": 1})
class Licensed:
    def ready(self) -> bool:
        return True


def test_actor_whose_process_is_on_its_way_keeps_its_resources(wait_until):
    with fastrt.init(num_workers=2, object_store_memory=32 << 20, resources={"license": 1}) as runtime:
        zygote = psutil.Process(runtime._processes.zygote.pid)
        zygote.suspend()  # the order to fork waits in its socket
        first = Licensed.remote()
        wait_until(lambda: "license" not in fastrt.available_resources(), "the daemon to order the process")
        old = daemon_pid(runtime)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: daemon_pid(runtime) not in (old, 0), "another daemon")
        second = Licensed.remote()
        zygote.resume()
        assert fastrt.get(first.ready.remote(), timeout=30)
        assert "license" not in fastrt.available_resources()
        late = second.ready.remote()
        assert fastrt.wait([late], timeout=0.2)[0] == []
        fastrt.kill(first)
        assert fastrt.get(late, timeout=30)


def test_requested_resources_are_known_to_the_next_daemon(kill_daemon):
    from fastrt.ray.autoscaler.sdk import request_resources

    request_resources(num_cpus=2, bundles=[{"GPU": 0.5}])
    kill_daemon()
    assert fastrt.waiting_demand()["requested"] == [{"CPU": 2.0}, {"GPU": 0.5}]


def test_settings_are_in_no_command_line_which_all_users_of_the_machine_can_read(tmp_path, wait_until):
    """A setting may be a secret: the URL of a spill folder, or a handler's password in `logging`."""
    secret = "the-password-of-a-log-handler"
    with fastrt.init(1, 32 << 20, spill_dir=tmp_path, labels={"team": secret}) as started:
        for _ in range(2):
            assert fastrt.get(add_one.remote(1)) == 2
            processes = psutil.Process().children(recursive=True)
            assert daemon_pid(started) in [one.pid for one in processes]
            for one in processes:
                assert secret.encode() not in Path(f"/proc/{one.pid}/cmdline").read_bytes(), one.name()
            assert fastrt.nodes()[0]["Labels"]["team"] == secret
            killed = daemon_pid(started)
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda before=killed: daemon_pid(started) not in (before, 0), "another daemon")


def test_settings_longer_than_an_argument_may_be(tmp_path):
    resources = {f"a resource with a long name, number {k}": 1 for k in range(4000)}
    with fastrt.init(1, 32 << 20, spill_dir=tmp_path, resources=resources):
        assert fastrt.get(add_one.options(resources=resources).remote(1)) == 2
        assert resources.keys() < fastrt.cluster_resources().keys()


def test_settings_that_are_too_long_are_refused_in_words():
    with pytest.raises(fastrt.ConfigError, match=r"the settings have \d+ bytes together; at most 1048576"):
        fastrt.init(1, resources=dict.fromkeys(map(str, range(100_000)), 1))
    assert not fastrt.is_initialized()


@pytest.mark.parametrize(
    ("limit", "act"),
    [
        pytest.param("NOFILE", "[fastrt.get(Total.remote().add.remote(5))]", id="its main thread: no descriptors"),
        pytest.param("AS", "[fastrt.put(np.full(1 << 19, k)) for k in range(16)]", id="another thread: no memory"),
    ],
)
def test_daemon_that_fails_by_an_error_of_its_own_is_replaced(program, limit, act):
    out, err = program(
        f"""
        import os, resource
        import numpy as np
        import fastrt
        from fastrt._core.repair import fsck
        from fastrt.store import client

        @fastrt.remote
        class Total:
            def __init__(self):
                self.total = 0

            def add(self, amount):
                self.total += amount
                return self.total

        @fastrt.remote
        def wait_for(path):
            while not os.path.exists(path):
                os.sched_yield()
            return 7

        with fastrt.init(2, "32MiB") as rt:
            value, total = fastrt.put(b"x" * 1000), Total.remote()
            running = wait_for.remote("go")
            fastrt.get(total.add.remote(1))
            old = rt._processes.daemon
            resource.prlimit(old.pid, resource.RLIMIT_{limit}, (1, 1))
            kept = {act}
            print("ended by", -old.wait(60))
            open("go", "w").close()
            print(fastrt.get(running), fastrt.get(total.add.remote(1)), fastrt.get(value) == b"x" * 1000)
            print([fastrt.get(one) for one in [Total.remote().add.remote(k) for k in range(3)]])
            print("faults", fsck.fsck(client.require().client))
        """
    ).finish()
    assert out.splitlines() == ["ended by 9", "7 2 True", "[0, 1, 2]", "faults []"]
    assert "fastrt: the node daemon failed, and another takes its place: " in err
    assert "Traceback" in err
