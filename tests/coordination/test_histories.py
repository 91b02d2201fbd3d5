"""Histories of real clients against a front whose keeper is killed under them: is there one order that explains them?

Each client notes what it called, when, and what it was told when. A history of one key is linearizable if its calls
can be put in an order in which each one, taken alone, would have answered so, and in which no call comes before one
that had ended before it began. A call whose end nobody saw may have had its effect at any later time, or never.

`make check` plays 50 histories, `make test` a few: FASTRT_HISTORIES says how many. A failure prints its seed.

Source: Wing and Gong, "Testing and verifying concurrent objects", with Lowe's memory of states seen before.
"""

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastrt.coordination import (
    Agent,
    CoordinationTimeoutError,
    CoordinatorOptions,
    Front,
    KeyExistsError,
    KeyMissingError,
    connect,
)

HISTORIES = int(os.environ.get("FASTRT_HISTORIES", "4"))
# A short run has other seeds every time; any seed can be played again by name.
SEED = int(os.environ.get("FASTRT_SEED", time.time_ns() % 1_000_000))
OPS_EACH = 24
KEYS = ("a", "dir/b")
ROUNDS = 6
# Calls by hand give up so early that some are given up while the keeper is started anew: these are in doubt.
PATIENCE_S = 0.1

Value = bytes | None


@dataclass(frozen=True)
class Op:
    """One call on one key. `ended` is infinite, and `told` None, when nobody knows what became of it."""

    kind: str
    argument: Any
    told: Any
    began: float
    ended: float = math.inf


def steps(op: Op, value: Value) -> list[Value]:
    """The values that a key may have after a call that found `value`; none if the call cannot have answered so."""
    in_doubt = op.ended == math.inf
    after, told = effect(op, value)
    if in_doubt:
        return [after]
    return [after] if told == op.told else []


def effect(op: Op, value: Value) -> tuple[Value, Any]:
    """What a call does to a key, and what its caller is told."""
    if op.kind == "set":
        return (value, "exists") if value is not None else (op.argument, "ok")
    if op.kind == "overwrite":
        return op.argument, "ok"
    if op.kind == "delete":
        return None, "ok"
    if op.kind == "increment":
        try:
            total = b"%d" % (int(value or b"0") + op.argument)
        except ValueError:
            return value, "no number"
        return total, total
    assert op.kind == "get", op.kind
    return value, value


def is_linearizable(ops: list[Op]) -> bool:
    """Whether some order explains the calls on one key, which starts out missing. At most about 200 of them."""
    ops = sorted(ops, key=lambda op: op.began)
    known = sum(1 << index for index, op in enumerate(ops) if op.ended < math.inf)
    seen: set[tuple[int, Value]] = set()
    pending: list[tuple[int, Value]] = [(0, None)]  # which calls are in the order so far, and the value after them
    while pending:
        chosen, value = pending.pop()
        if chosen & known == known:
            return True
        if (chosen, value) in seen:
            continue
        seen.add((chosen, value))
        left = [index for index in range(len(ops)) if not chosen >> index & 1]
        first_end = min(ops[index].ended for index in left)
        for index in left:
            if ops[index].began > first_end:
                break  # that call ended before this one began, and so did it before all after this one
            pending += [(chosen | 1 << index, after) for after in steps(ops[index], value)]
    return False


@dataclass(frozen=True)
class Arrival:
    """One member's call to a barrier; `passed` None: nobody knows."""

    passed: bool | None
    began: float
    ended: float = math.inf


def is_barrier(arrivals: list[Arrival], count: int) -> bool:
    """Whether a round passed for all or for none, and for none before all had come."""
    outcomes = {arrival.passed for arrival in arrivals} - {None}
    if len(outcomes) > 1:
        return False
    if outcomes == {True}:
        everybody_came = max(arrival.began for arrival in arrivals)
        return len(arrivals) == count and all(a.ended >= everybody_came for a in arrivals)
    return True


# ---- the checker itself: what it must let pass, and what it must not ----

GOOD = {
    "one after the other": [Op("set", b"1", "ok", 0, 1), Op("get", None, b"1", 2, 3)],
    "a read while the value is set": [
        Op("set", b"1", "ok", 0, 10),
        Op("get", None, None, 1, 2),
        Op("get", None, b"1", 3, 4),
    ],
    "a write in doubt that took place": [Op("set", b"1", None, 0), Op("get", None, b"1", 5, 6)],
    "a write in doubt that took place late": [
        Op("overwrite", b"1", None, 0),
        Op("get", None, None, 5, 6),
        Op("get", None, b"1", 7, 8),
    ],
    "a write in doubt that never took place": [Op("set", b"1", None, 0), Op("set", b"2", "ok", 5, 6)],
    "two sums at once": [
        Op("increment", 1, b"2", 0, 5),
        Op("increment", 1, b"1", 0, 5),
        Op("get", None, b"2", 6, 7),
    ],
    "one of two sets wins": [Op("set", b"1", "exists", 0, 9), Op("set", b"2", "ok", 1, 8)],
    "deleted and set again": [
        Op("set", b"1", "ok", 0, 1),
        Op("delete", None, "ok", 2, 3),
        Op("set", b"2", "ok", 4, 5),
    ],
}

