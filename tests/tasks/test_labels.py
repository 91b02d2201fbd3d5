"""Selectors of labels: their forms, and what they match."""

import pytest

from fastrt.config import Config
from fastrt.errors import ConfigError, UnsupportedError
from fastrt.tasks.label_strategy import DoesNotExist, Exists, In, NodeLabelSchedulingStrategy, NotIn
from fastrt.tasks.labels import choices, in_words, is_selector, matches, resource_of
from fastrt.tasks.resources import Demand, demand_of

NORTH, SOUTH, NOWHERE = {"zone": "north"}, {"zone": "south"}, {}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("north", [NORTH]),
        ("!north", [SOUTH, NOWHERE]),
        ("in(north, east)", [NORTH]),
        ("in(north,south)", [NORTH, SOUTH]),
        ("!in(north, south)", [NOWHERE]),
        ("in()", []),
        ("!in()", [NORTH, SOUTH, NOWHERE]),
        ("in(,)", [NOWHERE]),
        ("in(,north)", [NORTH, NOWHERE]),
        ("!in(,)", [NORTH, SOUTH]),
        ("!in(, north)", [SOUTH]),
    ],
)
def test_selector_matches_what_ray_says(wanted, expected):
    resource = resource_of("label_selector", {"zone": wanted})
    assert [labels for labels in (NORTH, SOUTH, NOWHERE) if matches(resource, labels)] == expected


ALL = [NORTH, SOUTH, NOWHERE]


@pytest.mark.parametrize(
    ("hard", "soft", "expected"),
    [
        (In("north"), None, [[NORTH]]),
        (In("north", "south"), None, [[NORTH, SOUTH]]),
        (NotIn("north"), None, [[SOUTH, NOWHERE]]),
        (Exists(), None, [[NORTH, SOUTH]]),
        (DoesNotExist(), None, [[NOWHERE]]),
        (None, In("north"), [[NORTH], ALL]),
        (None, DoesNotExist(), [[NOWHERE], ALL]),
        (Exists(), In("north"), [[NORTH], [NORTH, SOUTH]]),
        (Exists(), NotIn("north"), [[SOUTH], [NORTH, SOUTH]]),
        (NotIn("north"), DoesNotExist(), [[NOWHERE], [SOUTH, NOWHERE]]),
        (In("north", "south"), NotIn("south"), [[NORTH], [NORTH, SOUTH]]),
        (DoesNotExist(), In("north"), [[NOWHERE]]),
        (In("north"), Exists(), [[NORTH]]),
    ],
)
def test_strategy_of_labels_is_a_selector_and_its_fallback(hard, soft, expected):
    hard, soft = ({} if one is None else {"zone": one} for one in (hard, soft))
    strategy = NodeLabelSchedulingStrategy(hard, soft=soft)
    ((resource, _),) = [one for one in demand_of({"scheduling_strategy": strategy}).amounts if is_selector(one[0])]
    assert [[labels for labels in ALL if matches(one, labels)] for one in choices(resource)] == expected
    assert strategy == NodeLabelSchedulingStrategy(hard, soft=soft)
    assert len({strategy, NodeLabelSchedulingStrategy(hard, soft=soft)}) == 1
    assert repr(strategy) == f"NodeLabelSchedulingStrategy({hard}, soft={soft})"


def test_strategy_of_ray_itself_is_read_by_its_form():
    class Expression:
        def __init__(self, key, operator):
            self.key, self.operator = key, operator

    class Strategy:
        hard, soft = [Expression("zone", In("north"))], []

    Strategy.__name__ = NodeLabelSchedulingStrategy.__name__
    ours = NodeLabelSchedulingStrategy({"zone": In("north")})
    assert demand_of({"scheduling_strategy": Strategy()}) == demand_of({"scheduling_strategy": ours})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: In(), ValueError, "variadic parameter of the In operator must be a non-empty tuple"),
        (lambda: NotIn("a", 1), ValueError, "value in position 1 for the NotIn operator must be str"),
        (lambda: NodeLabelSchedulingStrategy({}), ValueError, "cannot both be empty"),
        (lambda: NodeLabelSchedulingStrategy(None, soft=["1"]), ValueError, "The soft parameter must be a map"),
        (lambda: NodeLabelSchedulingStrategy({1: In("a")}), ValueError, "key of the hard parameter must be of type"),
        (lambda: NodeLabelSchedulingStrategy({"a": "b"}), ValueError, "must be one of the `In`, `NotIn`, `Exists`"),
        (lambda: demand_of({"scheduling_strategy": NOT_HERE}), UnsupportedError, "names the value 'a,b'"),
        (lambda: demand_of({"scheduling_strategy": THERE, "label_selector": {"a": "b"}}), ValueError, "not both"),
    ],
)
def test_wrong_strategy_of_labels_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


