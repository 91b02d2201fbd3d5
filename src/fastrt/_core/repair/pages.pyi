from collections.abc import Iterable
from typing import Any

from fastrt._core.memory.clients import Client

VALUE: int
RESULT: int
ACTOR: int
FUNCTION: int
ROWS_MAX: int

def count_tasks(client: Client) -> tuple[list[tuple[int | None, int, int | None, list[int]]], dict[int, int]]: ...
def count_objects(client: Client, types: bytes) -> list[tuple[int, int, int, int, int]]: ...
def page_tasks(
    client: Client,
    after: int = ...,
    limit: int = ...,
    states: int = ...,
    functions: Iterable[tuple[int, int, bool]] | None = ...,
    client_index: int | None = ...,
    actor: int | None = ...,
    cancelled: bool | None = ...,
    attempts: int | None = ...,
    id: int = ...,
) -> tuple[list[dict[str, Any]], int, int]: ...
def page_objects(
    client: Client,
    after: int = ...,
    limit: int = ...,
    states: int = ...,
    remote: bool = ...,
    bytes_min: int = ...,
    kinds: bytes | None = ...,
    whats: Iterable[int] | None = ...,
    functions: Iterable[int] = ...,
    holder: int | None = ...,
    pinner: int | None = ...,
    error: bool | None = ...,
    objref: int = ...,
) -> tuple[list[dict[str, Any]], int, int]: ...
def small_values(client: Client, sample: int, bytes_max: int, least: int) -> int: ...
