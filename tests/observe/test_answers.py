"""Pages for other nodes: bounded whatever a row holds, and nothing but this session's tables and log."""

import json
from pathlib import Path

import pytest

import fastrt
from fastrt.cluster.questions import Question
from fastrt.errors import FastrtError
from fastrt.observe import answers
from fastrt.store import client as store_client


@pytest.mark.parametrize(
    ("kind", "filters", "after"),
    [
        ("../../etc/passwd", "{}", ""),
        ("log", "{}", "../../../../etc/passwd"),
        ("log", "{}", "00000001.log:0"),
        ("log", '{"folder": "/etc"}', ""),
        ("log", '{"task": 5}', ""),
        ("memory", '{"objects": true}', ""),
        ("processes", '{"pid": 1}', ""),
        ("stack", '{"pid": true, "native": false}', ""),
        ("debug", '{"pid": 1, "line": 5, "interrupt": false}', ""),
        ("stops", '{"pid": 1}', ""),
        ("tasks", "{}", "-1"),
        ("tasks", "{}", "9" * 5000),
        ("tasks", '{"__class__": 1}', ""),
        ("tasks", "[" * 5000, ""),
        ("tasks", '{"name": "' + "*" * 70_000 + '"}', ""),
    ],
)
def test_hostile_question_is_refused_with_the_reason(rt, kind, filters, after):
    with pytest.raises((ValueError, FastrtError)) as found:
        answers.answer(store_client.require(), Question(kind, filters, after, 10))
    assert "passwd" not in str(found.value) or "give the `after`" in str(found.value) or "no table" in str(found.value)


def test_log_names_no_file_outside_of_the_session(rt):
    found = answers.answer(
        store_client.require(), Question("log", '{"task": "../../etc", "actor": "/"}', "99999999:5", 0)
    )
    assert (found.rows, found.is_end) == ("[]", True)
    link = Path(rt.socket_path).parent.parent / "logs" / Path(rt.socket_path).parent.name
    link.parent.mkdir(mode=0o700, exist_ok=True)
    link.mkdir(mode=0o700)
    (link / "00000001.log").symlink_to("/etc/passwd")
    with pytest.raises((FastrtError, OSError)):
        answers.answer(store_client.require(), Question("log", "{}", "", 0))
    (link / "00000001.log").unlink()


def test_page_is_bounded_whatever_a_row_holds(rt):
    class Wide:
        pass

    Wide.__name__ = Wide.__qualname__ = '"\\' * 200_000
    holders = [fastrt.remote(Wide).remote() for _ in range(3)]
    rows, after = [], ""
    while True:
        found = answers.answer(store_client.require(), Question("actors", "{}", after, 0))
        assert len(found.rows) <= answers.BYTES_MAX
        rows += json.loads(found.rows)
        after = found.after
        if found.is_end:
            break
    assert len(rows) == 3
    assert all(len(row["class"]) <= 17_000 for row in rows)
    del holders
