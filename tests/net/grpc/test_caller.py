"""Both callers, the one on the completion queue and the one on grpcio's futures, at a server of fastrt."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastrt.net.grpc.caller import open_caller
from fastrt.net.grpc.contract import Stream
from fastrt.net.grpc.future_client import FutureCaller
from fastrt.net.grpc.queue_client import QueueCaller
from fastrt.net.grpc.queue_server import QueueServer
from tests.net.grpc.conftest import Recorder, started

CANCELLED, UNAVAILABLE, DEADLINE_EXCEEDED = 1, 14, 4
Open = Callable[..., Any]


@pytest.fixture(params=[QueueCaller, FutureCaller])
def connect(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open a caller of either kind; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def open_one(address: str, **options: Any) -> Any:
            made = request.param(address, None, [], **options)
            stack.callback(made.close)
            return made

        yield open_one


@pytest.fixture
def service() -> Iterator[tuple[Recorder, str]]:
    streams: dict[str, Callable[[Stream], None]] = {"/t.S/Count": count, "/t.S/Never": lambda stream: None}
    recorder, port = started(QueueServer, streams=streams)
    yield recorder, f"127.0.0.1:{port}"
    assert recorder.server is not None
    recorder.server.stop()


def count(stream: Stream) -> None:
    """Answer a request of n by n messages."""

    def receive(body: bytes | None) -> None:
        if body is not None:
            for k in range(int(body)):
                stream.send(str(k).encode())
            stream.finish(9 if body == b"3" else 0, "three are too many" if body == b"3" else "")

    stream.receiver = receive


def collected() -> tuple[Callable[..., None], Callable[[], Any]]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    return lambda *answer: answers.put(answer), lambda: answers.get(timeout=60)


def test_answers_errors_and_timeouts_arrive_with_their_status(connect: Open, service: Any) -> None:
    caller = connect(service[1], metadata=(("k", "v"),))
    done, answer = collected()
    for path, body in (("/t.S/Echo", b"hello"), ("/t.S/Echo", b""), ("/t.S/Fail", b""), ("/t.S/None", b"")):
        caller.call(path, body, 20, done)
        code, message, result = answer()
        expected = {
            "/t.S/Echo": (0, ""),
            "/t.S/Fail": (9, "not now"),
            "/t.S/None": (12, "There is no method /t.S/None here."),
        }
        assert (code, message) == expected[path]
        assert result == (body if code == 0 else b"")
    caller.call("/t.S/Wait", b"", 0.05, done)
    assert answer()[0] == DEADLINE_EXCEEDED


def test_many_calls_in_flight_each_get_their_answer(connect: Open, service: Any) -> None:
    caller = connect(service[1])
    done, answer = collected()
    for k in range(200):
        caller.call("/t.S/Echo", str(k).encode(), 20, lambda code, message, body, k=k: done(k, code, body))
    assert sorted(answer() for _ in range(200)) == [(k, 0, str(k).encode()) for k in range(200)]


def test_call_to_nothing_fails_at_once_or_waits_for_a_server(connect: Open, free_port: int, wait_until: Any) -> None:
    caller = connect(f"127.0.0.1:{free_port}")
    done, answer = collected()
    caller.call("/t.S/Echo", b"", 20, done)
    assert answer()[0] == UNAVAILABLE
    assert not caller.is_ready()
    caller.call("/t.S/Echo", b"later", 20, done, wait_for_ready=True)
    recorder = Recorder()
    recorder.server = QueueServer(recorder, ["/t.S/Echo"])
    recorder.server.bind(f"127.0.0.1:{free_port}")
    recorder.server.start()
    assert answer() == (0, "", b"later")
    wait_until(caller.is_ready, "the connection is open")
    recorder.server.stop()
    wait_until(lambda: not caller.is_ready(), "the connection has ended")


def test_stream_passes_on_its_messages_and_then_its_status(connect: Open, service: Any) -> None:
    caller = connect(service[1])
    done, answer = collected()
    for body, status in ((b"2", (0, "")), (b"3", (9, "three are too many")), (b"0", (0, ""))):
        caller.stream("/t.S/Count", body, done, done)
        assert [answer() for _ in range(int(body))] == [(str(k).encode(),) for k in range(int(body))]
        assert answer() == status


def test_close_ends_calls_and_streams_under_way_and_refuses_others(
    connect: Open, service: Any, wait_until: Callable[..., None]
) -> None:
    recorder, address = service
    caller = connect(address)
    done, answer = collected()
    caller.call("/t.S/Wait", b"", 60, done)
    caller.stream("/t.S/Never", b"", done, done)
    wait_until(lambda: recorder.waiting, "the call has arrived")
    caller.close()
    assert {answer()[0], answer()[0]} == {CANCELLED}
    caller.call("/t.S/Echo", b"", 60, done)
    assert answer() == (CANCELLED, "The connection was closed.", b"")
    caller.stream("/t.S/Count", b"1", done, done)
    assert answer() == (CANCELLED, "The connection was closed.")
    assert not caller.is_ready()


def test_failing_handler_of_an_answer_does_not_end_the_thread(
    connect: Open, service: Any, caplog: Any, wait_until: Any
) -> None:
    caller = connect(service[1])
    done, answer = collected()
    caller.call("/t.S/Echo", b"", 20, lambda *answer: 1 // 0)
    caller.call("/t.S/Echo", b"still", 20, done)
    assert answer() == (0, "", b"still")  # which may come before the other one
    wait_until(lambda: "ZeroDivisionError" in caplog.text, "the error of the handler")
    caller.close()
    caplog.clear()  # its traceback holds the call


def test_failing_handler_of_an_answer_that_is_there_at_once_does_not_reach_the_caller(
    service: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = FutureCaller(service[1], None, [])
    unary_unary = caller._channel.unary_unary

    class Late:
        """A method whose future is returned after the answer has come."""

        def __init__(self, path: str) -> None:
            self._method = unary_unary(path)

        def future(self, *given: Any, **options: Any) -> Any:
            made = self._method.future(*given, **options)
            made.exception()
            return made

    monkeypatch.setattr(caller._channel, "unary_unary", Late)
    caller.call("/t.S/Echo", b"", 20, lambda *answer: 1 // 0)
    caller.close()
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()  # its traceback holds the call


def test_grpcio_without_a_completion_queue_gets_the_caller_on_futures(service: Any, monkeypatch: Any) -> None:
    monkeypatch.delattr("grpc._cython.cygrpc.ReceiveStatusOnClientOperation")
    caller = open_caller("127.0.0.1:1")
    assert isinstance(caller, FutureCaller)
    caller.close()


def test_idle_caller_has_no_thread_and_makes_calls_again(service: Any, wait_until: Callable[..., None]) -> None:
    caller = open_caller(service[1])
    assert isinstance(caller, QueueCaller)
    done, answer = collected()
    for _ in range(2):
        caller.call("/t.S/Echo", b"", 20, done)
        assert answer()[0] == 0
        assert any(thread.name == "fastrt-calls" for thread in threading.enumerate())
        wait_until(lambda: not any(t.name == "fastrt-calls" for t in threading.enumerate()), "the thread has ended")
    caller.close()
