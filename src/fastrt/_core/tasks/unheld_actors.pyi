from collections.abc import Mapping

from fastrt._core.memory.clients import Client

def let_go_unheld(client: Client, some: Mapping[int, int | None]) -> list[int]: ...
