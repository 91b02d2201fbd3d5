from collections.abc import Sequence
from typing import Any

from fastrt._core.memory.clients import Client

MOST: int

def keep(client: Client, t: int, texts: Sequence[object], pid: int, signal: int = ..., retried: bool = ...) -> bool: ...
def read(client: Client, after: int | None = ..., limit: int = ...) -> list[dict[str, Any]]: ...
def total(client: Client) -> int: ...
