"""Every target of `parsers.py` on its seeds, and on damaged ones; fuzzing goes on from there."""

import random

import pytest
from fuzz import parsers

TABLE = parsers.table()
DAMAGED = 200


@pytest.mark.parametrize("name", TABLE)
def test_parser_refuses_damaged_input_in_words(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    target, dice = TABLE[name], random.Random(7)
    for seed in target.seeds:
        target.run(seed)
    for _ in range(DAMAGED):
        data = bytearray(dice.choice(target.seeds))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        target.run(bytes(data[: dice.randrange(1, len(data) + 1)]))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", TABLE)
def test_parser_refuses_hostile_text_in_words(name: str) -> None:
    for data in (b"", b"[" * 4000, b'{"a":' * 4000, b"1" * 100_000, b"\0" * 5000, b"\xff" * 5000, b'"\\ud800"'):
        TABLE[name].run(data)
