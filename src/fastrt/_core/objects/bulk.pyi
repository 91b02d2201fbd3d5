from collections.abc import Sequence
from typing import Any

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Pin, Ref, Writer

MANY_MAX: int

def pin_many(
    client: Client, refs: Sequence[Ref | None], bytes_max: int, total_max: int
) -> list[tuple[int, bool, Pin] | None]: ...
def create_many(client: Client, specs: list[tuple[int, int, bool]]) -> list[Writer]: ...
def seal_many(writers: list[Writer]) -> list[Any]: ...