BAD = {
    "a read of an overwritten value": [
        Op("overwrite", b"1", "ok", 0, 1),
        Op("overwrite", b"2", "ok", 2, 3),
        Op("get", None, b"1", 4, 5),
    ],
    "an acknowledged write that is lost": [Op("set", b"1", "ok", 0, 1), Op("get", None, None, 2, 3)],
    "a value nobody set": [Op("get", None, b"1", 0, 1)],
    "two sets of a new key": [Op("set", b"1", "ok", 0, 9), Op("set", b"2", "ok", 0, 9)],
    "a sum that is counted twice": [Op("increment", 1, b"1", 0, 1), Op("get", None, b"2", 2, 3)],
    "the same sum for two": [Op("increment", 1, b"1", 0, 5), Op("increment", 1, b"1", 0, 5)],
    "a read that goes back": [
        Op("overwrite", b"1", "ok", 0, 1),
        Op("overwrite", b"2", "ok", 2, 20),
        Op("get", None, b"2", 3, 4),
        Op("get", None, b"1", 5, 6),
    ],
    "a delete without effect": [
        Op("set", b"1", "ok", 0, 1),
        Op("delete", None, "ok", 2, 3),
        Op("get", None, b"1", 4, 5),
    ],
    "a write in doubt that comes and goes": [
        Op("set", b"1", None, 0),
        Op("get", None, b"1", 1, 2),
        Op("get", None, None, 3, 4),
    ],
    "a write in doubt that takes effect before its call": [
        Op("get", None, b"1", 0, 1),
        Op("overwrite", b"1", None, 2),
    ],
    "a set refused by nothing": [Op("set", b"1", "exists", 0, 1)],
}


