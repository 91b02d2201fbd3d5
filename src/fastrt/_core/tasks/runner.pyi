from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import disjoint_base

from fastrt._core.memory.clients import Client
from fastrt._core.tasks.inbox import Inbox

@disjoint_base
class Runner:
    stack: list[int]
    interruptible: bool
    leaving: bool
    ends: type[BaseException] | None
    def __init__(
        self,
        client: Client,
        loaded: dict[int, tuple[str, Callable[..., Any]]],
        prepare: Callable[[int], tuple[Any, tuple[Any, ...], dict[str, Any] | None]],
        seal: Callable[[int, Any], object],
        fail: Callable[[int, BaseException], object],
        leave: Callable[[BaseException | None], object],
        outputs: Sequence[Any],
        methods: list[Callable[..., Any] | None] | None = None,
        enter_job: Callable[[int], object] | None = None,
    ) -> None: ...
    def use(self, loaded: dict[int, tuple[str, Callable[..., Any]]]) -> None: ...
    def run(self, timeout_s: float, spin_s: float) -> None: ...
    def serve(self, inbox: Inbox, timeout_s: float, spin_s: float) -> None: ...
    def execute(self, task: int) -> None: ...
