"""Transition tables: moves, stories, and the pictures of docs/state_machines.md."""

import re
from pathlib import Path

import pytest

from fastrt.cluster.borrowing import EXPORT, IMPORT
from fastrt.cluster.claims import ABSENT
from fastrt.cluster.leaving import LEAVING
from fastrt.cluster.ledger import ACCEPTED, FORWARDED
from fastrt.coordination.barriers import BARRIER
from fastrt.coordination.legacy_runtime import SESSION
from fastrt.coordination.members import MEMBER
from fastrt.membership.events import CLUSTER
from fastrt.membership.members import MEMBER as CLUSTER_MEMBER
from fastrt.scheduler.objects import OBJECT
from fastrt.scheduler.records import CALL, WORKER
from fastrt.transitions import EVENT_BITS, IllegalMoveError, Transitions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "state_machines.md"
MACHINES = {
    "Coordination: member": MEMBER,
    "Coordination: barrier": BARRIER,
    "Coordination: session of the older runtime service": SESSION,
    "Scheduler: worker": WORKER,
    "Scheduler: call": CALL,
    "Scheduler: object": OBJECT,
    "Membership: cluster": CLUSTER,
    "Membership: member": CLUSTER_MEMBER,
    "Nodes: forwarded task": FORWARDED,
    "Nodes: accepted task": ACCEPTED,
    "Nodes: exported object": EXPORT,
    "Nodes: imported object": IMPORT,
    "Nodes: absent node": ABSENT,
    "Nodes: leaving node": LEAVING,
}
DOOR = Transitions("door", {"OPEN": {"shut": "SHUT"}, "SHUT": {"open": "OPEN", "lock": "LOCKED"}, "LOCKED": {}})


class Door:
    def __init__(self) -> None:
        self.state = "OPEN"
        self.moves = 0


def test_move_sets_the_next_state():
    door = Door()
    DOOR.move(door, "shut", 7)
    DOOR.move(door, "lock", 7)
    assert (door.state, DOOR.history(door.moves)) == ("LOCKED", [("OPEN", "shut"), ("SHUT", "lock")])


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


def word(state):
    """The state's name, as the pages write it."""
    return str(getattr(state, "name", state)).upper()


def drawn():
    """The arrows of each section of the page, as (state, event, next state)."""
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        (block,) = re.findall(r"^```mermaid\nstateDiagram-v2\n(.*?)^```", text, re.M | re.S)
        yield title, sorted(re.findall(r"^ +(\S+) --> (\w+)(?:: (\w+))?$", block, re.M))


def test_page_draws_every_machine():
    assert [title for title, _ in drawn()] == list(MACHINES)


@pytest.mark.parametrize("title", MACHINES)
def test_diagram_agrees_with_the_table(title):
    table = MACHINES[title].table
    expected = [(word(state), word(to), event) for state, row in table.items() for event, to in row.items()]
    assert dict(drawn())[title] == sorted([*expected, ("[*]", word(next(iter(table))), "")])
