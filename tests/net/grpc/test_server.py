"""Both servers, the completion-queue one and the asyncio one, called by grpcio's own client."""

import contextlib
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastrt.net.grpc.aio_server import AioServer
from fastrt.net.grpc.auth import TlsFiles, refused_token
from fastrt.net.grpc.channel import bearer
from fastrt.net.grpc.contract import Stream
from fastrt.net.grpc.queue_server import QueueServer
from fastrt.net.grpc.server import open_server

OPENSSL = [
    ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca"],
    ["req", "-newkey", "rsa:2048", "-nodes", "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=localhost"],
    ["x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-out", "own.pem", "-extfile", "ext"],
]  # fmt: skip


def status(call: Any) -> tuple[str, str]:
    error = call.exception(timeout=40)
    assert isinstance(error, grpc.RpcError)
    return error.code().name, error.details()


def test_answers_and_failures_arrive_with_their_words_and_metadata(serve: Any) -> None:
    _, channel = serve()
    assert channel.unary_unary("/t.S/Echo")(b"x" * 100_000, timeout=40) == b"x" * 100_000
    failed = channel.unary_unary("/t.S/Fail").future(b"", timeout=40)
    assert status(failed) == ("FAILED_PRECONDITION", "not now")
    assert dict(failed.trailing_metadata())["why-bin"] == b"\x00\xff"


def test_unknown_method_and_failing_handler_do_not_end_the_server(serve: Any, caplog: Any) -> None:
    _, channel = serve()
    assert status(channel.unary_unary("/t.S/None").future(b"", timeout=40))[0] == "UNIMPLEMENTED"
    assert status(channel.unary_unary("/t.S/Raise").future(b"", timeout=40))[0] == "INTERNAL"
    assert "ZeroDivisionError" in caplog.text
    assert channel.unary_unary("/t.S/Echo")(b"still", timeout=40) == b"still"
    caplog.clear()  # its traceback holds the call, and that the server


def test_hung_up_and_timed_out_callers_are_reported_once(serve: Any, wait_until: Any) -> None:
    recorder, channel = serve()
    calls = [channel.unary_unary("/t.S/Wait").future(b"", timeout=40) for _ in range(20)]
    short = channel.unary_unary("/t.S/Wait").future(b"", timeout=2.0)  # long enough to arrive
    wait_until(lambda: len(recorder.waiting) == 21, "all calls")
    for call in calls:
        call.cancel()
    assert status(short)[0] == "DEADLINE_EXCEEDED"
    wait_until(lambda: sorted(recorder.cancelled) == sorted(recorder.waiting), "all to be reported")
    assert not recorder.server.finish(recorder.waiting[0], body=b"late")
    assert recorder.server.pending_count() == 0


def test_waiting_call_is_answered_from_another_thread(serve: Any, wait_until: Any) -> None:
    recorder, channel = serve()
    call = channel.unary_unary("/t.S/Wait").future(b"", timeout=40)
    wait_until(lambda: recorder.waiting, "the call")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(recorder.server.finish, recorder.waiting[0], 0, "", b"now").result()
    assert call.result(timeout=40) == b"now"
    assert not recorder.server.finish(recorder.waiting[0], body=b"twice")


def test_too_large_request_is_refused_and_a_large_answer_is_not(serve: Any) -> None:
    _, channel = serve(message_bytes_max=1000)
    assert status(channel.unary_unary("/t.S/Echo").future(b"x" * 2000, timeout=40))[0] == "RESOURCE_EXHAUSTED"
    assert channel.unary_unary("/t.S/Echo")(b"y" * 900, timeout=40) == b"y" * 900


def test_stop_answers_open_calls_and_refuses_new_ones(serve: Any, wait_until: Any) -> None:
    recorder, channel = serve()
    call = channel.unary_unary("/t.S/Wait").future(b"", timeout=40)
    wait_until(lambda: recorder.waiting, "the call")
    recorder.server.stop()
    assert recorder.stopped
    assert status(call) == ("UNAVAILABLE", "The service is shutting down.")
    assert status(channel.unary_unary("/t.S/Echo").future(b"", timeout=40))[0] == "UNAVAILABLE"


def test_stream_gets_every_message_and_sends_in_order(serve: Any) -> None:
    def doubled(stream: Stream) -> None:
        def receive(body: bytes | None) -> None:
            if body is None:
                stream.finish()
            else:
                stream.send(body)
                stream.send(body * 2)

        stream.receiver = receive

    _, channel = serve(streams={"/t.S/Twice": doubled})
    answers = channel.stream_stream("/t.S/Twice")(iter([b"a", b"b"]), timeout=40)
    assert list(answers) == [b"a", b"aa", b"b", b"bb"]


