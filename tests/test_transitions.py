"""Transition tables: moves, stories, and the pictures of docs/state_machines.md."""

import pytest

from fastrt.transitions import EVENT_BITS, IllegalMoveError, Transitions

DOOR = Transitions("door", {"OPEN": {"shut": "SHUT"}, "SHUT": {"open": "OPEN", "lock": "LOCKED"}, "LOCKED": {}})


class Door:
    def __init__(self) -> None:
        self.state = "OPEN"
        self.moves = 0


def test_move_sets_the_next_state():
    door = Door()
    DOOR.move(door, "shut", 7)
    DOOR.move(door, "lock", 7)
    assert (door.state, DOOR.last_move(door.moves)) == ("LOCKED", ("SHUT", "lock"))


def test_illegal_move_raises_with_the_story_and_changes_nothing():
    door = Door()
    DOOR.move(door, "shut", 7)
    DOOR.move(door, "lock", 7)
    words = "door 7: 'open' is not possible in the state LOCKED. Its last moves: OPEN -shut-> SHUT -lock-> LOCKED"
    with pytest.raises(IllegalMoveError, match=words):
        DOOR.move(door, "open", 7)
    assert door.state == "LOCKED"


def test_story_keeps_the_last_eight_moves():
    door = Door()
    with pytest.raises(IllegalMoveError, match="none since it was made"):
        DOOR.move(door, "lock", 7)
    for _ in range(100):
        DOOR.move(door, "shut", 7)
        DOOR.move(door, "open", 7)
    assert DOOR.story(door.moves) == "OPEN " + " ".join(["-shut-> SHUT -open-> OPEN"] * 4)


def test_compiled_form_agrees_with_the_table():
    for state, row in DOOR.table.items():
        for event in DOOR.events:
            number = DOOR.steps[DOOR.states.index(state) << EVENT_BITS | DOOR.events.index(event)]
            assert bool(number) == (event in row)
            assert not number or DOOR.states[DOOR.targets[number]] == row[event]


def test_table_that_leads_nowhere_is_rejected():
    with pytest.raises(ValueError, match="leads to"):
        Transitions("door", {"OPEN": {"shut": "SHUT"}})
