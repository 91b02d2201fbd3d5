"""The targets of `ps_parsers.py` with damaged inputs from a seed, and those that fuzzing has found."""

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import ps_parsers

FOUND = {
    "frames": [],
    "http": [b"GET /state HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", b"GET /state HTTP/1.1\r\nX: y"],
}


@pytest.mark.parametrize("target", ps_parsers.TARGETS)
def test_damaged_input_is_refused_without_a_traceback(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(7)
    for data in FOUND[target]:
        ps_parsers.TARGETS[target](data)
    for _ in range(400):
        data = bytearray(dice.choice(ps_parsers.SEEDS[target]))
        for _ in range(dice.randrange(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        ps_parsers.TARGETS[target](bytes(data[: dice.randrange(1, len(data) + 1)]))
    assert "Traceback" not in capfd.readouterr().err
