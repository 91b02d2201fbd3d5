from fastrt._core.memory.clients import Client

SIGNAL: int
LATE: int

def listen(client: Client) -> None: ...
def end_for(client: Client, t: int, id: int, again: bool) -> bool: ...
