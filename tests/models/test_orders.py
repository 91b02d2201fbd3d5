"""The protocols of docs/memory_order.md as C11 programs in orders/, each checked by herd7 in all executions of RC11.

An order that matters is in `WEAKER`: with a weaker one there, herd7 finds an execution that the protocol must not have.
So a program that herd7 accepts is one that it could have refused. tests/support/herd_env.py finds
or unpacks herd7.
"""

import re
import subprocess
from pathlib import Path

import pytest

from support.herd_env import herd7

ORDERS = Path(__file__).with_name("orders")
CORE = Path(__file__).resolve().parents[2] / "src/fastrt/_core"
HERD7 = herd7()
RELEASE_FENCE, ACQUIRE_FENCE, FULL_FENCE = (
    f"  atomic_thread_fence({order});\n" for order in ("release", "acquire", "seq_cst")
)
# Program, its text without `memory_order_`, the weaker one.
WEAKER = [
    ("seal_wait", "store_explicit(state, 1, seq_cst", "store_explicit(state, 1, release"),
    ("seal_wait", "load_explicit(waits, seq_cst", "load_explicit(waits, acquire"),
    ("seal_wait", "load_explicit(state, seq_cst", "load_explicit(state, acquire"),
    ("seal_wait", "load_explicit(sleepers, seq_cst", "load_explicit(sleepers, acquire"),
    ("holder_deleter", "exchange_explicit(bits, 1, seq_cst", "exchange_explicit(bits, 1, acq_rel"),
    (
        "holder_deleter",
        "int held = atomic_load_explicit(bits, seq_cst",
        "int held = atomic_load_explicit(bits, acquire",
    ),
    (
        "holder_deleter",
        "int word = atomic_load_explicit(state, seq_cst",
        "int word = atomic_load_explicit(state, acquire",
    ),
    ("push_idle", "store_explicit(tail, 1, seq_cst", "store_explicit(tail, 1, release"),
    ("push_idle", "load_explicit(idle, seq_cst", "load_explicit(idle, acquire"),
    ("push_idle", "load_explicit(tail, seq_cst", "load_explicit(tail, acquire"),
    ("row_sequence", RELEASE_FENCE, ""),
    ("row_sequence", ACQUIRE_FENCE, ""),
    ("row_sequence", "store_explicit(seq, 2, release", "store_explicit(seq, 2, relaxed"),
    ("trace_ring", RELEASE_FENCE, ""),
    ("trace_ring", FULL_FENCE, ""),
    ("kept_failure", RELEASE_FENCE, ""),
    ("kept_failure", FULL_FENCE, ""),
    ("kept_failure", "store_explicit(word, 3, seq_cst", "store_explicit(word, 3, relaxed"),
]
# Lines of the core that the programs stand for. When one of them changes, look at the program again.
ANCHORS = [
    ("objects/objects.pyx", "a64_store_sc(state, frt_word(sealed, client"),
    ("objects/objects.pyx", "if a64_load_sc(waits):"),
    ("memory/wait.pyx", "a64_or_sc(bits, x.me_bit)\n        if _sealed(x, i):"),
    ("memory/wait.pyx", "a32_add_sc(&me.sleepers, 1)\n    rc = frt_futex_wait(&me.wake, seen"),
    ("memory/clients.pyx", "a32_add_sc(&slot.wake, 1)\n    if a32_load_sc(&slot.sleepers):"),
    ("objects/objects.pyx", "a64_or_sc(bits, x.me_bit)\n    word = a64_load_sc(state)"),
    (
        "objects/objects.pyx",
        "if not a64_cas_sc(state, word, deleting):\n            continue\n        if not _held(x, i):",
    ),
    ("memory/queue.pyx", "a64_store_sc(&sb.ring_tail, sb.ring_tail + 1)"),
    ("memory/queue.pyx", "bits = a64_load_sc(&x.sb.idle[w])"),
    ("memory/wait.pyx", "a64_or_sc(&x.sb.idle[x.me_word], x.me_bit)\n    t = queue_pop(x)"),
    ("tables/embedding.pyx", "a32_store_rel(&note.seq, note.seq | 1)\n            a_fence_rel()"),
    ("tables/embedding.pyx", "a_fence_acq()\n        if a32_load_rlx(&note.seq) == seq:"),
    ("include/trace.h", "a_fence_rel();"),
    ("memory/trace.pyx", "a_fence_sc()\n    count = a64_load_acq"),
    ("tasks/failures.pyx", "a_fence_rel()"),
    ("tasks/failures.pyx", "a_fence_sc()\n    word = a64_load_acq"),
]
needs_herd7 = pytest.mark.skipif(HERD7 is None, reason="herd7 is not here; tests/support/herd_env.py unpacks it")


def observed(program: Path) -> str:
    """Whether the execution that a program describes at its end occurs: Never, Sometimes or Always."""
    assert HERD7 is not None
    done = subprocess.run([*HERD7, "-model", "rc11.cat", program], capture_output=True, text=True, timeout=50)
    found = re.search(rf"^Observation {program.stem} (\w+)", done.stdout, re.M)
    assert found, done.stdout + done.stderr
    return found[1]


@needs_herd7
@pytest.mark.parametrize("program", sorted(ORDERS.glob("*.litmus")), ids=lambda path: path.stem)
def test_protocol_has_no_execution_that_loses_something(program):
    assert observed(program) == "Never"


@needs_herd7
@pytest.mark.parametrize(("name", "text", "weaker"), WEAKER)
def test_weaker_order_has_one(tmp_path, name, text, weaker):
    program = (ORDERS / f"{name}.litmus").read_text().replace("memory_order_", "")
    assert program.count(text) == 1
    orders = r"\b(?=(?:seq_cst|acq_rel|acquire|release|relaxed)[,)])"
    (tmp_path / f"{name}.litmus").write_text(re.sub(orders, "memory_order_", program.replace(text, weaker)))
    assert observed(tmp_path / f"{name}.litmus") == "Sometimes"


def test_core_has_the_lines_of_the_programs():
    assert {path.stem for path in ORDERS.iterdir()} == {name for name, _, _ in WEAKER}
    for file, line in ANCHORS:
        assert line in (CORE / file).read_text(), f"{file} has no longer: {line}"
