"""Signatures of functions and classes whose annotations cannot be evaluated."""

import subprocess
import sys
import textwrap

import pytest

# A file of its own: an older Python evaluates annotations when it reads the `def`.
PROGRAM = textwrap.dedent("""
    import fastrt
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from decimal import Decimal

    @fastrt.remote
    def double(value: Decimal) -> Decimal:
        return 2 * value

    @fastrt.remote
    class Counter:
        def __init__(self, start: Decimal) -> None:
            self.value = start

        def add(self, value: Decimal, *, times: Decimal = 1) -> Decimal:
            self.value += value * times
            return self.value

    with fastrt.init(num_workers=1):
        print(fastrt.get(double.remote(value=21)))
        counter = Counter.remote(1)
        print(fastrt.get(counter.add.remote(2, times=3)))
        for call in (lambda: double.remote(), lambda: counter.add.remote(), lambda: Counter.remote(start=1, end=2)):
            try:
                call()
            except TypeError as exc:
                print(exc)
""")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once before Python 3.14")
def test_annotations_only_for_type_checkers_do_not_matter(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "42",
        "7",
        "missing a required argument: 'value'",
        "add() missing a required argument: 'value'; its signature is add(value, *, times=1)",
        "Counter() got an unexpected keyword argument 'end'; its signature is Counter(start)",
    ]
