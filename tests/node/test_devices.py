"""Which devices demands get, without processes."""

import random

import pytest

from fastrt.config import RESOURCE_PARTS as ONE
from fastrt.node.devices import Devices
from fastrt.node.keys import ActorKey, BundleKey, TaskKey
from fastrt.tasks.resources import Demand, within


def demand(gpu, **others):
    amounts = {"CPU": ONE, "GPU": round(gpu * ONE), **{name: round(n * ONE) for name, n in others.items()}}
    return Demand(tuple(sorted((name, parts) for name, parts in amounts.items() if parts)))


def bundle(name, index, gpu):
    return Demand((("CPU", ONE), ("GPU", round(gpu * ONE))), bundle=f"{name}/{index}/2/PACK")


def in_group(gpu, name, index=-1):
    return Demand(within((("CPU", ONE), ("GPU", round(gpu * ONE))), name, index))


class Node:
    def __init__(self, gpus, **others):
        self.devices = Devices({"CPU": 4 * ONE, "GPU": round(gpus * ONE), **others})
        self.count = 0

    def take(self, wanted, kind=TaskKey):
        self.count += 1
        key = kind(self.count, self.count)
        chosen = self.devices.choose(wanted)
        if chosen is None:
            return None
        self.devices.take(key, wanted, chosen)
        self.devices.check_invariants()
        return key

    def bits(self, wanted, kind=TaskKey):
        key = self.take(wanted, kind)
        return None if key is None else self.devices.of(key)


def test_demand_without_devices_gets_none():
    node = Node(2)
    assert node.devices.choose(demand(0)) == 0
    assert Node(0).devices.choose(demand(1)) is None


def test_whole_devices_and_parts_of_one():
    node = Node(4)
    assert node.bits(demand(0.5)) == 0b0001
    assert node.bits(demand(0.75)) == 0b0010
    assert node.bits(demand(0.25)) == 0b0010  # the fullest that has room
    assert node.bits(demand(2)) == 0b1100
    assert node.bits(demand(1)) is None
    assert node.bits(demand(0.5)) == 0b0001
    assert node.bits(demand(0.1)) is None


def test_kinds_have_devices_of_their_own():
    node = Node(2, TPU=2 * ONE)
    assert node.bits(demand(1, TPU=2)) == 0b1101
    assert node.bits(demand(0, TPU=1)) is None
    assert node.bits(demand(1)) == 0b0010


def test_devices_of_a_process_that_has_not_ended_are_kept_from_others_but_not_from_bundles():
    node = Node(1)
    key = node.take(demand(1))
    assert node.devices.give(key) == 1
    assert not node.devices.linger([(1, ONE)])
    assert node.devices.is_lingering
    assert node.bits(demand(0.5)) is None
    assert node.bits(bundle("g", 0, 1), BundleKey) == 1
    assert node.bits(in_group(1, "g", 0)) is None
    assert node.devices.linger([])
    assert node.bits(in_group(1, "g", 0)) == 1


def test_bundles_keep_devices_for_their_group():
    node = Node(3)
    first, second = node.take(bundle("g", 0, 1), BundleKey), node.take(bundle("g", 1, 0.5), BundleKey)
    assert node.bits(demand(0.5)) == 0b010  # beside the half of the second bundle
    assert node.bits(in_group(1, "g", 0)) == 0b001
    assert node.bits(in_group(0.5, "g", 0)) is None
    inside = node.take(in_group(0.5, "g"), ActorKey)  # of any bundle
    assert node.devices.of(inside) == 0b010
    assert node.bits(in_group(0.5, "g", 1)) is None
    node.devices.give(inside)
    assert node.bits(in_group(0.25, "g", 1)) == 0b010
    for key in (first, second):
        node.devices.give(key)
    assert node.bits(in_group(0.1, "g")) is None


@pytest.mark.parametrize("seed", range(5))
def test_no_device_has_two_holders_in_any_order_of_events(seed):
    choose = random.Random(seed)
    node, there = Node(4), []
    for _ in range(600):
        if there and choose.random() < 0.45:
            node.devices.give(there.pop(choose.randrange(len(there))))
        else:
            made = [demand(choose.choice([0.2, 0.5, 1, 2])), in_group(choose.choice([0.5, 1]), "g"), bundle("g", 0, 1)]
            wanted = choose.choice(made)
            key = node.take(wanted, BundleKey if wanted.bundle else choose.choice([TaskKey, ActorKey]))
            there += [] if key is None else [key]
        node.devices.check_invariants()
    for key in there:
        node.devices.give(key)
    assert node.bits(demand(4)) == 0b1111
