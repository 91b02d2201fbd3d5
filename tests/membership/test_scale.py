"""A thousand members: each is told as much as each of ten is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastrt.membership import events as ev
from fastrt.membership.events import Phase
from support.cluster_play import Play

BENCH = Path(__file__).parents[2] / "bench" / "compare_cluster.py"


@pytest.mark.parametrize("count", [10, 1000])
def test_orders_grow_with_the_members_and_not_faster(count: int) -> None:
    play = Play(count - 1, 1)
    names = [f"w{i}" for i in range(count - 1)] + ["s0"]
    fresh = [f"s{i}" for i in range(1, 1 + count // 10)]
    play.checking = False  # its checks look at every member after each event
    play.register(*names)
    play.do(ev.ScaleOut, 0, len(fresh))
    play.again(*names)
    play.register(*fresh)
    play.done(Phase.SCALE_OUT, *names, *fresh)
    for name in names + fresh:
        play.do(ev.Finish, play.link_of[name], name)
    assert play.phase is Phase.EXIT
    play.state.check_invariants()
    # Metadata, prepare, metadata, done, end: five orders for each old member, three for each new one.
    assert sum(map(len, play.told.values())) == 5 * len(names) + 3 * len(fresh)
    assert sorted(play.ranks[play.link_of[name]] for name in ["s0", *fresh]) == list(range(1 + len(fresh)))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_thousand_simulated_members_register_scale_and_finish() -> None:
    result = subprocess.run(
        [sys.executable, str(BENCH), "200", "1000"], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    ratio = re.search(r"over that at 200: ([\d.]+)", result.stdout)
    assert ratio is not None
    # Five times the members: a quadratic cost would make each five times dearer.
    assert float(ratio[1]) < 3.5, result.stdout
