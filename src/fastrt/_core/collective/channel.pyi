from typing import Any

from typing_extensions import disjoint_base

from fastrt._core.collective.groups import GroupMemory, GroupPart

@disjoint_base
class Channels(GroupPart):
    def __new__(cls, memory: GroupMemory) -> Channels: ...
    def send(self, array: Any, peer: int, tag: int, timeout: float) -> bool: ...
    def receive(self, array: Any, peer: int, tag: int, timeout: float) -> bool: ...
