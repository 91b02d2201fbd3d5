"""Threads of a driver that use one session at once: values, references, tasks and actors."""

import collections
import random
from functools import partial
from typing import Any

import pytest

import fastrt
from support.threads import together

THREADS = 8
HELD = 20  # values that a thread keeps at a time


@fastrt.remote
def add(value: int, others: list[Any]) -> int:
    return value + len(others)


@fastrt.remote
def length_of(data: bytes) -> int:
    return len(data)


@fastrt.remote
class Sum:
    def __init__(self) -> None:
        self.total = 0

    def add(self, value: int) -> int:
        self.total += value
        return self.total


class Player:
    """One thread's moves. Each checks its own results, and `shared` has references of all threads."""

    def __init__(self, number: int, counter: Any, shared: "collections.deque[tuple[Any, bytes]]") -> None:
        self.dice = random.Random(number)
        self.number, self.counter, self.shared = number, counter, shared
        self.held: list[tuple[Any, bytes]] = []
        self.added = 0

    def text(self) -> bytes:
        return bytes([self.dice.randrange(256)]) * self.dice.choice((10, 250, 3000, 100_000))

    def put(self) -> None:
        data = self.text()
        self.held.append((fastrt.put(data), data))
        if len(self.held) > HELD:
            self.held.pop(self.dice.randrange(HELD))

    def get(self) -> None:
        if self.held:
            ref, data = self.dice.choice(self.held)
            assert fastrt.get(ref) == data

    def share(self) -> None:
        if self.held:
            self.shared.append(self.dice.choice(self.held))
        try:
            ref, data = self.shared[self.dice.randrange(len(self.shared))]
        except (IndexError, ValueError):  # another thread has made it shorter
            return
        assert fastrt.get(ref) == data

    def nest(self) -> None:
        inner = fastrt.put(self.number)
        outer = fastrt.put([inner] * 3)
        del inner
        assert fastrt.get(fastrt.get(outer)[1]) == self.number

    def task(self) -> None:
        value = self.dice.randrange(1000)
        first = add.remote(value, [])
        refs = [first, add.remote(first, [fastrt.put(0), first])]
        assert fastrt.get(refs) == [value, value + 2]

    def task_with_value(self) -> None:
        data = self.text()
        assert fastrt.get(length_of.remote(fastrt.put(data))) == len(data)

    def wait(self) -> None:
        refs = [add.remote(k, []) for k in range(4)]
        ready, rest = fastrt.wait(refs, num_returns=2)
        assert len(ready) == 2
        assert sorted(fastrt.get(ready + rest)) == [0, 1, 2, 3]

    def call(self) -> None:
        self.added += 1
        assert fastrt.get(self.counter.add.remote(1)) >= self.added

    def play(self, rounds: int) -> None:
        moves = [
            *[self.put, self.get, self.share, self.nest] * 5,
            self.task,
            self.task_with_value,
            self.wait,
            self.call,
        ]
        for _ in range(rounds):
            self.dice.choice(moves)()
        self.held.clear()


@pytest.mark.parametrize("rounds", [60, pytest.param(30_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_each_thread_gets_what_it_asked_for(rt, rounds):
    """The arena is checked at the end, as after every test with this session."""
    counter = Sum.remote()
    shared: collections.deque[tuple[Any, bytes]] = collections.deque(maxlen=30)
    players = [Player(number, counter, shared) for number in range(THREADS)]
    together(*[partial(player.play, rounds) for player in players])
    assert fastrt.get(counter.add.remote(0)) == sum(player.added for player in players)
