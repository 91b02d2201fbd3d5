"""An actor's process: it builds the instance, then runs the calls that come, one at a time and in order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from fastrt._core import actors, handles
from fastrt._core import tasks as core
from fastrt._core.inbox import Inbox
from fastrt._core.run import Runner
from fastrt.errors import format_user_traceback
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.tasks.handle import ActorPlan
from fastrt.worker.main import Worker, end_child

_IDLE_S = 1.0


class ActorWorker(Worker):
    """Runs one actor until nobody can call it any more, or it is told to stop.

    Args:
        store: this process's attachment.
        actor: the actor's index.
        told_to_stop: asks the daemon's connection whether there is an order to leave; called when idle.
        outputs: streams to flush after a call if they say that they have something `pending`.
    """

    def __init__(self, store: Store, actor: int, told_to_stop: Callable[[], bool], outputs: Sequence[Any] = ()) -> None:
        super().__init__(store, lambda word: None, told_to_stop, lambda: True, outputs)
        store.on_block = store.help_with = None  # an actor has no place among the workers to give away
        self._actor = actor
        self._plan: ActorPlan
        self._instance: Any = None
        self._methods: list[Any] = []

    def run(self) -> None:
        """Build the instance and take calls."""
        signal.signal(signal.SIGINT, self._on_interrupt)
        if not actors.enter(self._client, self._actor):
            return  # another process was quicker, or it was ended before it began
        try:
            self._build()
        except BaseException as exc:  # whatever the constructor raises ends the actor, and its calls say why
            text = f"its constructor raised\n{format_user_traceback(exc)}"
            actors.end_for_good(self._client, self._actor, actors.FAILED, text)
            return
        actors.alive(self._client, self._actor)
        self._serve()

    def _build(self) -> None:
        ref = handles.acquire(self._client, *actors.info(self._client, self._actor)["object"])
        self._plan = self._store.load(ref)
        _, cls = self._store.load(self._plan.cls)
        args, kwargs = self._store.load(self._plan.init)
        values = [self._store.get(arg) if isinstance(arg, ObjectRef) else arg for arg in args]
        named = {name: self._store.get(arg) if isinstance(arg, ObjectRef) else arg for name, arg in kwargs.items()}
        self._instance = cls(*values, **named)
        self._methods += [getattr(self._instance, which.name) for which in self._plan.methods]

    def _serve(self) -> None:
        inbox = Inbox(self._client, self._actor, True)
        self._runner = Runner(
            self._client, {}, self._prepare, self._seal, self._fail, end_child, self._outputs, self._methods
        )
        while not self._told_to_stop():
            self._runner.serve(inbox, _IDLE_S, self._store.spin_s)
            if actors.is_over(self._client, self._actor):
                return

    def _prepare(self, task: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Find a call's method and load its arguments."""
        return self._methods[core.function_of(self._client, task)[1]], *self._arguments(task)

    def _name(self, task: int) -> str:
        """What the call is called in messages."""
        return f"{self._plan.name}.{self._plan.methods[core.function_of(self._client, task)[1]].name}"
