"""What a cluster survives: the death of an uplink, of a node, of the head; and what it refuses."""

import os
import signal
import subprocess
import threading

import numpy as np
import psutil
import pytest

import fastrt
from fastrt.net.grpc.identity import new_token
from fastrt.store import join
from support.cluster import START, RunningNode


@pytest.fixture
def pair(start, runtime_dir):
    """A head without workers, a node with two, and this process at the head."""
    head = start("--head", "--port", "0", "--num-workers", "0", "--name", "one")
    other = start("--address", head.head, "--num-workers", "2", "--name", "two")
    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        yield head, other


@fastrt.remote(max_retries=20)
def slow(value, seconds):
    threading.Event().wait(seconds)
    return value + 1


def test_a_killed_uplink_loses_nothing(pair, wait_until):
    refs = [slow.remote(k, 0.01) for k in range(200)]
    for victim in (pair[0], pair[1], pair[0]):
        assert fastrt.wait(refs, num_returns=20, timeout=30)[1]
        dead = victim.kill_child("fastrt.runtime.uplink")
        wait_until(
            lambda victim=victim, dead=dead: victim.child("fastrt.runtime.uplink") not in (None, dead), "another"
        )
    assert fastrt.get(refs, timeout=60) == list(range(1, 201))


def test_uplink_that_can_open_no_files_waits_for_the_next_daemon_until_it_can(pair, wait_until):
    """The uplink stood still: its thread that connects to the next daemon had ended for lack of a descriptor."""
    head = pair[0]
    uplink = head.child("fastrt.runtime.uplink")
    before = uplink.rlimit(psutil.RLIMIT_NOFILE)
    uplink.rlimit(psutil.RLIMIT_NOFILE, (1, before[1]))

    (dead,) = head.named("fastrt-daemon")
    dead.kill()

    def is_replaced():
        return head.named("fastrt-daemon") not in ([], [dead]) and join.answers(head.note.socket_path)

    wait_until(is_replaced, "another daemon")
    uplink.rlimit(psutil.RLIMIT_NOFILE, before)

    @fastrt.remote(num_cpus=2)  # the head's node has no CPUs, and its daemon forwards the task by the uplink
    def both():
        return "ran"

    assert fastrt.get(both.remote(), timeout=30) == "ran"
    assert head.child("fastrt.runtime.uplink") == uplink


def test_a_lost_node_costs_nothing_but_time(pair, start):
    head, other = pair
    refs = [slow.remote(k, 0.02) for k in range(100)]
    fastrt.wait(refs, num_returns=10, timeout=30)
    other.kill()
    start("--address", head.head, "--num-workers", "2", "--name", "three")
    assert fastrt.get(refs, timeout=60) == list(range(1, 101))


@pytest.mark.long
def test_a_task_whose_attempts_are_used_up_by_lost_nodes_says_so(pair):
    once = slow.options(max_retries=0).remote(1, 60)
    assert fastrt.wait([once], timeout=1.0)[0] == []
    pair[1].kill()
    with pytest.raises(fastrt.WorkerCrashedError, match="after attempt 1: node two was lost"):
        fastrt.get(once, timeout=30)


@pytest.mark.long
def test_nodes_work_on_while_the_head_is_dead_and_join_the_next(pair, start, wait_until):
    head = pair[0]
    assert fastrt.get(slow.remote(1, 0), timeout=60) == 2
    dead = head.kill_child("fastrt.cluster.head")
    assert fastrt.get([slow.remote(k, 0) for k in range(100)], timeout=60) == list(range(1, 101))
    wait_until(lambda: head.child("fastrt.cluster.head") not in (None, dead), "another head")
    pair[1].kill()
    start("--address", head.head, "--num-workers", "1", "--name", "three")
    assert fastrt.get([slow.remote(k, 0) for k in range(100)], timeout=30) == list(range(1, 101))


def test_a_stopped_node_ends_with_its_drivers_told(pair):
    ref = slow.remote(1, 60)
    _, err = pair[0].stop()
    assert pair[0].process.returncode == 0, err
    with pytest.raises(fastrt.FastrtError, match="its node was stopped"):
        fastrt.get(ref, timeout=30)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_nodes_that_are_stopped_while_they_work_have_nothing_to_say(pair, first):
    @fastrt.remote
    def counted():
        for k in range(1 << 20):
            threading.Event().wait(0.001)
            yield k

    refs = [slow.remote(k, 0.05) for k in range(100)]
    items = counted.remote()
    assert fastrt.get(next(items), timeout=60) == 0
    for node in (pair[first], pair[1 - first]):
        _, err = node.stop(signal.SIGINT)  # SIGTERM would wait for the generator
        assert (node.process.returncode, err) == (0, "")
    assert len(refs) == 100


@pytest.mark.long
def test_a_busy_node_forwards_what_would_wait_and_keeps_the_rest(start, runtime_dir):
    head = start("--head", "--port", "0", "--num-workers", "1", "--name", "one")
    start("--address", head.head, "--num-workers", "1", "--name", "two")

    @fastrt.remote
    def where():
        from fastrt.store import client

        threading.Event().wait(0.1)
        return client.require().client.segment.session

    with fastrt.init(address="auto", runtime_dir=runtime_dir) as rt:
        places = fastrt.get([where.remote() for _ in range(30)], timeout=60)
        assert len(set(places)) == 2
        assert places.count(rt.session) >= 5
        one = [fastrt.get(where.remote(), timeout=30) for _ in range(3)]
        assert set(one) == {rt.session}  # no task waits, so none is forwarded


