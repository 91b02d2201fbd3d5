"""`fastrt demo`: a real parallel program on real input, compared with the same work in one process."""

from __future__ import annotations

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from fastrt.cli.demo_work import Counts

_POLL_S = 0.05  # between two updates of the progress bar
_SKIPPED_SHOWN = 3

Advance = Callable[[int], None]


class Outcome:
    """The result of one run, and its cost.

    Attributes:
        total: the counts of all files.
        top: (term, score) by tf-idf, the highest first.
        seconds: from the first file to the last score.
        tasks, stored_bytes, matrix_shape: for the parallel run: tasks run, bytes of all values stored, (files, terms).
    """

    def __init__(self, total: Counts, top: list[tuple[str, float]], seconds: float) -> None:
        self.total = total
        self.top = top
        self.seconds = seconds
        self.tasks = 0
        self.stored_bytes = 0
        self.matrix_shape = (0, 0)

    def equals(self, other: Outcome) -> bool:
        """Whether two runs have equal results, to the last bit of every score."""
        return self.total == other.total and self.top == other.top


@click.command(short_help="Count words of source files, in parallel and in one process.")
@click.argument("path", type=click.Path(exists=True), required=False)
@click.option("-w", "--workers", type=click.IntRange(1, 254), help="Worker processes; default: the CPUs here.")
@click.option("-n", "--top", "count", type=click.IntRange(1, 1000), default=10, help="Terms to show; default: 10.")
def demo(path: str | None, workers: int | None, count: int) -> None:
    """Count words and symbols over every source file below PATH, in parallel and in one process.

    PATH is a folder or a file; default: the standard library of the running Python. Each file is a task; a tree of
    tasks merges the counts. A term-by-file matrix is put into the store once, and tasks find the terms with the highest
    tf-idf on slices of it. The command fails if the two results differ.
    \f
    Raises:
        click.ClickException: there are no source files, the runtime cannot start, or the results differ.
    """
    import fastrt
    from fastrt.cli import demo_work as work

    path = sysconfig.get_paths()["stdlib"] if path is None else path
    files = work.find_files(path)
    if not files:
        raise click.ClickException(f"there are no source files below {_shown(path)}; give another PATH")
    _warm(files)
    try:
        with _progress("in parallel", len(files)) as (console, advance):
            start = time.perf_counter()
            with fastrt.init(num_workers=workers) as runtime:
                start_s = time.perf_counter() - start
                parallel = run_parallel(files, count, advance)
                num_workers = runtime.num_workers
    except fastrt.FastrtError as exc:
        raise click.ClickException(str(exc)) from exc
    with _progress("in one process", len(files)) as (console, advance):
        single = run_single(files, count, advance)
    equal = parallel.equals(single)
    _show(console, path, parallel, single, num_workers, start_s, equal)
    if not equal:
        raise click.ClickException("the two results differ; if no file was being changed, this is a bug in fastrt")


def run_parallel(files: list[str], count: int, advance: Advance) -> Outcome:
    """Do the work as tasks on the current runtime.

    Args:
        files: paths of the files.
        count: how many terms to choose.
        advance: called with the number of files that were counted since the last call.
    Returns:
        The outcome.
    """
    import numpy as np

    import fastrt
    from fastrt.cli import demo_work as work

    count_file, merge = fastrt.remote(work.count_file), fastrt.remote(work.merge)
    fill_rows, score_terms = fastrt.remote(work.fill_rows), fastrt.remote(work.score_terms)
    start = time.perf_counter()
    counted = [count_file.remote(path) for path in files]
    # The whole tree is submitted before a file is read: each merge starts when its parts are ready.
    made, level = list(counted), counted
    while len(level) > 1:
        level = [merge.remote(*level[a:b]) for a, b in work.slices(len(level), work.FAN_IN)]
        made += level
    _follow(counted, advance)
    total = fastrt.get(level[0])
    terms = work.vocabulary(total, len(files))
    terms_ref = fastrt.put(terms)
    rows = [fill_rows.remote(terms_ref, *counted[a:b]) for a, b in work.slices(len(files), work.ROWS_FILES)]
    matrix = fastrt.put(np.concatenate(fastrt.get(rows)))
    scores = [score_terms.remote(matrix, a, b) for a, b in work.slices(len(terms), work.SLICE_TERMS)]
    top = work.top_terms(terms, fastrt.get(scores), count)
    outcome = Outcome(total, top, time.perf_counter() - start)
    outcome.tasks = len(made) + len(rows) + len(scores)
    outcome.stored_bytes = _bytes_of([*made, terms_ref, *rows, matrix, *scores])
    outcome.matrix_shape = (len(files), len(terms))
    return outcome


