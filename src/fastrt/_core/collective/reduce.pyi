from typing import Any

HARDWARE: bool
DTYPES: dict[str, int]
REDUCTIONS: dict[str, int]

def reduce_buffers(
    reduction: str, dtype: str, out: Any, sources: list[Any], divisor: int = ..., portable: bool = ...
) -> None: ...