@pytest.mark.parametrize("name", GOOD)
def test_checker_accepts_what_an_order_explains(name: str) -> None:
    assert is_linearizable(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_checker_refuses_what_no_order_explains(name: str) -> None:
    assert not is_linearizable(BAD[name])


def test_checker_finds_one_stale_read_among_two_hundred_calls() -> None:
    rng = random.Random(1)
    ops, value = [], None
    for number in range(200):
        kind = rng.choice(["overwrite", "get", "delete"])
        op = Op(kind, b"%d" % number, None, number * 10.0, number * 10 + 25.0)  # each one overlaps its neighbours
        value, told = effect(op, value)
        ops.append(Op(kind, op.argument, told, op.began, op.ended))
    assert is_linearizable(ops)
    reads = [index for index, op in enumerate(ops) if op.kind == "get" and index > 100]
    stale = ops[reads[0]]
    ops[reads[0]] = Op("get", None, b"3", stale.began, stale.ended)
    assert not is_linearizable(ops)


@pytest.mark.parametrize(
    ("arrivals", "right"),
    [
        ([Arrival(True, 0, 5), Arrival(True, 3, 4)], True),
        ([Arrival(False, 0, 5), Arrival(False, 7, 8)], True),
        ([Arrival(False, 0, 5)], True),
        ([Arrival(True, 0, 5), Arrival(None, 3)], True),
        ([Arrival(True, 0, 5), Arrival(False, 3, 4)], False),
        ([Arrival(True, 0, 2), Arrival(True, 3, 4)], False),
        ([Arrival(True, 0, 2), Arrival(None, 3)], False),
        ([Arrival(True, 0, 5)], False),
    ],
)
def test_barrier_checker_wants_all_or_none(arrivals: list[Arrival], right: bool) -> None:
    assert is_barrier(arrivals, 2) is right


# ---- real clients ----


class Recorder:
    """What the clients of one history saw. Keys and barriers are of this history alone."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.ops: dict[str, list[Op]] = {key: [] for key in KEYS}
        self.arrivals: dict[str, list[Arrival]] = {}
        self.count = 0

    def note(self, key: str, kind: str, argument: Any, call: Callable[[str], Any]) -> None:
        """Make a call on a key, and note what it came to."""
        began = time.monotonic()
        told = call(self.prefix + key)
        ended = time.monotonic()
        self.count += 1
        if told is not IN_DOUBT:
            self.ops[key].append(Op(kind, argument, told, began, ended))
        elif kind != "get":
            self.ops[key].append(Op(kind, argument, None, began))

    def meet(self, name: str, agent: Agent, timeout_s: float) -> None:
        """Have an agent come to a barrier of all."""
        began = time.monotonic()
        try:
            agent.barrier(self.prefix + name, timeout_s)
            passed: bool | None = True
        except CoordinationTimeoutError:
            passed = False
        self.arrivals.setdefault(name, []).append(Arrival(passed, began, time.monotonic()))


IN_DOUBT = object()


def random_op(rng: random.Random, who: int, number: int) -> tuple[str, str, Any]:
    """A key, a kind of call and its argument."""
    kind = rng.choice(["set", "overwrite", "get", "get", "get", "increment", "delete"])
    text = b"%d%03d" % (who, number)  # all different, and numbers, so that increments find something to add to
    return rng.choice(KEYS), kind, rng.choice([1, 10]) if kind == "increment" else text


def by_agent(agent: Agent, kind: str, argument: Any) -> Callable[[str], Any]:
    """The call of an agent, which never gives up."""

    def call(key: str) -> Any:
        try:
            if kind in ("set", "overwrite"):
                agent.set(key, argument, overwrite=kind == "overwrite")
                return "ok"
            if kind == "increment":
                return b"%d" % agent.increment(key, argument)
            if kind == "delete":
                agent.delete(key)
                return "ok"
            return agent.try_get(key)
        except KeyExistsError:
            return "exists"
        except KeyMissingError:
            return None

    return call


def by_hand(raw: Any, kind: str, argument: Any) -> Callable[[str], Any]:
    """The same call made by hand, which gives up soon."""

    def call(key: str) -> Any:
        if kind in ("set", "overwrite"):
            pair = {"key": key, "value": argument}
            made = raw.tensorflow("InsertKeyValue", timeout=PATIENCE_S, kv=pair, allow_overwrite=kind == "overwrite")
        elif kind == "increment":
            made = raw.tensorflow("IncrementKeyValue", timeout=PATIENCE_S, key=key, increment=argument)
        elif kind == "delete":
            made = raw.tensorflow("DeleteKeyValue", timeout=PATIENCE_S, key=key)
        else:
            made = raw.tensorflow("TryGetKeyValue", timeout=PATIENCE_S, key=key)
        error = made.exception(timeout=50)
        if error is not None:
            known: dict[str, Any] = {"ALREADY_EXISTS": "exists", "NOT_FOUND": None, "DEADLINE_EXCEEDED": IN_DOUBT}
            return known[error.code().name]
        if kind == "increment" or kind == "get":
            return bytes(made.result().kv.value)
        return "ok"

    return call


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with Front(CoordinatorOptions(num_tasks=2, state_dir=tmp_path)) as service:
        yield service


def joined(address: str) -> list[Agent]:
    """Two agents, which must come together."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(connect, [address] * 2, [0, 1]))


def play(front: Front, agents: list[Agent], raws: list[Any], seed: int) -> Recorder:
    """Have all clients call at once, and kill the keeper in their midst; returns what they saw."""
    recorder = Recorder(f"h{seed}/")
    rng = random.Random(seed)
    problems: list[BaseException] = []

    def client(who: int, calls: Callable[[str, Any], Callable[[str], Any]], agent: Agent | None) -> None:
        mine = random.Random(seed * 100 + who)
        try:
            for number in range(OPS_EACH):
                key, kind, argument = random_op(mine, who, number)
                recorder.note(key, kind, argument, calls(kind, argument))
                if agent is not None and number % (OPS_EACH // ROUNDS) == 0:
                    # The first caller's deadline counts, so some rounds end just as the other one comes.
                    recorder.meet(f"b{number}", agent, mine.choice([0.001, 0.005, 30.0]))
        except BaseException as error:
            problems.append(error)

    works = [
        (who, lambda kind, argument, agent=agent: by_agent(agent, kind, argument), agent)
        for who, agent in enumerate(agents, 1)
    ]
    works += [
        (who, lambda kind, argument, raw=raw: by_hand(raw, kind, argument), None)
        for who, raw in enumerate(raws, len(agents) + 1)
    ]
    threads = [threading.Thread(target=client, args=work) for work in works]
    for thread in threads:
        thread.start()
    kill_at = rng.randrange(OPS_EACH * len(threads))
    while recorder.count < kill_at and any(thread.is_alive() for thread in threads):
        threads[0].join(0.0005)
    pid = front.keeper_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert not problems, f"seed {seed}: {problems}"
    return recorder


@pytest.mark.timeout(300)
def test_histories_of_real_clients_over_the_keepers_deaths_are_linearizable(
    front: Front, raw: Any, wait_until: Any
) -> None:
    agents = joined(front.address)
    raws = [raw(front.address), raw(front.address)]
    in_doubt = 0
    for seed in range(SEED, SEED + HISTORIES):
        pid = front.keeper_pid
        seen = play(front, agents, raws, seed)
        for key, ops in seen.ops.items():
            assert len(ops) <= 200
            assert is_linearizable(ops), f"seed {seed}, key {key}:\n" + "\n".join(map(str, ops))
            in_doubt += sum(op.ended == math.inf for op in ops)
        assert len(seen.arrivals) == ROUNDS
        for name, arrivals in seen.arrivals.items():
            assert is_barrier(arrivals, len(agents)), f"seed {seed}, barrier {name}: {arrivals}"
        wait_until(lambda pid=pid: front.keeper_pid != pid, "another keeper", 50)
    for agent in agents:
        assert agent.error is None
        agent.close(wait=False)
    if HISTORIES >= 20:
        assert in_doubt, "no call was given up: the histories do not show what they are to show"
