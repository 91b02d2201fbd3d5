"""Messages between processes and their daemon: what is written is read, and nothing malformed is."""

import json

import pytest

from fastrt.store import debugging  # defines messages, too
from fastrt.store.messages import (
    MESSAGES,
    Bye,
    End,
    Fork,
    Forward,
    ForwardedRecord,
    MessageError,
    NodeList,
    NodeRow,
    expect,
    read_message,
    write_message,
)

A_NODE = ["n", "name", {"CPU": 10_000}, {"CPU": -1}, {"zone": "north"}]
GOOD = {
    "U32": 7, "U64": 2**64 - 1, "I64": -1, "str": "x\ny", "bool": True, "float": 0.5, "list[str]": ["a", "b"],
    "list[list[str]]": [["a"], []],
    "U32 | None": 7, "Parts": {"CPU": -1}, "NodeRow": A_NODE, "list[NodeRow]": [A_NODE, A_NODE],
    "list[HeldObject]": [[5, 6]], "list[KeptObject]": [[5, 6]], "list[U64]": [5, 2**64 - 1],
    "list[ForwardedRecord]": [[1, 2, "n"]],
    "list[TaskRecord]": [[1, 2]], "list[StandbyHead]": [["n", "h:1"]],
    "list[DemandRow]": [["task", {"CPU": 1}, "spread", "", False, 3, True]],
    "list[EndedProcess]": [[1, 2, 3, 1, 4, 5, "SYSTEM_ERROR", "it was killed", "00a1", "A", "n", 2]],
    "list[Parts]": [{"CPU": 1}, {}], "dict[str, str]": {"python": "3.11"},
    "list[GroupRow]": [["g", "PACK", "CREATED", {"0": {"CPU": 1}}, {"0": "n"}, ["FINISHED", 1, 0.5, 0.25, 0.0]]],
}  # fmt: skip
BAD = [[[]], {"x": {}}, None, "5", 2**64, False, 1.5]
ALL = list(MESSAGES.values())
assert debugging.DebugText in ALL


def fields_of(kind):
    """A good value, as JSON has it, of each field."""
    return {name: GOOD[hint] for name, hint in kind.__annotations__.items()}


@pytest.mark.parametrize("kind", ALL, ids=MESSAGES)
def test_message_is_read_as_it_was_written(kind):
    raw = {"op": kind.operation, **fields_of(kind)}
    message = read_message(json.dumps(raw).encode())
    assert type(message) is kind
    assert json.loads(write_message(message)) == raw
    assert read_message(write_message(message)) == message


@pytest.mark.parametrize("kind", ALL, ids=MESSAGES)
def test_malformed_message_is_refused_with_its_name_and_field(kind):
    fields = fields_of(kind)
    name = kind.operation
    bad = [({**fields, "extra": 1}, "unknown field 'extra'")]
    for field, good in fields.items():
        bad.append(({key: value for key, value in fields.items() if key != field}, f"no field {field!r}"))
        hint = kind.__annotations__[field]
        for value in BAD:
            allowed = (value is None and "None" in hint) or (type(value) is int and hint == "float")
            allowed = allowed or (value == [[]] and hint == "list[list[str]]")
            if not allowed and (type(value) is not type(good) or type(value) in (int, list, dict)):
                bad.append(({**fields, field: value}, f"field {field!r} must be"))
    for raw, why in bad:
        with pytest.raises(MessageError, match=f"^message '{name}'.*{why}"):
            read_message(json.dumps({"op": name, **raw}))


def test_rows_inside_of_a_message_are_records_of_checked_values():
    row = NodeRow("n", "name", {"CPU": 1}, {}, {"zone": "north"})
    assert read_message(write_message(NodeList(row, [row], []))).others[0].total == {"CPU": 1}
    for rows in ([[1, 2]], [[1, 2, "n", 4]], [[-1, 2, "n"]], [[2**32, 2, "n"]], [[1, True, "n"]], [{}], [None]):
        with pytest.raises(MessageError, match="'forward': field 'tasks' must be "):
            read_message(json.dumps({"op": "forward", "tasks": rows, "actors": []}))
    assert read_message(write_message(Forward([ForwardedRecord(1, 2, "n")], []))).tasks[0].node == "n"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is no JSON"), (b"[]", "is no JSON object"), (b'"text"', "is no JSON object"),
        (b"\xff", "not valid UTF-8"),
        (b"{}", "no field 'op'"), (b'{"op": 5}', "'op' must be str"), (b'{"op": "king"}', "there is no message 'king'"),
        (b'{"a":' * 100, "deeper than 32"), (b'{"op": "' + b"x" * (17 << 20), "bytes; at most"),
        (b'{"op": "spill", "nbytes": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
)  # fmt: skip
def test_text_that_is_no_message_is_refused_in_words(raw, why):
    with pytest.raises(MessageError, match=why):
        read_message(raw)


def test_answer_of_another_kind_is_refused():
    assert expect(Fork(3), Fork).actor == 3
    with pytest.raises(MessageError, match="message 'fork' came instead of message 'node_list'"):
        expect(Fork(3), NodeList)
    with pytest.raises(MessageError, match="nothing came instead"):
        expect(None, NodeList)


def test_messages_are_frozen_and_equal_by_kind_and_fields():
    with pytest.raises(AttributeError, match="'fork' cannot be changed"):
        Fork(3).actor = 4
    assert Fork(3) == Fork(3) != Fork(4)
    assert Bye() != End()
    with pytest.raises(ValueError, match="zip"):
        Fork()
    assert NodeList.operation == "node_list"