def run_single(files: list[str], count: int, advance: Advance) -> Outcome:
    """Do the same work by the same functions in this process."""
    import numpy as np

    from fastrt.cli import demo_work as work

    start = time.perf_counter()
    counted = []
    for path in files:
        counted.append(work.count_file(path))
        advance(1)
    level = counted
    while len(level) > 1:
        level = [work.merge(*level[a:b]) for a, b in work.slices(len(level), work.FAN_IN)]
    total = level[0]
    terms = work.vocabulary(total, len(files))
    rows = [work.fill_rows(terms, *counted[a:b]) for a, b in work.slices(len(files), work.ROWS_FILES)]
    matrix = np.concatenate(rows)
    scores = [work.score_terms(matrix, a, b) for a, b in work.slices(len(terms), work.SLICE_TERMS)]
    top = work.top_terms(terms, scores, count)
    return Outcome(total, top, time.perf_counter() - start)


def _follow(refs: list[Any], advance: Advance) -> None:
    """Wait for all references, and report regularly how many more are ready."""
    import fastrt

    while refs:
        ready, refs = fastrt.wait(refs, num_returns=len(refs), timeout=_POLL_S)
        advance(len(ready))


def _bytes_of(refs: list[Any]) -> int:
    """The size in the object store of the values of `refs`."""
    from fastrt._core.objects import handles

    return sum(handles.describe(ref.owner, ref)["bytes"] for ref in refs)


def _warm(files: list[str]) -> None:
    """Read every file once, so that the first run does not pay for the disk."""
    for path in files:
        try:
            with open(path, "rb") as file:
                while file.read(1 << 20):
                    pass
        except OSError:
            continue  # the work functions report the reason


@contextmanager
def _progress(what: str, files: int) -> Iterator[tuple[Console, Advance]]:
    """Show a progress bar over `files` files; it disappears when it is full."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=files)
        yield progress.console, lambda n: progress.advance(task, n)


def _shown(path: str) -> str:
    """Make a path printable on every terminal."""
    return os.fsencode(path).decode("utf-8", "replace")


def _show(
    console: Console, path: str, parallel: Outcome, single: Outcome, workers: int, start_s: float, equal: bool
) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    total = parallel.total
    terms = Table(box=box.SIMPLE, title="Top terms by tf-idf")
    for name, justify in (("term", "left"), ("score", "right"), ("occurrences", "right")):
        terms.add_column(name, justify=justify)  # type: ignore[arg-type]  # a literal in each row above
    for term, score in parallel.top:
        terms.add_row(escape(term), f"{score:.3f}", f"{total.words[term]:,}")
    console.print(terms)
    symbols = "  ".join(f"{symbol} {n:,}" for symbol, n in total.symbols.most_common(6))
    files, columns = parallel.matrix_shape
    figures = Table(box=box.SIMPLE, show_header=False, title=escape(_shown(path)))
    figures.add_column(style="bold")
    figures.add_column()
    figures.add_row("files", f"{total.files:,}" + _about_skipped(total.skipped))
    figures.add_row("bytes", f"{total.nbytes:,}")
    figures.add_row("words", f"{total.words.total():,}, {len(total.words):,} different")
    figures.add_row("symbols", escape(f"{total.symbols.total():,}: {symbols}"))
    figures.add_row("tasks run", f"{parallel.tasks:,} in {workers} workers")
    figures.add_row("tasks per second", f"{parallel.tasks / parallel.seconds:,.0f}")
    figures.add_row("through the store", f"{parallel.stored_bytes:,} bytes")
    figures.add_row("matrix", f"{files:,} files x {columns:,} terms, put once, {4 * files * columns:,} bytes")
    figures.add_row("start-up", f"{start_s:.3f} s")
    figures.add_row("in parallel", f"{parallel.seconds:.3f} s")
    figures.add_row("in one process", f"{single.seconds:.3f} s, {single.seconds / parallel.seconds:.2f} x as long")
    figures.add_row("results", "[green]equal[/]" if equal else "[red]different[/]")
    console.print(figures)


def _about_skipped(skipped: list[tuple[str, str]]) -> str:
    from rich.markup import escape

    if not skipped:
        return ""
    named = [f"{_shown(os.path.basename(path))} ({reason})" for path, reason in skipped[:_SKIPPED_SHOWN]]
    more = ", ..." if len(skipped) > _SKIPPED_SHOWN else ""
    return escape(f", {len(skipped):,} skipped: {', '.join(named)}{more}")
