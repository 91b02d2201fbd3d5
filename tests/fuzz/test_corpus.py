"""The inputs that fuzzing has found worth keeping, and some new ones from a seed; fuzz.py goes on from here."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NEW = 300
PATCHES_MOST = 6


def corpus() -> list[str]:
    lines = [line.split("#")[0].strip() for line in (HERE / "corpus.txt").read_text().splitlines()]
    return [line for line in lines if line]


def new_inputs() -> list[str]:
    rng = random.Random(20)
    heads = [rng.randbytes(2) + bytes([rng.choice((0, 0, 0, 1, 128))]) for _ in range(NEW)]
    return [(head + rng.randbytes(12 * rng.randint(1, PATCHES_MOST))).hex() for head in heads]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("inputs", [corpus(), new_inputs()], ids=["kept", "new"])
def test_damaged_arena_is_an_error_or_harmless(inputs):
    """A crash ends the process with a signal, a wrong error with a traceback; a hang ends the test."""
    command = [sys.executable, str(HERE / "damage.py")]
    done = subprocess.run(command, input="\n".join(inputs), capture_output=True, text=True, timeout=280)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"ended with {done.returncode} at {last}:\n{done.stderr}"
    assert len(done.stdout.splitlines()) == len(inputs)
