from collections.abc import Callable
from typing import Any

from typing_extensions import disjoint_base

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref

POLICY: int
PRIORITY_MAX: int

class CallOfDead(Exception): ...

@disjoint_base
class TaskOptions:
    target: Ref
    returns: int
    def __init__(
        self,
        function: Ref,
        returns: int = 1,
        retries: int = 0,
        flags: int = 0,
        *,
        demand: Ref | None = None,
        policy: Ref | None = None,
        priority: int = 0,
        hops: int = 0,
        note: Callable[[Any], object] | None = None,
    ) -> None: ...

class CallOptions(TaskOptions):
    def __init__(
        self,
        actor: Ref,
        method: int,
        returns: int = 1,
        retries: int = 0,
        flags: int = 0,
        *,
        policy: Ref | None = None,
        note: Callable[[Any], object] | None = None,
    ) -> None: ...

@disjoint_base
class PackedArgs:
    kind: int
    data: bytes
    refs: list[Any]
    ndeps: int
    def __init__(self, kind: int, data: bytes, refs: list[Any], ndeps: int) -> None: ...

def pack_scalars(args: tuple[Any, ...]) -> PackedArgs | None: ...
def submit(
    client: Client, options: TaskOptions, args: tuple[Any, ...] | PackedArgs, stream: Ref | None = None
) -> Any: ...
def record_of(client: Client, ref: Ref) -> tuple[int, int] | None: ...
def has_ended(client: Client, t: int, id: int) -> bool: ...
def flags_of(client: Client, t: int) -> int: ...
def again(client: Client, t: int) -> bool: ...
def park(client: Client, t: int) -> None: ...
def policy_of(client: Client, t: int) -> Any: ...
