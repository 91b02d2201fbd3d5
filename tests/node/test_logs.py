"""Lines of workers' output: prefixed, whole, of bounded size."""

import json
import os

import pytest

from fastrt.node.logs import LogPipe

MESSAGE_BYTES_MAX = 1 << 20


@pytest.fixture
def pipe():
    read, write = os.pipe()
    emitted = []
    log = LogPipe(read, True, lambda text, is_error: emitted.append((text, is_error)))
    log.pid = 4194304
    yield log, write, emitted
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            continue


def feed(pipe, data):
    """Write and read in turn, as worker and daemon do; what was emitted in all."""
    log, write, emitted = pipe
    for k in range(0, len(data), 60_000):
        os.write(write, data[k : k + 60_000])
        log.read()
    return "".join(text for text, _ in emitted)


def test_lines_get_a_prefix_and_empty_lines_stay(pipe):
    assert feed(pipe, b"a\n\nb\n") == "(pid=4194304) a\n(pid=4194304) \n(pid=4194304) b\n"
    assert feed(pipe, b"\n").endswith("b\n(pid=4194304) \n")
    assert {is_error for _, is_error in pipe[2]} == {True}


def test_part_of_a_line_waits_for_the_rest_or_the_end(pipe):
    assert feed(pipe, b"half") == ""
    assert feed(pipe, b" and half\nmore") == "(pid=4194304) half and half\n"
    os.close(pipe[1])
    assert not pipe[0].read()
    assert pipe[2][-1][0] == "(pid=4194304) more\n"


def test_bytes_that_are_no_text_are_marked(pipe):
    assert feed(pipe, b"\xff\xfe\n") == "(pid=4194304) \ufffd\ufffd\n"


@pytest.mark.parametrize(
    "data", [b"\n" * 300_000, b"\0" * 300_000, b"\0\n" * 150_000, b"\xff" * 300_000, b"x" * 300_000]
)
def test_no_message_is_too_long_for_the_connection(pipe, data):
    feed(pipe, data)
    assert max(len(json.dumps({"op": "log", "text": text, "error": True})) for text, _ in pipe[2]) < MESSAGE_BYTES_MAX


def test_drain_passes_on_what_is_left_and_closes(pipe):
    log, write, emitted = pipe
    os.write(write, b"one\ntwo")
    log.drain()
    assert "".join(text for text, _ in emitted) == "(pid=4194304) one\n(pid=4194304) two\n"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(log.fd)