def test_held_stream_takes_nothing_until_it_is_resumed(serve: Any, wait_until: Any) -> None:
    taken: list[bytes | None] = []
    opened: list[Stream] = []

    def one_by_one(stream: Stream) -> None:
        def receive(body: bytes | None) -> None:
            stream.hold()  # before the test sees the message, and resumes
            taken.append(body)
            if body is None:
                stream.send(b"done")
                stream.finish()

        opened.append(stream)
        stream.receiver = receive

    _, channel = serve(streams={"/t.S/Slow": one_by_one})
    call = channel.stream_unary("/t.S/Slow").future(iter([b"a", b"b", b"c"]), timeout=60)
    for count in (1, 2, 3):
        wait_until(lambda count=count: len(taken) == count, "a message")
        assert not call.done()
        opened[0].resume()
    opened[0].resume()  # asks for no second one, and there is no message left that it could set free
    assert call.result(timeout=60) == b"done"
    assert taken == [b"a", b"b", b"c", None]


def test_stream_finished_after_the_end_of_everything_does_nothing(serve: Any, wait_until: Any) -> None:
    opened: list[Stream] = []
    closed: list[bool] = []

    def keep(stream: Stream) -> None:
        opened.append(stream)
        stream.on_closed = lambda: closed.append(True)

    recorder, channel = serve(streams={"/t.S/Kept": keep})
    calls = [channel.stream_unary("/t.S/Kept").future(iter([b"a"]), timeout=60) for _ in range(2)]
    wait_until(lambda: len(opened) == 2, "both streams")
    calls[0].cancel()
    wait_until(lambda: closed, "the end of the first")
    recorder.server.stop()
    assert status(calls[1])[0] == "UNAVAILABLE"
    assert closed == [True, True]
    for stream in opened:
        stream.resume()
        stream.send(b"late")
        stream.finish()


def test_call_without_the_token_is_unauthenticated(serve: Any) -> None:
    _, channel = serve(authorize=lambda method, metadata: refused_token(metadata, "secret"))
    echo = channel.unary_unary("/t.S/Echo")
    assert echo(b"ok", timeout=40, metadata=bearer("secret")) == b"ok"
    assert status(echo.future(b"", timeout=40, metadata=bearer("guess")))[0] == "UNAUTHENTICATED"
    code, words = status(echo.future(b"", timeout=40))
    assert code == "UNAUTHENTICATED"
    assert "FASTRT_TOKEN_FILE" in words


def test_mutual_tls_admits_only_known_clients(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "ext").write_text("subjectAltName=DNS:localhost")
    for words in OPENSSL:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)
    tls = TlsFiles(tmp_path / "own.pem", tmp_path / "own.key", tmp_path / "ca.pem")
    recorder, _ = serve(credentials=tls.server_credentials())
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(recorder.address, tls.channel_credentials(), options) as known:
        assert known.unary_unary("/t.S/Echo")(b"ok", timeout=40) == b"ok"
    stranger = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    with grpc.secure_channel(recorder.address, stranger, options) as unknown:
        assert status(unknown.unary_unary("/t.S/Echo").future(b"", timeout=40))[0] == "UNAVAILABLE"


def hung_up_after(address: str, said: bytes) -> float:
    """Seconds until a server hangs up on who says just that."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 40) as sock:
        begun = time.monotonic()
        sock.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
        return time.monotonic() - begun


@pytest.mark.long
@pytest.mark.parametrize("said", [b"", b"PRI * HTTP/2.0\r\n"], ids=["nothing", "half a preface"])
def test_connection_that_says_no_word_of_http_is_hung_up_on(serve: Any, said: bytes) -> None:
    recorder, channel = serve()
    # The kernel keeps a connection without a first byte for about 15 s; after that the server's own time begins.
    assert 5 < hung_up_after(recorder.address, said) < (20 if said else 38)
    assert channel.unary_unary("/t.S/Echo")(b"ok", timeout=40) == b"ok"


def test_taken_port_is_an_oserror(serve: Any) -> None:
    recorder, _ = serve()
    other, _ = serve()
    with pytest.raises(OSError, match=recorder.address):
        other.server.bind(recorder.address)
    new = type(other.server)(other, [])  # never started, so it must end by itself
    with pytest.raises(OSError, match=recorder.address):
        new.bind(recorder.address)


def test_grpcio_without_the_private_parts_is_served_by_the_public_ones(monkeypatch: Any, caplog: Any) -> None:
    class Nobody:
        def on_call(self, call: int, method: str, body: bytes) -> None: ...
        def on_cancel(self, call: int) -> None: ...
        def on_idle(self) -> float | None: ...
        def on_stop(self) -> None: ...

    assert isinstance(open_server(Nobody(), []), QueueServer)
    monkeypatch.delattr("grpc._cython.cygrpc.SendMessageOperation")
    assert isinstance(open_server(Nobody(), []), AioServer)
    assert "lacks SendMessageOperation" in caplog.text
    assert "Use grpcio" in caplog.text
