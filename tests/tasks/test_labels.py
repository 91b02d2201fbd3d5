"""Selectors of labels: their forms, and what they match."""

import pytest

from fastrt.config import Config
from fastrt.errors import ConfigError
from fastrt.tasks.labels import in_words, matches, resource_of
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
    ],
)
def test_selector_matches_what_ray_says(wanted, expected):
    resource = resource_of("label_selector", {"zone": wanted})
    assert [labels for labels in (NORTH, SOUTH, NOWHERE) if matches(resource, labels)] == expected


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
