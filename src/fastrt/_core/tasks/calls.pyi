from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref

class CallOfDead(Exception): ...

def put_back(client: Client, t: int, ran: bool) -> bool: ...
def is_call(client: Client, ref: Ref) -> bool: ...
def call_scalars(
    client: Client, actor: Ref, method: int, args: tuple[Any, ...], nreturns: int, retries: int
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
) -> Any: ...
