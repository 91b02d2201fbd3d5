"""Where the bundles of placement groups go: a pure choice."""

import pytest

from fastrt.node.bundles import assign

A, B, C = ({"CPU": 4, "gpu": 1}, {"CPU": 4}, {"CPU": 2})
ROOMS = {"a": A, "b": B, "c": C}


def bundles(*cpus):
    return [(("CPU", cpu),) for cpu in cpus]


@pytest.mark.parametrize(
    ("strategy", "wanted", "taken", "chosen"),
    [
        ("PACK", bundles(1, 1, 1), (), ["a", "a", "a"]),
        ("PACK", bundles(3, 3, 2), (), ["a", "b", "c"]),
        ("PACK", bundles(2, 4), (), ["b", "a"]),
        ("PACK", bundles(1), ("c",), ["c"]),
        ("SPREAD", bundles(1, 1, 1), (), ["a", "b", "c"]),
        ("SPREAD", bundles(1, 1), ("a",), ["b", "c"]),
        ("SPREAD", bundles(1, 1, 1, 1), (), ["a", "b", "c", "a"]),
        ("STRICT_PACK", bundles(2, 2), (), ["a", "a"]),
        ("STRICT_PACK", bundles(3, 2), (), None),
        ("STRICT_PACK", bundles(1), ("c",), ["c"]),
        ("STRICT_SPREAD", bundles(1, 2, 1), (), ["b", "a", "c"]),
        ("STRICT_SPREAD", bundles(1, 1, 1, 1), (), None),
        ("STRICT_SPREAD", bundles(1), ("a", "b"), ["c"]),
        ("STRICT_SPREAD", bundles(1), ("a", "b", "c"), None),
        ("PACK", [(("gpu", 1),), (("gpu", 1),)], (), None),
        ("PACK", [(("CPU", 1), ("gpu", 1)), (("CPU", 4),)], (), ["a", "b"]),
    ],
)
def test_bundles_go_where_the_strategy_says(strategy, wanted, taken, chosen):
    before = {node: dict(room) for node, room in ROOMS.items()}
    assert assign(wanted, ROOMS, strategy, taken) == chosen
    assert before == ROOMS
