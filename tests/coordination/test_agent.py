"""The agent against a coordinator in this process: what a program sees."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastrt.coordination import (
    Agent,
    CoordinationError,
    CoordinationTimeoutError,
    CoordinatorLostError,
    KeyExistsError,
    KeyMissingError,
    connect,
    connect_async,
    open_keys,
)
from fastrt.errors import ForkedRuntimeError
from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set


def together(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(50) for future in [pool.submit(work) for work in works]]


def join(address: str, count: int, **options: Any) -> list[Agent]:
    return together(*[lambda rank=rank: connect(address, rank, **options) for rank in range(count)])


def leave(agents: list[Agent], wait: bool = True) -> None:
    together(*[lambda agent=agent: agent.close(wait) for agent in agents])


def test_keys_are_shared_counted_listed_and_deleted(serve: Any) -> None:
    one, two = agents = join(serve().address, 2)
    one.set("dir/b", "text")
    two.set("/dir//a/", b"\x00raw")
    assert two.get("dir/b") == b"text"
    assert one.get_dir("dir") == {"dir/a": b"\x00raw", "dir/b": b"text"}
    with pytest.raises(KeyExistsError, match="dir/b already exists"):
        two.set("dir/b", "other")
    two.set("dir/b", "other", overwrite=True)
    assert one.try_get("dir/b") == b"other"
    assert [one.increment("n", 5), two.increment("n", -7)] == [5, -2]
    one.delete("dir")
    assert two.get_dir("dir") == {}
    with pytest.raises(KeyMissingError, match="dir/b"):
        one.try_get("dir/b")
    leave(agents)


def test_get_waits_for_the_key_and_times_out_without_it(serve: Any) -> None:
    one, two = agents = join(serve().address, 2)
    results = together(lambda: one.get("late", 50), lambda: two.set("late", "now"))
    assert results[0] == b"now"
    with pytest.raises(CoordinationTimeoutError, match="never"):
        one.get("never", 0.1)
    leave(agents)


def test_barriers_of_all_and_of_some_can_be_used_again(serve: Any) -> None:
    one, two = agents = join(serve().address, 2)
    for _ in range(3):
        together(lambda: one.barrier("all"), lambda: two.barrier("all"))
    one.barrier("mine", tasks=[0])
    with pytest.raises(CoordinationTimeoutError, match="1/2"):
        one.barrier("lonely", 0.1)
    leave(agents)


def test_error_of_one_is_told_to_all(serve: Any) -> None:
    one, two = agents = join(serve().address, 2)
    told: list[CoordinationError] = []
    heard = threading.Event()
    two.on_error(lambda error: (told.append(error), heard.set()))
    one.report_error("no more disk", "DATA_LOSS")
    assert heard.wait(50)
    assert (told[0].code, told[0].source) == ("DATA_LOSS", "jax_worker/0")
    assert "no more disk" in str(told[0])
    assert two.error is told[0]
    leave(agents, wait=False)


def test_exception_inside_with_is_reported_to_the_others(serve: Any) -> None:
    one, two = join(serve().address, 2)
    heard = threading.Event()
    two.on_error(lambda error: heard.set())
    with pytest.raises(ZeroDivisionError), one:
        1 / 0  # noqa: B018
    assert heard.wait(50)
    assert two.error is not None
    assert "ZeroDivisionError" in str(two.error)
    two.close(wait=False)


def test_alive_tasks_and_watch_show_who_left(serve: Any) -> None:
    one, two = agents = join(serve().address, 2)
    alive = together(one.alive_tasks, two.alive_tasks)
    assert alive[0] == alive[1] == {0: one.incarnation, 1: two.incarnation}
    version, tasks = one.watch()
    assert [task.state for task in tasks] == ["connected", "connected"]
    two.close(wait=False)
    agents.remove(two)
    while tasks[1].state != "disconnected":
        version, tasks = one.watch(version, 50)
    leave(agents, wait=False)


def test_unexpected_task_and_absent_coordinator_are_clear_errors(serve: Any, free_port: int) -> None:
    with pytest.raises(CoordinationError, match="Unexpected task"):
        connect(serve().address, 9)
    with pytest.raises(CoordinationTimeoutError, match=r"no coordinator answered on .*is it running"):
        connect(f"127.0.0.1:{free_port}", 0, timeout_s=0.3)


def test_job_that_is_not_complete_is_told_from_an_absent_coordinator(serve: Any) -> None:
    with pytest.raises(CoordinationTimeoutError, match=r"not all tasks have joined.*coordinator barriers --address"):
        connect(serve(2).address, 0, timeout_s=0.3)


def test_arguments_that_cannot_be_sent_are_refused_and_harm_nothing(serve: Any) -> None:
    address = serve(1).address
    agent = connect(address)
    for wrong in (
        lambda: agent.report_error("no such code", "FOO"),
        lambda: agent.report_error("no error", "OK"),
        lambda: agent.set("\udcff", b"no text"),
        lambda: agent.increment("n", 2**70),
        lambda: connect(address, 2**40),
    ):
        with pytest.raises(CoordinationError) as refusal:
            wrong()
        assert refusal.value.code == "INVALID_ARGUMENT"
    for timeout_s in (float("inf"), 1e300):
        agent.barrier("all are here", timeout_s)
    assert agent.increment("n") == 1
    agent.close()
    with connect(address, timeout_s=40) as again:  # the first one has left, although an error was ill reported
        again.set("k", "v")


def test_agent_whose_listener_cannot_listen_leaves_again(serve: Any, raw: Any) -> None:
    service = serve(1)
    with pytest.raises(OSError, match="Cannot listen"):
        connect(service.address, listen=service.address)
    assert raw(service.address).snapshot().members[0].state == "DISCONNECTED"


def test_agent_that_has_left_says_so(serve: Any) -> None:
    with connect(serve(1).address) as agent:
        agent.close()
        with pytest.raises(CoordinationError, match="has left the job"):
            agent.get("k")
    agent.close()


def test_agent_called_from_its_own_callback_says_so(serve: Any, caplog: Any) -> None:
    agent = connect(serve(1).address)
    caught: list[CoordinationError] = []
    heard = threading.Event()

    def call_back(error: CoordinationError) -> None:
        try:
            agent.get("k")
        except CoordinationError as refusal:
            caught.append(refusal)
        raise RuntimeError("the next callback is called all the same")

    agent.on_error(call_back)
    agent.on_error(lambda error: heard.set())
    agent.report_error("it broke")
    assert heard.wait(50)
    assert "its own agent" in str(caught[0])
    agent.close()
    caplog.clear()  # the traceback of the second error holds the agent's connection


def test_forked_children_are_refused_and_their_parent_goes_on(serve: Any) -> None:
    address = serve(1).address
    agent = connect(address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agent.get, "k")  # gRPC has a call under way at every fork
        for _ in range(20):
            child = os.fork()
            if child == 0:
                refused = 0
                try:
                    agent.close()  # does nothing here
                    for attempt in (lambda: agent.get("k"), lambda: connect(address), lambda: open_keys(address)):
                        try:
                            attempt()
                        except (CoordinationError, ForkedRuntimeError) as refusal:
                            refused += "forked" in str(refusal) and "spawn" in str(refusal)
                finally:
                    os._exit(3 - refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        agent.set("k", "v")
        assert waiting.result(50) == b"v"
    agent.close()


def test_coordinator_that_stays_away_is_given_up(serve: Any) -> None:
    service = serve(1)
    lost = threading.Event()
    agent = connect(service.address, heartbeat_interval_s=0.05, lost_after_s=0.5, on_error=lambda error: lost.set())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agent.get, "never")
        service.stop()
        with pytest.raises(CoordinatorLostError, match=service.address):
            waiting.result(50)
    assert lost.wait(50)
    with pytest.raises(CoordinatorLostError):
        agent.set("k", "v")
    agent.close()


def test_agent_finds_a_coordinator_that_was_restarted_on_its_records(serve: Any, tmp_path: Any, free_port: int) -> None:
    options = {"num_tasks": 1, "address": f"127.0.0.1:{free_port}", "state_dir": tmp_path}
    first = serve(**options)
    agent = connect(first.address, heartbeat_interval_s=0.05)
    agent.set("before", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agent.get, "after", 30)
        first.stop()
        serve(**options)
        assert agent.get("before", 30) == b"1"
        agent.set("after", "2")
        assert waiting.result(50) == b"2"
    assert agent.error is None
    agent.close()


def test_async_agent_does_the_same_without_threads(serve: Any) -> None:
    async def play() -> None:
        address = serve().address
        one, two = await asyncio.gather(connect_async(address, 0), connect_async(address, 1))
        async with one, two:
            await one.set("k", "v")
            assert await two.get("k") == b"v"
            await asyncio.gather(one.barrier("b"), two.barrier("b"))
            assert await asyncio.gather(one.increment("n"), two.increment("n")) in ([1, 2], [2, 1])
            await asyncio.gather(one.close(), two.close())

    asyncio.run(play())


def test_report_error_to_task_reaches_the_agent_that_listens(serve: Any) -> None:
    agent = connect(serve(1).address, listen="127.0.0.1:0")
    request, response = message_set("coordination_tensorflow").methods("tensorflow.CoordinationService")[
        "ReportErrorToTask"
    ]
    heard = threading.Event()
    agent.on_error(lambda error: heard.set())
    assert agent.listen_address is not None
    with open_channel(agent.listen_address) as channel:
        stub = channel.unary_unary(
            "/tensorflow.CoordinationService/ReportErrorToTask", request.SerializeToString, response.FromString
        )
        source = {"source_task": {"job_name": "jax_worker", "task_id": 5}}
        stub(request(error_code=13, error_message="it broke", error_payload=source), timeout=10)
    assert heard.wait(50)
    assert agent.error is not None
    assert (agent.error.code, agent.error.source) == ("INTERNAL", "jax_worker/5")
    agent.close(wait=False)
