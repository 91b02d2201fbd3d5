"""Counters, gauges and histograms of a program, with the names and signatures of `ray.util.metrics`.

A value is written to shared memory by the process that records it (`observe.program_metrics`); `fastrt metrics` and
`/metrics` add the processes up. Values that are recorded without a session are written once the process has one.

Source:
    `ray.util.metrics` of Ray 2.60.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import threading
import warnings
from array import array
from pathlib import Path
from typing import Any

from fastrt.errors import FastrtError
from fastrt.observe.program_metrics import COUNTER, GAUGE, HISTOGRAM, SERIES_MAX, Definition, SeriesFile
from fastrt.store import client as store_client
from fastrt.store.client import Store

__all__ = ["Counter", "Gauge", "Histogram"]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_OWN = "fastrt_"
_DEFINITION_CHARS_MAX = 4000


class _Book:
    """The series of this process; every method is called under `lock`.

    Attributes:
        version: another object after each change of session; values found before are not to be used any more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = object()
        self._store: Store | None = None
        self._file: SeriesFile | None = None
        self._cells: dict[Definition, Any] = {}

    def follow(self) -> None:
        """Use the file of the session that this process is in now."""
        if store_client.current() is not self._store:
            self.move(store_client.current())

    def cells(self, definition: Definition) -> Any:
        """The values of a series.

        Raises:
            FastrtError: this process has too many series.
        """
        found = self._cells.get(definition)
        if found is None:
            if len(self._cells) >= SERIES_MAX:
                raise FastrtError(
                    f"metric {definition.name!r}: this process has {SERIES_MAX:,} series of metrics. Each combination "
                    "of tags' values is a series: use tags with fewer values"
                )
            found = self._cells[definition] = self._new(definition, (0.0,) * definition.size)
        return found

    def move(self, store: Store | None) -> None:
        """Write the values to the file of another session; None keeps them in this process."""
        kept = {definition: list(cells) for definition, cells in self._cells.items()}
        if self._file is not None:
            self._file.close(cells for cells in self._cells.values() if isinstance(cells, memoryview))
            self._file = None
        self.version, self._store = object(), store
        if store is not None:
            self._file = SeriesFile(Path(store.socket_path).parent)
        for definition, values in kept.items():
            try:
                self._cells[definition] = self._new(definition, values)
            except FastrtError as error:  # it was made where there was no session, and no limit
                self._cells[definition] = array("d", values)
                warnings.warn(f"a series of the program is not shown: {error}", RuntimeWarning, stacklevel=4)

    def _new(self, definition: Definition, values: Any) -> Any:
        return array("d", values) if self._file is None else self._file.add(definition, values)


_book = _Book()


class Metric:
    """A metric of a program; see `Counter`, `Gauge` and `Histogram`.

    Args:
        name: letters, digits, `_` and `:`, not first a digit; not `fastrt_...`. A metric with another name is discarded
            with a warning, as by Ray.
        description: for people.
        tag_keys: the names of its tags; each combination of their values is a series.
    Raises:
        TypeError: the name is no text, or the keys are not a tuple of texts.
        ValueError: the name is empty or one of fastrt's own, or the texts are too long.
    """

    _KIND = ""

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric is a text, not of {type(name).__name__}")
        if not name:
            raise ValueError("a metric needs a name")
        if name.startswith(_OWN):
            raise ValueError(f"metric {name!r}: names that begin with {_OWN} are fastrt's own")
        self._is_discarded = not _NAME.fullmatch(name)
        if self._is_discarded:
            warnings.warn(
                f"Invalid metric name: {name}. The metric is discarded: a name has letters, digits, _ and :, and does "
                "not begin with a digit.",
                UserWarning,
                stacklevel=3,
            )
        if tag_keys is not None and not isinstance(tag_keys, tuple):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(tag_keys)}")
        for key in tag_keys or ():
            if not isinstance(key, str):
                raise TypeError(f"Tag keys must be str, got {type(key)}.")
        if len(name) + len(description) + sum(map(len, tag_keys or ())) > _DEFINITION_CHARS_MAX:
            raise ValueError(f"metric {name[:100]!r}: name, description and tag keys are longer than 4,000 characters")
        self._name, self._description, self._tag_keys = name, description, tag_keys or ()
        self._default_tags: dict[str, str] = {}
        self._boundaries: tuple[float, ...] = ()
        self._known: dict[Any, tuple[object, Any]] = {}  # by tags: the book's version, and the values

    def set_default_tags(self, default_tags: dict[str, str]) -> Any:
        """Set values that tags have unless a recording gives others.

        Returns:
            This metric.
        Raises:
            TypeError: a value is not text.
            ValueError: a tag is none of this metric's.
        """
        for key, value in default_tags.items():
            if key not in self._tag_keys:
                raise ValueError(f"Unrecognized tag key {key}.")
            if not isinstance(value, str):
                raise TypeError(f"Tag values must be str, got {type(value)}.")
        self._default_tags = dict(default_tags)
        self._known.clear()
        return self

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, keys and default values of tags."""
        return {
            "name": self._name, "description": self._description, "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }  # fmt: skip

    def _cells(self, tags: dict[str, str] | None) -> Any:
        """The values of a series, under the book's lock. Tags are checked at their first use."""
        _book.follow()
        key = tuple(tags.items()) if tags else ()
        known = self._known.get(key)
        if known is None or known[0] is not _book.version:
            known = self._known[key] = _book.version, _book.cells(self._definition(tags))
        return known[1]

    def _check(self, tags: dict[str, str] | None) -> bool:
        """Whether values are kept; tags are checked also if they are not."""
        if self._is_discarded:
            self._definition(tags)
        return not self._is_discarded

    def _definition(self, tags: dict[str, str] | None) -> Definition:
        for value in (tags or {}).values():
            if not isinstance(value, str):
                raise TypeError(f"Tag values must be str, got {type(value)}.")
        final = {**self._default_tags, **(tags or {})}
        missing = [key for key in self._tag_keys if key not in final]
        if missing:
            raise ValueError(f"Missing value for tag key(s): {','.join(missing)}.")
        if tags and sum(len(key) + len(value) for key, value in tags.items()) > _DEFINITION_CHARS_MAX:
            raise ValueError(f"metric {self._name!r}: the tags are longer than {_DEFINITION_CHARS_MAX:,} characters")
        return Definition(
            self._name, self._KIND, self._description, tuple(sorted(final.items())), self._boundaries
        )  # fmt: skip

    def __reduce__(self) -> Any:
        return _again, (type(self), (self._name, self._description, self._tag_keys), self._default_tags)


