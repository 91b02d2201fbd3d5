from fastrt._core.memory.clients import Client

SUCCEEDED: int
FAILED: int
CANCELLED: int
CRASHED: int
RETRIED: int
FORWARDED: int

def outcomes(client: Client) -> list[tuple[int | None, int, int | None, str, list[int]]]: ...
