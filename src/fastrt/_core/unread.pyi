from collections.abc import Iterable

from fastrt._core.clients import Client
from fastrt._core.handles import Ref

def keep_held(client: Client) -> None: ...
def mark(client: Client, refs: Iterable[Ref]) -> None: ...
