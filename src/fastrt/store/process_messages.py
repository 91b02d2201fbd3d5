"""Messages about processes of the session that have ended; see `node.ended_processes`."""

from __future__ import annotations

from typing import NamedTuple

from fastrt.store.messages import U32, U64, Message


class EndedProcess(NamedTuple):
    """A process of the session that has ended.

    Attributes:
        slot, gen: its client slot and the slot's generation.
        pid: its process id.
        kind: of its slot: `clients.KIND_DRIVER`, `KIND_WORKER` or `KIND_ACTOR`.
        start_time: when it started, as in the table of clients.
        end_ms: when its end was noticed, in milliseconds of the wall clock.
        cause: the kind of the cause, as in Ray's `exit_type`.
        detail: how it ended, in words.
        actor: the id of the actor that it ran, if that is not started again; else "".
        class_name, actor_name, restarts: of that actor; the name is as its record has it.
    """

    slot: U32
    gen: U64
    pid: U32
    kind: U32
    start_time: U64
    end_ms: U64
    cause: str
    detail: str
    actor: str
    class_name: str
    actor_name: str
    restarts: U32


class ListEndedProcesses(Message):
    """Ask for the last processes that have ended. Answered by `EndedProcessList`."""


class EndedProcessList(Message):
    """The last processes of the session that have ended, the newest last."""

    processes: list[EndedProcess]
