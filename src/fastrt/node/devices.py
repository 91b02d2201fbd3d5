"""Which devices of a node are in use, and which a task, an actor or a bundle gets: pure state and decisions.

Devices have numbers from 0 on. A demand of 1 or more gets whole devices, a smaller one part of one device. Small ones
are packed: they get the fullest device that has room. A bundle of a placement group takes devices from the node and
gives them to its tasks. So amounts are counted by the name of the resource, as in a demand: "GPU" of the node,
"GPU@group" and "GPU@group/0" inside a placement group.

A device is in use by a process from its start until its end, which is later than the end of its task: a process that
still ends has its memory there. Such processes are counted by `linger`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fastrt.config import RESOURCE_PARTS
from fastrt.devices import RESOURCES
from fastrt.node.keys import BundleKey, Key
from fastrt.tasks.resources import Amounts, Demand, device_amounts, device_parts, given_by, kind_of


class Devices:
    """The devices of one node.

    Args:
        total: parts of its resources by name; a device has RESOURCE_PARTS. Devices are numbered in order of the names.
    """

    def __init__(self, total: Mapping[str, int]) -> None:
        self._room: dict[str, Counter[int]] = {}  # parts that there are, by the name of an amount and device
        self._used: dict[str, Counter[int]] = {}  # parts that are taken
        self._busy: Counter[int] = Counter()  # parts that tasks and actors use
        self._lingering: Counter[int] = Counter()  # parts of processes whose task or actor has ended
        self._holds: dict[Key, tuple[Demand, int]] = {}
        number = 0
        for kind in sorted(set(RESOURCES) & set(total)):
            room = self._room[kind] = Counter()
            for left in range(total[kind], 0, -RESOURCE_PARTS):
                room[number] = min(left, RESOURCE_PARTS)
                number += 1
        self.count = number

    def choose(self, demand: Demand) -> int | None:
        """Choose devices for a task, an actor or a bundle.

        Returns:
            A bit for each; 0 when the demand has none; None when there is no room now.
        """
        chosen = 0
        by_kind: dict[str, dict[str, int]] = {}
        for name, parts in device_amounts(demand.amounts):
            by_kind.setdefault(kind_of(name), {})[name] = parts
        for names in by_kind.values():
            found = self._choose(names, is_process=not demand.bundle)
            if found is None:
                return None
            chosen |= found
        return chosen

    def take(self, key: Key, demand: Demand, devices: int) -> None:
        """Count devices as taken; a bundle's can be chosen by the tasks of its group from now on."""
        self._holds[key] = demand, devices
        self._count(key, demand, devices, 1)

    def give(self, key: Key) -> int:
        """Count the devices of a task, an actor or a bundle as free again; returns their bits."""
        demand, devices = self._holds.pop(key, (None, 0))
        if demand is not None:
            self._count(key, demand, devices, -1)
        return devices

    def of(self, key: Key) -> int:
        """The bits of the devices that a task, an actor or a bundle has."""
        return self._holds[key][1] if key in self._holds else 0

    def holders(self) -> list[Key]:
        """The tasks, actors and bundles that have devices."""
        return [key for key, (_, devices) in self._holds.items() if devices]

    def linger(self, held: Iterable[tuple[int, int]]) -> bool:
        """Take the (devices, parts) of all processes whose task or actor has ended; whether any device became free."""
        before, self._lingering = self._lingering, Counter()
        for devices, parts in held:
            for device in _numbers(devices):
                self._lingering[device] += parts
        return any(self._lingering[device] < parts for device, parts in before.items())

    @property
    def is_lingering(self) -> bool:
        """Whether a process has devices whose task or actor has ended."""
        return bool(self._lingering)

    def _choose(self, names: Mapping[str, int], is_process: bool) -> int | None:
        parts = next(iter(names.values()))
        each = min(parts, RESOURCE_PARTS)
        count = max(1, parts // RESOURCE_PARTS)
        free = {}
        for device in set.intersection(*(set(self._room.get(name, ())) for name in names)):
            left = min(self._room[name][device] - self._used.get(name, Counter())[device] for name in names)
            now = RESOURCE_PARTS - self._busy[device] - self._lingering[device] if is_process else left
            if left >= each and now >= each:
                free[device] = left
        best = sorted(free, key=lambda device: (free[device], device))[:count]
        return sum(1 << device for device in best) if len(best) == count else None

    def _count(self, key: Key, demand: Demand, devices: int, sign: int) -> None:
        _add(self._used, demand.amounts, devices, sign)
        if isinstance(key, BundleKey):
            _add(self._room, given_by(demand), devices, sign)
            return
        for device in _numbers(devices):
            self._busy[device] += sign * device_parts(demand.amounts)

    def check_invariants(self) -> None:
        """Raise an AssertionError if a device is used by more than it has room for."""
        for device, parts in self._busy.items():
            assert 0 <= parts <= RESOURCE_PARTS, f"{parts} parts of device {device} are in use"
        for name, used in self._used.items():
            for device, parts in used.items():
                assert 0 <= parts <= RESOURCE_PARTS, f"{parts} parts of device {device} are taken as {name}"


def _add(counts: dict[str, Counter[int]], amounts: Amounts, devices: int, sign: int) -> None:
    """Add amounts on devices to counts (sign=1), or subtract them (-1)."""
    for name, parts in device_amounts(amounts):
        count = counts.setdefault(name, Counter())
        for device in _numbers(devices):
            count[device] += sign * min(parts, RESOURCE_PARTS)
            if not count[device]:
                del count[device]
        if not count:
            del counts[name]


def _numbers(devices: int) -> list[int]:
    return [device for device in range(devices.bit_length()) if devices >> device & 1]
