from fastrt._core.memory.clients import Client

PENDING: int
STORED: int
SPILLED: int
REMOTE: int
PINNED: int
INLINE: int

def holdings(
    client: Client,
) -> tuple[
    list[tuple[int | None, int, int, int, int, int, int, dict[int, int]]],
    dict[int, tuple[int, int, int, int]],
    list[tuple[int, int]],
]: ...
