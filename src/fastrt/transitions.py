"""State machines as data: the legal moves of one kind of object, and an error with its history at an illegal one.

A table maps each state to the events it accepts, and each event to the next state. The code that moves an object
looks the move up here, so no move happens that the table does not list. Each object keeps its last eight moves in one
integer of 64 bits, one byte each: the history needs no allocation, even for millions of objects.

docs/state_machines.md draws every table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
# Compiled state machines index `steps` by the state's number, shifted by this, and the event's number.
EVENT_BITS = 4
# The moves that are kept when one more is added.
KEPT = (1 << 56) - 1
_MOVES_MAX = 255


class Moving(Protocol[S]):
    """An object with a state and its last moves; `moves` is 0 at first."""

    state: S
    moves: int


class IllegalMoveError(AssertionError):
    """A move that the table does not list: a fault of fastrt. The message holds the last moves of the thing."""


class Transitions(Generic[S]):
    """The transition table of one kind of object. Objects begin in the first state of the table.

    Args:
        kind: name of the objects in messages.
        table: by state and event, the next state. A state without events is final.

    Attributes:
        states: all states; a state's place here is its number.
        events: all events; an event's place here is its number.
        steps: a move's number, by `state << EVENT_BITS | event`; 0 where the table lists no move.
        targets: the number of the state that a move leads to, by the move's number.

    Raises:
        ValueError: a move leads to a state that is not in the table, or the table is too large for `steps`.
    """

    def __init__(self, kind: str, table: Mapping[S, Mapping[str, S]]) -> None:
        self.kind = kind
        self.table = table
        self.states = list(table)
        self.events = list(dict.fromkeys(event for row in table.values() for event in row))
        self._moves = [(state, event, target) for state, row in table.items() for event, target in row.items()]
        self._numbers = {(state, event): n for n, (state, event, _) in enumerate(self._moves, 1)}
        unknown = [target for _, _, target in self._moves if target not in table]
        if unknown or len(self._moves) > _MOVES_MAX or len(self.events) > 1 << EVENT_BITS:
            raise ValueError(f"the table of {kind} leads to {unknown}, or has more than {_MOVES_MAX} moves")
        steps = bytearray(len(self.states) << EVENT_BITS)
        for (state, event), n in self._numbers.items():
            steps[self.states.index(state) << EVENT_BITS | self.events.index(event)] = n
        self.steps = bytes(steps)
        self.targets = bytes([0, *(self.states.index(target) for _, _, target in self._moves)])

    def move(self, thing: Moving[S], event: str, name: object) -> None:
        """Move an object to its next state.

        Args:
            thing: its `state` and `moves` are set.
            event: the event that moves it.
            name: which one of its kind it is, for the message.
        Raises:
            IllegalMoveError: the table does not list this event for the object's state.
        """
        number = self._numbers.get((thing.state, event))
        if number is None:
            raise self.illegal(thing.state, event, thing.moves, name)
        thing.state = self._moves[number - 1][2]
        thing.moves = (thing.moves & KEPT) << 8 | number

    def illegal(self, state: S, event: str, moves: int, name: object) -> IllegalMoveError:
        """The error for an event that an object's state does not accept, with the object's last moves."""
        return IllegalMoveError(
            f"{self.kind} {name}: {event!r} is not possible in the state {_word(state)}. Its last moves: "
            f"{self.story(moves) or 'none since it was made or restored'}. This is a fault of fastrt; report it with "
            "this text."
        )

    def story(self, moves: int) -> str:
        """The last moves as text, oldest first: 'NEW -open-> OPEN -end-> ENDED'; empty if there are none."""
        made = self.history(moves)
        steps = [f"-{event}-> {_word(self.table[state][event])}" for state, event in made]
        return " ".join([_word(made[0][0]), *steps]) if made else ""

    def history(self, moves: int) -> list[tuple[S, str]]:
        """The last moves as (state, event), oldest first."""
        return [self._moves[number - 1][:2] for number in moves.to_bytes(8, "big").lstrip(b"\0")]


def _word(state: object) -> str:
    return str(getattr(state, "name", state))
