"""Generator tasks and methods: their items become results one by one, or one list of references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastrt._core.tasks import generators, submission
from fastrt._core.tasks.generators import Producer
from fastrt.errors import ArgumentError, ObjectStoreFullError, TaskError
from fastrt.store.serialize import serialize
from fastrt.worker.retries import Retries

if TYPE_CHECKING:
    from fastrt.store.client import Store
    from fastrt.store.ref import ObjectRef

_PATIENCE_S = 0.01  # a generator that has to wait for longer gives its place to another worker
_POLL_S = 0.05


class GeneratorRunner:
    """Runs generators and seals their items.

    Args:
        store: this process's attachment.
        retries: decides whether a generator that raised runs again.
        name_of: gives a task's name for messages.
    """

    def __init__(self, store: Store, retries: Retries, name_of: Callable[[int], str]) -> None:
        self._store = store
        self._retries = retries
        self._name_of = name_of

    def is_stream(self, task: int) -> bool:
        """Whether a task's caller takes its items one by one."""
        return bool(submission.flags_of(self._store.client, task) & generators.STREAM)

    def streaming(self, task: int, function: Callable[..., Any]) -> Callable[..., None]:
        """Return a function that runs a generator and adds its items to the task's stream."""

        def produce(*args: Any, **kwargs: Any) -> None:
            producer = Producer(self._store.client, task)
            if producer.wanted == generators.NOTHING:
                return  # no reader is left: the generator does not even begin
            producer.run(
                iter(function(*args, **kwargs)),
                lambda item: producer.add_ref(self._put(item)),
                lambda: self._wait_for_room(producer),
            )

        return produce

    def collecting(self, task: int, function: Callable[..., Any]) -> Callable[..., list[ObjectRef]]:
        """Return a function that runs a generator and returns references to its items."""

        def collect(*args: Any, **kwargs: Any) -> list[ObjectRef]:
            refs: list[ObjectRef] = []
            items = function(*args, **kwargs)
            if not isinstance(items, Iterator):
                what = f"the function returned a {type(items).__name__}"
                raise ArgumentError(f'num_returns="dynamic" is for generators; {what}')
            try:
                for item in items:
                    refs.append(self._put(item))
            except Exception as exc:
                if self._retries.wanted(task, exc):
                    raise
                refs.append(self._put_error(task, exc))
            return refs

        return collect

    async def run_on_loop(self, task: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a generator method, asynchronous or not, without holding up the event loop while it waits for room.

        Returns:
            The call's result.
        """
        items = _each(function(*args, **kwargs))
        if not self.is_stream(task):
            return await self._collect_on_loop(task, items)
        producer = Producer(self._store.client, task)
        try:
            while producer.wanted != generators.NOTHING:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return None
                if not producer.skips() and producer.wanted == generators.ITEMS:
                    self._add(producer, item)
                    while producer.full and producer.wanted == generators.ITEMS:
                        import asyncio  # here: workers that need no event loop start sooner without it

                        await asyncio.get_running_loop().run_in_executor(None, producer.wait, _POLL_S, 0.0)
            return None
        finally:
            await items.aclose()

    async def _collect_on_loop(self, task: int, items: Any) -> list[ObjectRef]:
        refs: list[ObjectRef] = []
        try:
            async for item in items:
                refs.append(self._put(item))
        except Exception as exc:
            if self._retries.wanted(task, exc):
                raise
            refs.append(self._put_error(task, exc))
        return refs

    def _add(self, producer: Producer, item: Any) -> None:
        try:
            if producer.add(item):
                return
        except ObjectStoreFullError:
            pass  # the store below can ask the daemon for room; the producer cannot
        producer.add_ref(self._put(item))

    def _put(self, item: Any) -> ObjectRef:
        return self._store.put_serialized(serialize(item), in_file=True)

    def _put_error(self, task: int, exc: Exception) -> ObjectRef:
        """Seal a generator's error in the place of its next item."""
        error = TaskError.wrap(exc, task_name=self._name_of(task))
        return self._store.put_serialized(serialize(error), error=True)

    def _wait_for_room(self, producer: Producer) -> None:
        if not producer.wait(_PATIENCE_S, self._store.spin_s):
            with self._store.blocked():
                producer.wait(None, 0.0)


async def _each(made: Any) -> Any:
    """Yield the items of a generator of either kind; it is closed when its caller takes no more."""
    if not hasattr(made, "__aiter__"):
        for item in made:
            yield item
        return
    try:
        async for item in made:
            yield item
    finally:
        if hasattr(made, "aclose"):
            await made.aclose()