NOT_HERE = NodeLabelSchedulingStrategy({"zone": NotIn("a,b")})
THERE = NodeLabelSchedulingStrategy({"zone": Exists()})


def test_every_label_of_a_selector_must_match():
    resource = resource_of("label_selector", {"zone": "north", "disk": "!slow"})
    assert matches(resource, {"zone": "north"})
    assert not matches(resource, {"zone": "north", "disk": "slow"})
    assert not matches(resource, {"disk": "fast"})
    assert in_words(resource) == "disk=!slow, zone=north"


@pytest.mark.parametrize(
    "text",
    ["?", "?{", "?[]", '?["zone"]', '?[{"zone": "north"}, 5]', '?{"zone": 5}', '?{"zone": "!!a"}', '?{"zone": "in(a"}'],
)
def test_selector_that_is_malformed_matches_nothing(text):
    assert not matches(text, {"zone": "north"})
    assert in_words(text)


@pytest.mark.parametrize(
    ("selector", "error"),
    [
        ("zone=north", TypeError),
        ({"zone": 5}, TypeError),
        ({5: "north"}, TypeError),
        ({"": "north"}, ValueError),
        ({"zone": ""}, ValueError),
        ({"zone": "!!north"}, ValueError),
        ({"zone": "in(a"}, ValueError),
        ({f"zone{k}": "north" for k in range(65)}, ValueError),
        ({"z" * 129: "north"}, ValueError),
    ],
)
def test_wrong_selector_is_refused(selector, error):
    with pytest.raises(error, match="label_selector"):
        demand_of({"label_selector": selector})


def test_empty_selector_demands_nothing():
    assert demand_of({"label_selector": {}}) is None


@pytest.mark.parametrize(
    ("fallbacks", "error"),
    [
        ({"zone": "north"}, TypeError),
        ([{"zone": "north"}], ValueError),
        ([{"label_selector": {"zone": "north"}, "resources": {}}], ValueError),
        ([{"label_selector": {"zone": "!!north"}}], ValueError),
        ([{"label_selector": "north"}], TypeError),
        ([{"label_selector": {}}] * 17, ValueError),
    ],
)
def test_wrong_fallbacks_are_refused(fallbacks, error):
    with pytest.raises(error, match=r"fallback_strategy|label_selector"):
        demand_of({"label_selector": {"zone": "north"}, "fallback_strategy": fallbacks})


def test_fallbacks_without_a_selector_demand_nothing():
    assert demand_of({"fallback_strategy": [{"label_selector": {"zone": "north"}}]}) is None


def test_selector_survives_the_way_to_another_node():
    demand = demand_of({"label_selector": {"zone": "in(a, b)"}, "num_cpus": 2})
    assert Demand.from_bytes(demand.to_bytes()) == demand


@pytest.mark.parametrize("given", ["zone=north,disk=fast", '{"zone": "north", "disk": "fast"}'])
def test_labels_of_a_node_are_read_from_text(given):
    assert Config.load(labels=given).labels == {"zone": "north", "disk": "fast"}


@pytest.mark.parametrize(
    "given",
    ["zone", "{", [], {"zone": 5}, {"zone": ""}, {"a,b": "c"}, {"zone": "!x"}, {f"l{k}": "x" for k in range(65)}],
)
def test_wrong_labels_of_a_node_are_refused(given):
    with pytest.raises(ConfigError, match="labels"):
        Config.load(labels=given)
