"""Questions between nodes: a tool of one node reads rows and log lines of another, without a worker there.

A process asks the uplink of its node at a Unix socket. The uplink passes the question on by the stream to the other
node. The uplink there reads the shared memory and the log files in a thread, and answers with one bounded page. A
reader asks for page after page; no node keeps anything between them. Rows travel as JSON, which only the asking process
parses.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastrt.errors import FastrtError
from fastrt.store import join
from fastrt.store.messages import (
    AskNode,
    MessageError,
    NodePage,
    Refused,
    StopsChanged,
    expect,
    read_message,
    write_message,
)

if TYPE_CHECKING:
    from fastrt.cluster.peer_stream import Exchange

SOCKET = join.UPLINK_SOCKET
FORWARDED = "forwarded"  # the question for the tasks and calls that this node runs for others, and they for it
_FORWARDED_MAX = 5000
ROWS_BYTES_MAX = 384 << 10  # of one page: as text in another JSON text it has less than `messages.BYTES_MAX`
_OPEN_MAX = 32  # questions of one peer, and of all processes of this node, that wait for an answer
_THREADS = 2  # that answer
_TIMEOUT_S_MAX = 60.0
_QUESTION_BYTES_MAX = 1 << 17
_ERROR_MAX = 1000
_CONNECT_STEP_S = 0.01


def _message(name: str) -> Any:
    """A message of node.proto. Tables of one node are read without the packages of clusters, and load none of them."""
    from fastrt.net.grpc.descriptors import message_set

    return message_set("node").message(f"fastrt.node.{name}")


class Question(NamedTuple):
    """A question of another node; the fields are those of `Question` in node.proto."""

    kind: str
    filters: str
    after: str
    limit: int


class Answer(NamedTuple):
    """A page; the fields are those of `Page` in node.proto."""

    rows: str = "[]"
    after: str = ""
    is_end: bool = True
    total: int = -1
    error: str = ""


class Questions:
    """The questions that two nodes ask each other on one stream.

    Args:
        send: queues a message for a field of the next frame, given its bytes.

    Attributes:
        answer: answers a question of the peer; None: this node does not answer.
        peer_answers: whether the peer answers, as its hello says.
    """

    def __init__(self, send: Callable[[str, Any, int], None]) -> None:
        self.answer: Callable[[Any], Awaitable[Answer]] | None = None
        self.peer_answers = False
        self._send = send
        self._number = 0
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def is_empty(self) -> bool:
        """Return whether no question waits for its answer."""
        return not (self._asked or self._answering)

    async def ask(self, question: Question, timeout_s: float) -> Answer:
        """Ask the peer.

        Raises:
            TimeoutError: no answer came in time.
        """
        self._number = number = self._number + 1
        self._asked[number] = asyncio.get_running_loop().create_future()
        message = _message("Question")(number=number, timeout_ms=int(timeout_s * 1000), **question._asdict())
        self._send("question", message, message.ByteSize())
        try:
            return await asyncio.wait_for(self._asked[number], timeout_s)
        except asyncio.TimeoutError:  # not a TimeoutError before Python 3.11
            raise TimeoutError from None
        finally:
            del self._asked[number]

    def on_page(self, message: Any) -> None:
        """Take an answer of the peer; one that came too late is dropped."""
        future = self._asked.get(message.number)
        if future is None or future.done():
            return
        if len(message.rows) > ROWS_BYTES_MAX or not message.rows.isascii():
            future.set_result(Answer(error=f"its answer of {len(message.rows)} bytes is invalid"))
            return
        after, error = message.after[:_ERROR_MAX], message.error[:_ERROR_MAX]
        future.set_result(Answer(message.rows.decode("ascii"), after, message.is_end, message.total, error))

    def on_question(self, message: Any) -> None:
        """Begin to answer a question of the peer; a peer that asks too much at once gets an error."""
        if self.answer is None:
            return
        if len(self._answering) >= _OPEN_MAX or message.ByteSize() > _QUESTION_BYTES_MAX:
            self._reply(message.number, Answer(error="the question is too long, or too many wait for an answer"))
            return
        task = asyncio.get_running_loop().create_task(self._answer(self.answer, message))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, answer: Callable[[Any], Awaitable[Answer]], message: Any) -> None:
        self._reply(message.number, await answer(message))

    def _reply(self, number: int, answer: Answer) -> None:
        rows, after, is_end, total, error = answer
        page = _message("Page")(
            number=number, rows=rows.encode("ascii"), after=after, is_end=is_end, total=total, error=error
        )
        self._send("page", page, page.ByteSize())

    def close(self, why: str) -> None:
        """End all questions: the stream has ended."""
        for future in self._asked.values():
            if not future.done():
                future.set_result(Answer(error=why))
        for task in self._answering:
            task.cancel()


class Desk:
    """The uplink's part: passes on questions of this node's processes, and answers those of other nodes.

    Args:
        reach: returns whether a node is a member, and the stream to it; connects to it if there is none.
        read: reads a page of this node; called in a thread. None: this node neither asks nor answers.
        on_stops: called when a process of this node says that tasks begin or end to wait in a debugger.
        node: the NodeID of this node.
        exchanges: the streams of this node; read at each question.
    """

    def __init__(
        self,
        reach: Callable[[str], tuple[bool, Exchange | None]],
        read: Callable[[Question], Answer] | None,
        on_stops: Callable[[], object] = bool,
        node: str = "",
        exchanges: Collection[Exchange] = (),
    ) -> None:
        self._node, self._exchanges = node, exchanges
        self._reach = reach
        self._read = read
        self._on_stops = on_stops
        self._threads = ThreadPoolExecutor(_THREADS, "fastrt-answers")
        self._asking = 0
        self._server: asyncio.AbstractServer | None = None

    async def open(self, socket_path: str) -> None:
        """Take questions of this node's processes at a socket beside that of the daemon."""
        if self._read is not None:
            path = Path(socket_path).with_name(SOCKET)
            path.unlink(missing_ok=True)  # of an uplink that was killed
            self._server = await asyncio.start_unix_server(
                self._on_process, sock=join.listen(str(path)), limit=_QUESTION_BYTES_MAX
            )

    def serve(self, exchange: Exchange) -> None:
        """Answer the questions that come on a stream."""
        if self._read is not None:
            exchange.questions.answer = self._answer

    def close(self) -> None:
        """Return once no thread reads the shared memory any more; nothing is answered afterwards."""
        self._read = None
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(cancel_futures=True)

    # ---- this node's processes ----

    async def _on_process(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question of a process of this node, or take its word that tasks wait in a debugger."""
        try:
            _, uid = join.peer_of(writer.get_extra_info("socket"))
            if uid != os.geteuid():
                writer.write(write_message(Refused(f"this node belongs to uid {os.geteuid()}, not to {uid}")) + b"\n")
                return
            try:
                message = read_message((await reader.readuntil(b"\n"))[:-1])
                if isinstance(message, StopsChanged):
                    self._on_stops()
                    return
                message = expect(message, AskNode)
                answer: NodePage | Refused = NodePage(*await self._pass(message))
            except MessageError as exc:
                answer = Refused(str(exc))
            writer.write(write_message(answer) + b"\n")
            await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError):
            pass  # the process has left, or sends no question
        finally:
            writer.close()

    async def _pass(self, message: AskNode) -> Answer:
        if self._asking >= _OPEN_MAX:
            return Answer(error=f"{_OPEN_MAX} other questions of this node wait for an answer")
        self._asking += 1
        try:
            if message.node == self._node:
                return await self._answer(message)
            question = Question(message.kind, message.filters, message.after, message.limit)
            return await self._ask(message.node, question, min(message.timeout_ms / 1000, _TIMEOUT_S_MAX))
        finally:
            self._asking -= 1

    async def _ask(self, node: str, question: Question, timeout_s: float) -> Answer:
        until = time.monotonic() + timeout_s
        is_member, exchange = self._reach(node)
        while exchange is None:
            if not is_member:
                return Answer(error="it is no member of the cluster")
            if time.monotonic() >= until:
                return Answer(error=f"it could not be reached within {timeout_s:g} s")
            await asyncio.sleep(_CONNECT_STEP_S)
            is_member, exchange = self._reach(node)
        if not exchange.questions.peer_answers:
            return Answer(error="it runs a version of fastrt that answers no questions")
        try:
            return await exchange.questions.ask(question, max(0.0, until - time.monotonic()))
        except TimeoutError:
            return Answer(error=f"it did not answer within {timeout_s:g} s")

    # ---- other nodes ----

    async def _answer(self, message: Any) -> Answer:
        """Read a page in a thread. The time that a question waits for a free thread counts."""
        until = time.monotonic() + min(message.timeout_ms / 1000, _TIMEOUT_S_MAX)
        question = Question(message.kind, message.filters, message.after, message.limit)
        if question.kind == FORWARDED:  # here: only this thread may look at the streams
            rows = [row for exchange in self._exchanges for row in exchange.forwarded()]
            return Answer(json.dumps(rows[:_FORWARDED_MAX]))

        def read() -> Answer:
            if self._read is None or time.monotonic() >= until:
                return Answer(error="it was too busy to answer in time")
            try:
                return self._read(question)
            except (FastrtError, ValueError, OSError) as exc:
                return Answer(error=str(exc)[:_ERROR_MAX] or type(exc).__name__)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except RuntimeError:  # the threads have ended
            return Answer(error="it leaves the cluster")
