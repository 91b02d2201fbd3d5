from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref

POLICY: int
PRIORITY_MAX: int

def submit_scalars(
    client: Client,
    function: Ref,
    args: tuple[Any, ...],
    nreturns: int,
    retries: int,
    flags: int,
    demand: Ref | None = ...,
    policy: Ref | None = ...,
    stream: Ref | None = ...,
    priority: int = ...,
) -> Any: ...
def submit(
    client: Client,
    function: Ref,
    kind: int,
    args: bytes,
    refs: list[Any],
    ndeps: int,
    nreturns: int,
    retries: int,
    flags: int,
    demand: Ref | None = ...,
    policy: Ref | None = ...,
    stream: Ref | None = ...,
    priority: int = ...,
    hops: int = ...,
) -> Any: ...
def call_scalars(
    client: Client,
    actor: Ref,
    method: int,
    args: tuple[Any, ...],
    nreturns: int,
    retries: int,
    flags: int,
    policy: Ref | None = ...,
    stream: Ref | None = ...,
) -> Any: ...
def call(
    client: Client,
    actor: Ref,
    method: int,
    kind: int,
    args: bytes,
    refs: list[Any],
    ndeps: int,
    nreturns: int,
    retries: int,
    flags: int,
    policy: Ref | None = ...,
    stream: Ref | None = ...,
) -> Any: ...
def flags_of(client: Client, t: int) -> int: ...
def again(client: Client, t: int) -> bool: ...
def park(client: Client, t: int) -> None: ...
def policy_of(client: Client, t: int) -> Any: ...
