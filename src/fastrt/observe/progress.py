"""`progress`: references in the order in which they become ready, with a progress bar.

At a terminal and in a notebook, rich draws the bar; elsewhere (a pipe, a log) a plain line is written from time to
time. Both go to standard error, so that the program's standard output contains only its own text.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TextIO, TypeVar

from fastrt._core.objects import handles
from fastrt.store.as_completed import as_completed
from fastrt.store.client import get, require
from fastrt.store.ref import ObjectRef, T

_T = TypeVar("_T")
_LINE_S = 5.0  # between two lines without a terminal
_LINE_SHARE = 0.1
_DRAW_S = 0.1


class Progress(Generic[T]):
    """The result of `progress`: iterate over it, or call `wait` or `get`. Each shows the bar."""

    def __init__(self, refs: list[ObjectRef[T]], description: str, timeout: float | None, file: TextIO | None) -> None:
        self._refs = refs
        self._description = description
        self._timeout = timeout
        self._file = file

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[ObjectRef[T]]:
        """Yield the references in the order in which they become ready."""
        done = failed = 0
        client = require().client
        show, end = _display(self._description, len(self._refs), self._file)
        shown_at = 0.0
        try:
            show(0, 0)
            for ref in as_completed(self._refs, self._timeout):
                done += 1
                failed += handles.describe(client, ref)["error"]
                now = time.monotonic()
                if now - shown_at > _DRAW_S or done == len(self._refs):
                    shown_at = now
                    show(done, failed)
                yield ref
        finally:
            end(done, failed)

    def wait(self) -> list[ObjectRef[T]]:
        """Wait for all of them; return the references in their original order.

        Raises:
            GetTimeoutError: the timeout passed.
        """
        for _ in self:
            pass
        return self._refs

    def get(self) -> list[T]:
        """Wait for all of them; return their values in the order of the references.

        Raises:
            TaskError: a task raised; this waits for all others first.
            GetTimeoutError: the timeout passed.
        """
        return get(self.wait())


def progress(
    refs: Iterable[ObjectRef[_T]],
    description: str = "tasks",
    *,
    timeout: float | None = None,
    file: TextIO | None = None,
) -> Progress[_T]:
    """Show how many references are ready, while waiting for them.

    `for ref in progress(refs)` yields them in the order in which they become ready; `progress(refs).get()` waits for
    all and returns their values in the order of `refs`; `progress(refs).wait()` only waits.

    Args:
        refs: references; one that is listed twice counts twice.
        description: text before the bar.
        timeout: seconds for all of them together; None waits without a limit.
        file: the output of the bar; default: standard error.
    Returns:
        A `Progress`. It shows nothing, and does not wait, before it is used.
    Raises:
        TypeError: something is not an ObjectRef.
    Source:
        `concurrent.futures.as_completed`, with a bar as in tqdm.
    """
    listed = list(refs)
    for ref in listed:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"progress takes ObjectRefs; this has a {type(ref).__name__}")
    return Progress(listed, description, timeout, file)


Show = Callable[[int, int], None]


def _display(description: str, total: int, file: TextIO | None) -> tuple[Show, Show]:
    """Return two functions of (done, failed): one to call regularly, and one for the end."""
    from rich.console import Console

    console = Console(file=file) if file is not None else Console(stderr=True)
    # In a notebook a bar that changes needs widgets.
    in_notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    if not console.is_terminal and not in_notebook:
        return _lines(description, total, file or sys.stderr)
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("[red]{task.fields[failed]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    # Drawn only at a change, without a thread, so that waiting costs no processor time.
    bar = Bar(*columns, console=console, auto_refresh=False)
    task = bar.add_task(description, total=total, failed="")
    bar.start()

    def show(done: int, failed: int) -> None:
        bar.update(task, completed=done, failed=f"{failed} failed" if failed else "", refresh=True)

    def end(done: int, failed: int) -> None:
        show(done, failed)
        bar.stop()

    return show, end


def _lines(description: str, total: int, file: TextIO) -> tuple[Show, Show]:
    began = printed_at = time.monotonic()
    printed = 0

    def write(done: int, failed: int) -> None:
        trouble = f", {failed} failed" if failed else ""
        file.write(f"{description}: {done}/{total} ready{trouble} after {time.monotonic() - began:.1f} s\n")
        file.flush()

    def show(done: int, failed: int) -> None:
        nonlocal printed, printed_at
        now = time.monotonic()
        if done - printed >= max(1.0, total * _LINE_SHARE) or (done > printed and now - printed_at > _LINE_S):
            printed, printed_at = done, now
            write(done, failed)

    def end(done: int, failed: int) -> None:
        if done != printed or not total:
            write(done, failed)

    return show, end