def test_cancelled_tasks_end_wherever_two_busy_nodes_have_lent_them(start, runtime_dir, tmp_path, wait_until):
    """Both have more tasks than they can run at once, small ones first: then they forward most."""
    head = start("--head", "--port", "0", "--num-workers", "1", "--name", "one")
    start("--address", head.head, "--num-workers", "1", "--name", "two")

    @fastrt.remote
    def begun(k):
        (tmp_path / f"begun-{k}-{os.getpid()}").touch()
        threading.Event().wait(0.2)
        (tmp_path / f"ended-{k}-{os.getpid()}").touch()
        return k

    @fastrt.remote
    def quick(k):
        return k

    with fastrt.init(address=head.head, runtime_dir=runtime_dir):
        assert fastrt.get([quick.remote(k) for k in range(3000)], timeout=60) == list(range(3000))
        refs = [begun.remote(k) for k in range(100)]
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 4, "both nodes to work")
        for ref in refs:
            fastrt.cancel(ref)
        assert fastrt.get([quick.remote(k) for k in range(10)], timeout=60) == list(range(10))

        def none_begins():
            begun_before = set(tmp_path.glob("begun-*"))
            assert fastrt.get([quick.remote(k) for k in range(3000)], timeout=60) == list(range(3000))
            return set(tmp_path.glob("begun-*")) == begun_before

        # A cancellation goes from node to node after its task, and small tasks may be done before it arrives.
        wait_until(none_begins, "no cancelled task to begin any more")
        # A worker may begin one task after the other, each just before its cancellation arrives and ends it.
        assert len(list(tmp_path.glob("ended-*"))) < 20


@pytest.mark.long
def test_a_function_that_holds_a_reference_takes_it_along(pair):
    array = fastrt.put(np.arange(1000))

    @fastrt.remote
    def with_closure():
        return int(fastrt.get(array).sum())

    assert fastrt.get(with_closure.remote(), timeout=60) == 499_500


def refusal(runtime_dir, *options, **env):
    result = subprocess.run(
        [*START, *options],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB", **env},
    )
    assert result.returncode != 0, result.stdout
    return result.stderr


def test_an_uplink_that_waits_for_the_head_ends_with_its_node(runtime_dir, tmp_path, free_port, wait_until):
    token = tmp_path / "token"
    token.write_text(new_token())
    token.chmod(0o600)
    words = [*START, "--address", f"127.0.0.1:{free_port}", "--token-file", str(token), "--num-workers", "0"]
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as node:
        assert node.stderr is not None
        assert "This node waits for it" in node.stderr.readline()
        children = psutil.Process(node.pid).children(recursive=True)
        assert any("fastrt.runtime.uplink" in " ".join(child.cmdline()) for child in children)
        node.kill()
        wait_until(lambda: not psutil.wait_procs(children, 0)[1], "the node's processes to end")


def damaged(token):
    return token[:-1] + ("0" if token[-1] != "0" else "1")


def test_mistakes_are_told_in_words(runtime_dir, tmp_path):
    for name, text, mode in (
        ("open", "x", 0o644),
        ("old", "0" * 64, 0o600),
        ("damaged", new_token()[:-1] + "g", 0o600),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    for options, words in (
        (("--address", "127.0.0.1:1"), "the token of the cluster at 127.0.0.1:1 is not known here"),
        (("--head", "--token-file", str(tmp_path / "open")), "Other users may read the file"),
        (("--head", "--token-file", str(tmp_path / "old")), "not a cluster's token"),
        (("--head", "--token-file", str(tmp_path / "damaged")), "not a cluster's token"),
        (("--head", "--token", damaged(new_token())), "this token is damaged"),
    ):
        assert words in refusal(runtime_dir, *options), options


def test_a_driver_without_a_node_is_told_what_to_start(runtime_dir):
    with pytest.raises(fastrt.AttachError, match=r"no node of '127.0.0.1:1'.*fastrt start --address 127.0.0.1:1"):
        fastrt.init(address="127.0.0.1:1", runtime_dir=runtime_dir)
    with pytest.raises(fastrt.AttachError, match="fastrt start --head"):
        fastrt.init(address="auto", runtime_dir=runtime_dir)
    with pytest.raises(fastrt.ConfigError, match="give them to `fastrt start`"):
        fastrt.init(2, address="auto", runtime_dir=runtime_dir)


class Desk:
    def pid(self):
        return os.getpid()


def test_a_node_without_workers_runs_what_asks_for_its_resources(runtime_dir):
    node = RunningNode(runtime_dir, "--head", "--port", "0", "--num-workers", "0", "--resources", '{"pen": 1}')
    try:
        with fastrt.init(address=node.head, runtime_dir=runtime_dir):
            task = fastrt.remote(num_cpus=0, resources={"pen": 1})(os.getpid)
            assert fastrt.get(task.remote(), timeout=30) > 0
            actor = fastrt.remote(resources={"pen": 1})(Desk).remote()
            assert fastrt.get(actor.pid.remote(), timeout=30) > 0
    finally:
        node.stop()
