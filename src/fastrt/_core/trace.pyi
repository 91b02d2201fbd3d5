from fastrt._core.clients import Client

TASK_START: int
TASK_END: int
PUT: int
GET: int
NAMES: dict[int, str]

def enabled(client: Client) -> bool: ...
def record(client: Client, kind: int, id: int, value: int = ...) -> None: ...
def drain(client: Client, of: int, since: int = ...) -> tuple[list[tuple[int, int, int, int]], int]: ...
