"""A node that places tasks, without processes: facts in, orders out."""

from fastrt.config import RESOURCE_PARTS as ONE
from fastrt.node.keys import TaskKey
from fastrt.node.placing import Placing
from fastrt.store.messages import NodeRow
from fastrt.tasks.resources import Demand, demand_of


def demand(cpu=1.0, strategy="", node="", soft=False, **amounts):
    parts = {"CPU": round(cpu * ONE), **{name: round(amount * ONE) for name, amount in amounts.items()}}
    return Demand(tuple(sorted((name, amount) for name, amount in parts.items() if amount)), strategy, node, soft)


def view(name, cpu=2, free=None, labels=None, **amounts):
    total = {"CPU": cpu * ONE, **{key: value * ONE for key, value in amounts.items()}}
    return NodeRow(f"id-{name}", name, total, dict(total) if free is None else free, labels or {})


def selecting(**labels):
    return demand_of({"label_selector": labels})


def falling_back(selector, *others):
    return demand_of({"label_selector": selector, "fallback_strategy": [{"label_selector": one} for one in others]})


class Here:
    """A node of two CPUs, one gpu, and tasks with numbers."""

    def __init__(self, *views, can_grow=True, cpu=2, gpu=1):
        self.placing = Placing("me", {"CPU": cpu * ONE, "gpu": gpu * ONE} if cpu else {}, can_grow)
        self.placing.name = "home"
        self.placing.has_uplink = bool(views)
        self.placing.see(views)
        self.now, self.count = 0.0, 0

    def submit(self, wanted, count=1):
        for _ in range(count):
            self.count += 1
            self.placing.wait(TaskKey(self.count, self.count), wanted, self.now)

    def decide(self):
        return [
            (order.key.record, order.what, order.node.removeprefix("id-")) for order in self.placing.decide(self.now)
        ]

    def moved(self, number, place):
        self.placing.moved(TaskKey(number, number), place, self.now)
