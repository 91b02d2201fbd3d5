"""The daemon and a process that asks it and does not read the answers."""

import contextlib
import selectors
import socket

from fastrt.node.served_link import ServedLink
from fastrt.store import client, join
from fastrt.store.join import Link
from fastrt.store.messages import ListNodes, Log, NodeList, write_message

QUESTION = write_message(ListNodes()) + b"\n"
TEXT = "x" * 1000


def test_process_that_reads_no_answers_does_not_stop_the_node(rt):
    path = client.require().socket_path
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(path)
        stopped.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # the daemon has not read so many
            stopped.sendall(QUESTION * 2000)
        assert join.inquire(path, ListNodes(), NodeList, timeout_s=5.0).lost == []
    assert join.inquire(path, ListNodes(), NodeList, timeout_s=5.0).lost == []


def pair():
    """A selector with a served link, that link, and its other end."""
    selector = selectors.DefaultSelector()
    ours, theirs = socket.socketpair()
    link = ServedLink(ours, selector)
    selector.register(link, selectors.EVENT_READ, "ours")
    return selector, link, Link(theirs)


def test_messages_come_in_their_order_when_the_reader_takes_them():
    selector, link, other = pair()
    sent = 0
    while not link.backlog:
        link.post(Log(f"{sent} {TEXT}", False, False))
        sent += 1
    link.send(Log("last", False, False))  # a `sendall` would come in the middle of the one before
    other.send(ListNodes())
    texts = []
    while "last" not in texts:
        for key, _ in selector.select(0):
            assert key.data == "ours"
            link.receive(0)
        message = other.receive(5.0)
        texts.append(message.text)
    assert [text.partition(" ")[0] for text in texts] == [*map(str, range(sent)), "last"]
    assert selector.select(0) == []
    other.close()
    link.close()


def test_process_that_asks_without_end_is_cut_off():
    selector, link, other = pair()
    while link.send(Log(TEXT * 1000, False, False)):
        pass
    with contextlib.suppress(EOFError):
        while link.receive(0) is None:
            pass
    assert not link.backlog
    selector.unregister(link)
    link.close()
    other.close()
    assert not link.post(Log("", False, False))
