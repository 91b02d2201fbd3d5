from collections.abc import Iterable

from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref

def keep_held(client: Client) -> None: ...
def mark(client: Client, refs: Iterable[Ref]) -> None: ...
