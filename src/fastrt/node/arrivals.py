"""Values of the other node of a stream that are on their way: in pieces between the tasks, or by the native stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastrt.node.references import PeerError
from fastrt.store.ref import ObjectRef

if TYPE_CHECKING:
    from fastrt.node.exchange import Exchange


@dataclass
class Arriving:
    """A value that is being written here.

    Attributes:
        writer: takes its bytes.
        kind, contains, size: what it is.
        task: of this node's table,
        result: whose result it is; below 0: whose item.
        finish: called with it once it is whole.
        at: how many bytes have come, if they come in pieces.
    """

    writer: Any
    kind: int
    contains: list[ObjectRef]
    size: int
    task: int
    result: int
    finish: Callable[[ObjectRef], None]
    at: int = 0


class Arrivals:
    """What comes over one stream.

    Args:
        exchange: the stream.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._arriving: dict[int, Arriving] = {}  # by transfer; below 0: by the other node's native stream

    def begin(self, message: Any, arriving: Arriving) -> None:
        """A value, or the first piece of one, has come, or is offered by the native stream.

        Raises:
            PeerError: it makes no sense.
        """
        if not message.native:
            self._take_piece(arriving, message)
            if arriving.at < arriving.size:
                self._arriving[message.transfer] = arriving
            return
        values = self._exchange.values
        if values is None:
            who = self._exchange.name
            raise PeerError(f"node {who} offers a value by a stream that this node does not have")
        self._arriving[-message.native] = arriving
        values.take(message.native, arriving.writer, arriving.kind)

    def on_piece(self, message: Any) -> None:
        """A further piece.

        Raises:
            PeerError: it does not fit.
        """
        arriving = self._arriving.get(message.transfer)
        if arriving is None:
            return  # of a value that nobody wants any more
        self._take_piece(arriving, message)
        if arriving.at == arriving.size:
            del self._arriving[message.transfer]

    def _take_piece(self, arriving: Arriving, message: Any) -> None:
        if message.at != arriving.at or arriving.at + len(message.data) > arriving.size:
            raise PeerError(
                f"node {self._exchange.name} sends {len(message.data)} bytes at {message.at} of a value of "
                f"{arriving.size}, of which {arriving.at} have come"
            )
        arriving.writer.copy(arriving.at, message.data)
        arriving.at += len(message.data)
        if arriving.at == arriving.size:
            arriving.finish(arriving.writer.seal(arriving.contains))

    def landed(self, number: int, error: BaseException | None) -> None:
        """A value has come by the native stream, or cannot."""
        arriving = self._arriving.get(-number)
        if arriving is None:
            return
        if error is not None:
            self._exchange.out.add("again", number)
            return
        del self._arriving[-number]
        arriving.finish(arriving.writer.seal(arriving.contains))
        self._exchange.out.add("taken", number)

    def drop(self, task: int, result: int | None = None) -> None:
        """Write no more pieces of a result, or of all, of a task: its memory goes to somebody else."""
        for transfer, one in list(self._arriving.items()):
            if one.task == task and result in (None, one.result):
                del self._arriving[transfer]
                if transfer < 0 and self._exchange.values is not None:
                    self._exchange.values.cancel(-transfer)
                    self._exchange.out.add("taken", -transfer)

    def named(self) -> set[int]:
        """Numbers of the objects that these values name."""
        return {ref.objref for one in self._arriving.values() for ref in one.contains}

    def clear(self) -> None:
        """The stream has ended."""
        self._arriving.clear()