class Counter(Metric):
    """A sum that only grows, over all processes of the session.

    Args:
        name, description, tag_keys: see `Metric`. The series is called NAME_total.
    """

    _KIND = COUNTER

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        """Add to the counter.

        Args:
            value: above 0.
            tags: values of tags, for this call; the defaults serve for others.
        Raises:
            FastrtError: this process has too many series.
            TypeError: the value is not a number, or a tag's is not text.
            ValueError: the value is not above 0, or a tag has no value.
        """
        _check_number(value)
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        if self._check(tags):
            with _book.lock:
                self._cells(tags)[0] += value


class Gauge(Metric):
    """The last value of each process, which is shown while the process lives, with its pid.

    Args:
        name, description, tag_keys: see `Metric`.
    """

    _KIND = GAUGE

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        """Set the gauge; None changes nothing.

        Args:
            value: the value.
            tags: as for `Counter.inc`.
        Raises:
            FastrtError: this process has too many series.
            TypeError: the value is not a number, or a tag's is not text.
            ValueError: a tag has no value.
        """
        if value is None:
            return
        _check_number(value)
        if self._check(tags):
            with _book.lock:
                self._cells(tags)[0] = value


class Histogram(Metric):
    """Numbers of observations by buckets of their values, over all processes of the session.

    Args:
        name, description, tag_keys: see `Metric`.
        boundaries: the upper ends of the buckets, above 0; one more bucket has no end. At most 1,000.
    Raises:
        TypeError: as for `Metric`.
        ValueError: as for `Metric`, or there are no boundaries, too many, or one is not above 0.
    """

    _KIND = HISTOGRAM

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: list[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name, description, tag_keys)
        if not boundaries:
            raise ValueError(
                "boundaries argument should be provided when using the Histogram class. e.g., "
                'Histogram("name", boundaries=[1.0, 2.0])'
            )
        if len(boundaries) > 1000:
            raise ValueError(f"{len(boundaries)} boundaries; a histogram has at most 1,000")
        for index, boundary in enumerate(boundaries):
            if not boundary > 0:
                raise ValueError(f"Invalid `boundaries` argument at index {index}, {boundaries}: values above 0")
        self.boundaries = boundaries
        self._boundaries = tuple(sorted({float(one) for one in boundaries} - {math.inf}))

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Count a value in its bucket.

        Args:
            value: the value.
            tags: as for `Counter.inc`.
        Raises:
            FastrtError: this process has too many series.
            TypeError: the value is not a number, or a tag's is not text.
            ValueError: a tag has no value.
        """
        _check_number(value)
        if self._check(tags):
            bucket = bisect.bisect_left(self._boundaries, value)
            with _book.lock:
                cells = self._cells(tags)
                cells[bucket] += 1
                cells[len(self._boundaries) + 1] += value

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, keys and default values of tags, and the boundaries."""
        return {**super().info, "boundaries": self.boundaries}

    def __reduce__(self) -> Any:
        words = (self._name, self._description, self.boundaries, self._tag_keys)
        return _again, (type(self), words, self._default_tags)


def _again(kind: Any, words: tuple[Any, ...], default_tags: dict[str, str]) -> Any:
    return kind(*words).set_default_tags(default_tags)


def _check_number(value: object) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"value must be int or float, got {type(value)}.")


def _forget_after_fork() -> None:
    """The child counts for itself; the file is its parent's."""
    global _book
    _book = _Book()


os.register_at_fork(after_in_child=_forget_after_fork)
