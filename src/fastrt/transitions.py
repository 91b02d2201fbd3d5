"""State machines as data: the moves that one kind of thing can make, and the story of a thing at an illegal one.

A table maps each state to the events it accepts, and each event to the state it leads to. The code that moves a thing
looks the move up here, so no move happens that the table does not list. Each thing keeps its last eight moves in one
integer of 64 bits, a byte for each: a story costs no allocation, also where there are millions of things.

docs/state_machines.md draws every table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
# Compiled state machines index `steps` by the state's number, shifted by this, and the event's number.
EVENT_BITS = 4
# The part of `moves` that stays when one more is added.
KEPT = (1 << 56) - 1
_MOVES_MAX = 255


class Moving(Protocol[S]):
    """A thing that has a state: where it is, and its last moves, at first 0."""

    state: S
    moves: int


class IllegalMoveError(AssertionError):
    """A move that the table does not list: a fault of fastrt. The message holds the last moves of the thing."""


class Transitions(Generic[S]):
    """The moves of one kind of thing. The first state of the table is the one that things begin in.

    Args:
        kind: what the things are called in messages.
        table: by state and event, the next state. A state without events is an end.

    Attributes:
        states: all states; a state's place here is its number.
        events: all events; an event's place here is its number.
        steps: a move's number, by `state << EVENT_BITS | event`; 0 where the table lists no move.
        targets: the number of the state that a move leads to, by the move's number.

    Raises:
        ValueError: a move leads to a state that the table has not, or the table is too large for `steps`.
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
        """Move a thing to its next state.

        Args:
            thing: its `state` and `moves` are set.
            event: the event that moves it.
            name: which one of its kind it is, for the message.
        Raises:
            IllegalMoveError: the table does not list this event for the thing's state.
        """
        number = self._numbers.get((thing.state, event))
        if number is None:
            raise self.illegal(thing.state, event, thing.moves, name)
        thing.state = self._moves[number - 1][2]
        thing.moves = (thing.moves & KEPT) << 8 | number

    def illegal(self, state: S, event: str, moves: int, name: object) -> IllegalMoveError:
        """The error for an event that a thing's state does not accept, with the thing's story."""
        return IllegalMoveError(
            f"{self.kind} {name}: {event!r} is not possible in the state {_word(state)}. Its last moves: "
            f"{self.story(moves) or 'none since it was made or restored'}. This is a fault of fastrt; report it with "
            "this text."
        )

    def story(self, moves: int) -> str:
        """The last moves of a thing, oldest first: 'NEW -open-> OPEN -end-> ENDED'; empty when there are none."""
        made = self.history(moves)
        steps = [f"-{event}-> {_word(self.table[state][event])}" for state, event in made]
        return " ".join([_word(made[0][0]), *steps]) if made else ""

    def history(self, moves: int) -> list[tuple[S, str]]:
        """The last moves of a thing as (state, event), oldest first."""
        return [self._moves[number - 1][:2] for number in moves.to_bytes(8, "big").lstrip(b"\0")]


def _word(state: object) -> str:
    return str(getattr(state, "name", state))
