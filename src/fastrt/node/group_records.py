"""Which placement groups have records of bundles: a group may be there although the daemon has not read it yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.tasks import actors
from fastrt.node.groups import Groups
from fastrt.node.keys import BundleKey
from fastrt.tasks.resources import Demand

_FRESH_S = 0.5  # much less than a task waits before a look at the records of its group


class GroupRecords:
    """The bundles by their records.

    Args:
        client: the daemon's attachment.
        groups: those that the daemon has read.
        demand_of: returns the demand of a record that `actors.info` has returned.
    """

    def __init__(self, client: Client, groups: Groups, demand_of: Callable[[Mapping[str, Any]], Demand]) -> None:
        self._client = client
        self._groups = groups
        self._demand_of = demand_of
        self._read_at = -_FRESH_S
        self._bundles: dict[str, list[BundleKey]] = {}  # by group

    def has(self, group: str) -> bool:
        """Whether a group has a bundle that has not ended, by a look of a moment ago: all records cost some time."""
        if time.monotonic() - self._read_at >= _FRESH_S:
            self._read()
        return group in self._bundles

    def is_removed(self, group: str) -> bool:
        """Whether a group that tasks wait for was removed; a daemon that has taken over does not know it otherwise."""
        return self._groups.may_be_removed(group) and not self.has(group)

    def bundles(self, group: str) -> list[BundleKey]:
        """The bundles of a group that have not ended; its creator may have written only a part of them yet."""
        self._read()
        return self._bundles.get(group, [])

    def _read(self) -> None:
        self._read_at, self._bundles = time.monotonic(), {}
        for actor, gen in actors.demanding(self._client):
            info = actors.info(self._client, actor)
            if info["bare"] and info["gen"] == gen and not info["ended"]:
                self._bundles.setdefault(self._demand_of(info).bundle_group, []).append(BundleKey(actor, gen))
