"""The decisions of `placing` about tasks that select nodes by their labels."""

from fastrt.node.placing import ELSEWHERE, GONE
from support.placings import Here, falling_back, selecting, view


def test_selector_chooses_among_nodes_that_match_and_have_room():
    here = Here(view("a", labels={"zone": "north"}), view("b", cpu=1, labels={"zone": "south"}))
    here.submit(selecting(zone="south"), 2)
    assert here.decide() == [(1, "forward", "b")]
    here.moved(1, ELSEWHERE)
    assert here.decide() == []  # its only node is full
    here.moved(1, GONE)
    assert here.decide() == [(2, "forward", "b")]


def test_selector_that_this_node_matches_keeps_a_task_here():
    here = Here(view("a", labels={"zone": "south"}))
    here.submit(selecting(zone="!south"), 3)
    assert here.decide() == [(1, "admit", ""), (2, "admit", "")]


def test_node_that_joins_later_is_marked_with_known_selectors():
    here = Here(view("a"))
    here.submit(selecting(zone="north"))
    assert here.decide() == []
    here.placing.see([view("b", labels={"zone": "north"})], [])
    assert here.decide() == [(1, "forward", "b")]


def test_selector_that_no_node_matches_is_refused_with_words_where_no_node_can_join():
    here = Here(can_grow=False)
    here.submit(selecting(zone="north"))
    assert here.decide() == [(1, "refuse", "")]
    assert here.placing.shortage(selecting(zone="north")).startswith("CPU 1 where zone=north, which no node has")


def test_first_selector_whose_nodes_have_room_is_taken():
    here = Here(view("a", cpu=1, labels={"zone": "north"}), view("b", cpu=1, labels={"zone": "south"}))
    here.submit(falling_back({"zone": "east"}, {"zone": "south"}, {"zone": "north"}), 3)
    assert here.decide() == [(1, "forward", "b"), (2, "forward", "a")]  # none is in the east; then b is full
    here.moved(1, ELSEWHERE)
    here.moved(1, GONE)
    assert here.decide() == [(3, "forward", "b")]


def test_empty_fallback_is_any_node_and_the_selector_comes_first():
    here = Here(view("a", labels={"zone": "north"}))
    here.submit(falling_back({"zone": "north"}, {}), 3)
    assert here.decide() == [(1, "forward", "a"), (2, "forward", "a"), (3, "admit", "")]


def test_fallbacks_that_no_node_matches_are_refused_with_words():
    here = Here(can_grow=False)
    wanted = falling_back({"zone": "north"}, {"zone": "east"})
    here.submit(wanted)
    assert here.decide() == [(1, "refuse", "")]
    assert here.placing.shortage(wanted).startswith("CPU 1 where zone=north, else zone=east, which no node has")


def test_selectors_that_nothing_uses_are_forgotten():
    here = Here(view("a", labels={"zone": "0"}))
    for k in range(2500):
        here.submit(selecting(zone=f"in({k}, 0)"))
        assert here.decide() == [(k + 1, "forward", "a")]
        here.moved(k + 1, ELSEWHERE)
        here.moved(k + 1, GONE)
    assert len(here.placing.views["id-a"].total) < 1100
    here.submit(selecting(zone="0"))
    assert here.decide() == [(2501, "forward", "a")]
