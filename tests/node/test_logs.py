"""Lines of workers' output: prefixed, whole, of bounded size."""

import os
import socket
import time

import pytest

from fastrt.node.logs import FORWARD_BYTES_A_SECOND, UNFINISHED_S, Forwarding, LogPipe, Meter, Printed
from fastrt.store.join import Link
from fastrt.store.messages import BYTES_MAX, Log, write_message
from fastrt.tasks.marks import Source, mark


@pytest.fixture
def pipe():
    read, write = os.pipe()
    emitted = []
    log = LogPipe(read, True, emitted.append)
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
    return "".join(printed.text() for printed in emitted)


def test_lines_get_a_prefix_and_empty_lines_stay(pipe):
    assert feed(pipe, b"a\n\nb\n") == "(pid=4194304) a\n(pid=4194304) \n(pid=4194304) b\n"
    assert feed(pipe, b"\n").endswith("b\n(pid=4194304) \n")
    assert {printed.is_error for printed in pipe[2]} == {True}


def test_part_of_a_line_waits_for_the_rest_or_the_end(pipe):
    assert feed(pipe, b"half") == ""
    assert feed(pipe, b" and half\nmore") == "(pid=4194304) half and half\n"
    os.close(pipe[1])
    assert not pipe[0].read()
    assert pipe[2][-1].text() == "(pid=4194304) more\n"


def test_bytes_that_are_no_text_are_marked(pipe):
    assert feed(pipe, b"\xff\xfe\n") == "(pid=4194304) \ufffd\ufffd\n"


@pytest.mark.parametrize(
    "data", [b"\n" * 300_000, b"\0" * 300_000, b"\0\n" * 150_000, b"\xff" * 300_000, b"x" * 300_000]
)
def test_no_message_is_too_long_for_the_connection(pipe, data):
    pipe[0]._take(mark(Source(1, "\u6f22" * 100)))
    feed(pipe, data)
    assert max(len(write_message(Log(one.text(), True, False))) for one in pipe[2]) < BYTES_MAX


def test_drain_passes_on_what_is_left_and_closes(pipe):
    log, write, emitted = pipe
    os.write(write, b"one\ntwo")
    log.drain()
    assert "".join(printed.text() for printed in emitted) == "(pid=4194304) one\n(pid=4194304) two\n"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(log.fd)


def test_line_has_the_name_that_its_mark_says_also_where_a_read_ends_in_the_mark(pipe):
    data = (
        b"before\n"
        + mark(Source(0x10002, "work", 7, 8))
        + b"one\nhalf"
        + mark(Source(0x20003, "other", 0, 0, "a b"))
        + b"two\n"
    )
    wanted = "(pid=4194304) before\n(work pid=4194304) one\n(work pid=4194304) half\n(other pid=4194304) two\n"
    for cut in range(1, len(data)):
        pipe[2].clear()
        pipe[0]._source = Source()
        feed(pipe, data[:cut])
        assert feed(pipe, data[cut:]) == wanted
        assert [printed.source.job for printed in pipe[2]] == [0, 0x10002, 0x10002, 0x20003]


def test_unfinished_line_is_passed_on_after_a_moment_and_its_end_later(pipe):
    log, _, emitted = pipe
    assert feed(pipe, b"Working...") == ""
    log.pass_on_unfinished(time.monotonic())
    assert not emitted
    log.pass_on_unfinished(time.monotonic() + UNFINISHED_S)
    assert emitted[0].text() == "(pid=4194304) Working...\n"
    assert not emitted[0].is_update
    assert feed(pipe, b"\nnext\n").endswith("Working...\n(pid=4194304) next\n")


def test_progress_bar_is_passed_on_as_updates_of_its_newest_state(pipe):
    log, _, emitted = pipe
    now = time.monotonic()
    feed(pipe, b"\r10%")
    for step in range(1, 4):
        feed(pipe, b"\r%d1%%\r%d2%%" % (step, step))
        log.pass_on_unfinished(now + 2 * step * UNFINISHED_S)
        log.pass_on_unfinished(now + (2 * step + 0.5) * UNFINISHED_S)
    assert [(printed.lines, printed.is_update) for printed in emitted] == [
        (["12%"], True), (["22%"], True), (["32%"], True),
    ]  # fmt: skip
    feed(pipe, b"\r100%\n")
    assert emitted[-1] == Printed(["100%"], True, Source(), 4194304, False)


def test_flood_is_cut_at_the_rate_with_a_count():
    now = 0.0
    meter = Meter(1000, lambda: now)
    assert meter.passes(["x" * 99] * 40)  # four seconds' worth
    assert not meter.passes(["x"] * 10)
    assert not meter.is_ready
    now = 1.0
    assert meter.is_ready
    assert meter.note().startswith("10 lines were left out")
    assert meter.passes(["x" * 99] * 10)
    assert meter.cut == 0


def test_forwarding_sends_a_flood_up_to_the_limit_and_then_the_count():
    ours, theirs = (Link(sock) for sock in socket.socketpair())
    forwarding = Forwarding()
    printed = Printed(["x" * 999] * 100, False, Source(5, "work"), 7)
    sent = 0
    for _ in range(100):
        forwarding.forward(printed, ours)
        while theirs.receive(0) is not None:
            sent += 1
    assert FORWARD_BYTES_A_SECOND * 4 <= (sent + 1) * 100_000 <= FORWARD_BYTES_A_SECOND * 8
    forwarding._meter._looked_at -= 2.0  # as if two seconds had passed
    forwarding.tend(ours)
    last = theirs.receive(1.0)
    assert last.source == "fastrt"
    assert last.lines[0].startswith(f"{(100 - sent) * 100} lines were left out")
    for link in (ours, theirs):
        link.close()
