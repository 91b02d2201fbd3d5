"""Every state that a few processes can reach through the core's protocols, with deaths anywhere; and its mutants.

The counts of deaths that a scenario tries are chosen so that all of this takes half a minute. For more, set
FASTRT_MODEL_DEPTH to the least number of deaths to try in every scenario (2 takes minutes, 3 gigabytes as well).
"""

import os
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest

from .allocator import Allocator
from .explorer import Memory, Model, Program, Result, add, at, explore, load, lock, store, unlock
from .janitor import Janitor
from .mailbox import Mailbox
from .objects import Objects
from .pool import Pool
from .recording import Recording
from .remote import Remote
from .ring import Ring
from .spilling import Spilling
from .streams import Streams
from .tasks import Tasks
from .waiting import Waiting
from .wakes import Wakes

MODELS = [
    *(Objects, Tasks, Mailbox, Ring, Waiting, Wakes, Allocator, Pool, Spilling, Remote, Streams, Janitor, Recording),
]
SCENARIOS = [(model, scenario) for model in MODELS for scenario in model.SCENARIOS]
# Seconds of CPU each.
LARGE = {"Janitor-all", "Objects-handover", "Objects-relay", "Allocator-runs", "Waiting-chain"}
DEPTH = int(os.environ.get("FASTRT_MODEL_DEPTH", "0"))
DETECTED: dict[str, Result] = {}  # with the shortest trace of each
TRIED: list[str] = []
STATES: dict[str, int] = {}


def _named(one: tuple[type[Model], str]) -> str:
    return f"{one[0].__name__}-{one[1]}"


@pytest.fixture(scope="module", autouse=True)
def totals(request: pytest.FixtureRequest) -> Iterator[None]:
    """Say, past pytest's capture of output, what the module's tests have added up to."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stdout.write(f"\nmodels: {len(MODELS)}, states explored: {sum(STATES.values()):,}")
        sys.stdout.write("".join(f"\n    {name} {count:,}" for name, count in STATES.items()))
        sys.stdout.write(f"\nmutants detected {len(DETECTED)} of {len(TRIED)}\n")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "scenario"),
    [pytest.param(*one, marks=[pytest.mark.long] * (_named(one) in LARGE)) for one in SCENARIOS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_protocol_has_no_bad_state(model: type[Model], scenario: str) -> None:
    result = explore(model(scenario=scenario, crashes=max(DEPTH, model.SCENARIOS[scenario])))
    STATES[f"{model.__name__}/{scenario}"] = result.states
    assert result.violation is None, str(result)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_rules_taken_out_are_noticed(model: type[Model]) -> None:
    missed = []
    for rule, scenario in model.MUTANTS.items():
        TRIED.append(rule)
        for crashes in (0, 1, 2):
            result = explore(model(rule, scenario, crashes))
            if result.violation is not None and result.trace:
                DETECTED[f"{model.__name__}: {rule}"] = result
                break
        else:
            missed.append(f"{rule} ({result.states} states)")
    assert not missed, f"{model.__name__} is as good without: {', '.join(missed)}"


@pytest.mark.parametrize("rule", ["idle bit before the last look", "spinner passes the word on"])
def test_nap_ends_every_lost_wake(rule: str) -> None:
    assert explore(Wakes(rule, "idle", 0)).violation
    assert explore(Wakes(rule, "nap", 0)).violation is None


# ---- the explorer itself ----


class Counter(Model):
    """Two processes count to two without a lock, or with one that is robust."""

    SCENARIOS: ClassVar = {"bare": 0, "locked": 1}
    LOCKS = ("lock",)

    def memory(self) -> Memory:
        return {"count": 0, "lock": 0, "dead": 0}

    def programs(self) -> list:
        return [("one", self.count), ("two", self.count)]

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if asleep:
            return f"{asleep[0]} waits for ever"
        return None if s["count"] == 2 - s["dead"].bit_count() else f"two processes counted to {s['count']}"

    def count(self, me: int) -> Program:
        if self.scenario == "bare":
            value = yield "read", load, "count"
            yield "write", store, "count", value + 1
        else:
            yield "take", lock, "lock", me
            yield "add", add, "count", 1
            yield "give", unlock, "lock"


def shortest(scenario: str, crashes: int) -> Result:
    return explore(Counter(scenario=scenario, crashes=crashes))


def test_lost_update_is_found_by_a_shortest_trace() -> None:
    result = shortest("bare", 0)
    assert result.violation == "two processes counted to 1"
    assert [line.split()[0] for line in result.trace[:4]] == ["one", "two", "one", "two"]
    assert "[count 0 -> 1]" in str(result)


def test_lock_of_a_dead_process_is_orphaned_not_lost() -> None:
    assert shortest("locked", 0).violation is None
    result = shortest("locked", 1)
    assert "dies" in str(result), "a death after the addition leaves one count too many"
    assert "waits for ever" not in str(result)


def test_line_that_the_core_no_longer_has_is_an_error() -> None:
    assert at("objects.object_acquire: a64_or_sc(bits, x.me_bit)").startswith("object_acquire (objects.pyx:")
    with pytest.raises(LookupError, match="the core has changed"):
        at("objects.object_acquire: a64_or_sc(no such thing)")
