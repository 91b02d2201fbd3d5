"""The state machine is compiled when the package is built, and decides as its plain source does."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fastrt.scheduler
from fastrt.scheduler import events, objects, policy, records, state

COMPILED = (events, policy, objects, records, state)
STORES, WORKERS, RECENT = 5, 12, 25


class Numbers:
    """Numbers that are most often known to a machine, and now and then are not."""

    def __init__(self, machine: state.SchedulerState, rng: random.Random) -> None:
        self.machine, self.rng = machine, rng
        self.below = rng.randrange

    def store(self) -> int:
        return self.rng.choice([*self.machine.peers()[0], 0])

    def worker(self) -> int:
        return self.rng.choice([*self.machine.peers()[1], 0])

    def task(self) -> int:
        return self.rng.choice([*self.machine.tasks, 0])

    def ref(self) -> int:
        return max(0, len(self.machine.objects.refs) - self.below(RECENT))

    def refs(self, below: int) -> list[int]:
        return [self.ref() for _ in range(self.below(below))]


ARGS = {
    "RegisterObjStore": lambda n: (f"s{n.below(STORES)}",),
    "RegisterWorker": lambda n: (f"w{n.below(WORKERS)}", f"s{n.below(STORES)}"),
    "RegisterFunction": lambda n: (n.worker(), "fgh"[n.below(3)], n.below(3)),
    "RemoteCall": lambda n: ("fgh"[n.below(3)], b"", n.refs(3), n.refs(2)),
    "IncrementRefs": lambda n: (n.refs(12),),
    "DecrementRefs": lambda n: (n.refs(3),),
    "PushObj": lambda n: (n.worker(),),
    "RequestObj": lambda n: (n.worker(), n.ref()),
    "AliasObjRefs": lambda n: (n.ref(), n.ref()),
    "ObjReady": lambda n: (n.ref(), n.store(), n.below(1000)),
    "AddContained": lambda n: (n.ref(), n.refs(3)),
    "WorkerReady": lambda n: (n.worker(),),
    "SchedulerInfo": lambda n: (),
    "WorkerLost": lambda n: (n.worker(),),
    "ObjStoreLost": lambda n: (n.store(),),
    "InvokeTaken": lambda n: (n.worker(), n.task()),
    "InvokeRefused": lambda n: (n.worker(), n.task(), "no"),
    "DeliveryFailed": lambda n: (n.ref(), n.store(), n.store(), "broken"),
}
EFFECTS = ("InvokeCall", "DeliverObj", "DeallocateObject", "RequestFailed", "NotifyAlias", "ForgetStore")
FACTS = ("WorkerLost", "ObjStoreLost", "InvokeTaken", "InvokeRefused", "DeliveryFailed")
OFTEN = ("RemoteCall", "ObjReady", "WorkerReady") * 12 + ("PushObj", "RegisterWorker", "RegisterFunction") * 4


@pytest.fixture
def plain(monkeypatch) -> ModuleType:
    """state.py and what it is made of, as they are written."""
    for module in COMPILED:
        source = Path(module.__file__).parent / f"{module.__name__.rpartition('.')[2]}.py"
        spec = importlib.util.spec_from_file_location(module.__name__, source)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, made)
        monkeypatch.setattr(fastrt.scheduler, source.stem, made)
        spec.loader.exec_module(made)
    return made


def told(effects: list[Any]) -> str:
    """Effects, comparable between two modules."""
    return repr([(type(effect).__name__, *events.parts(effect)) for effect in effects])


def test_modules_are_compiled():
    assert [module.__file__ for module in COMPILED if module.__file__.endswith(".py")] == []


@pytest.mark.parametrize("seed", range(4))
def test_compiled_decides_as_the_source_does(plain, seed):
    assert plain.__file__.endswith(".py")
    rng = random.Random(seed)
    machines = [(plain.SchedulerState(), plain.ev), (state.SchedulerState(), events)]
    numbers = Numbers(machines[1][0], rng)
    seen = set()
    for step in range(3000):
        name = rng.choice([*ARGS, *OFTEN])
        args = ARGS[name](numbers)
        if name not in FACTS:
            args = (step, *args)
        one, other = (told(machine.handle(getattr(ev, name)(*args))) for machine, ev in machines)
        assert one == other, f"{step}: {name}{args}"
        seen.update(word for word in EFFECTS if word in one)
    for machine, _ in machines:
        machine.check_invariants()
    assert seen == set(EFFECTS)
