"""Definition of a table, as it is sent, stored and compared. All of its checks are here."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from fastrt._core.tables.embedding import PARTS, ROWS_MAX
from fastrt.ps import initializers, optimizers
from fastrt.ps.placement import divide

NanPolicy = Literal["pass", "drop", "raise"]
NAN_POLICIES = ("pass", "drop", "raise")
MODES = ("sync", "async", "ssp")
NAME_CHARS_MAX = 200
ELEMENTS_MAX = 1 << 36


@dataclass(frozen=True)
class Spec:
    """A table's definition.

    Attributes:
        name: its name in the cluster.
        kind: "dense" or "embedding".
        shape: of a dense table; (dim,) for an embedding.
        optimizer: updates the table.
        init: first values; None for a dense table whose values came with its definition.
        cuts: boundaries of a dense table's parts; see `placement.divide`.
        rows: for an embedding: keys are from 0 to rows - 1; None: any 64 bits.
        capacity: for an embedding: most rows before the least recently used ones are evicted.
        nan: policy for gradients with NaN or infinity.
        mode: "sync", "async" or "ssp".
        workers: number of workers that push.
        staleness: for ssp: how many pushes a worker may be ahead of the slowest one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    optimizer: optimizers.Optimizer
    init: initializers.Initial | None
    cuts: tuple[int, ...] = ()
    rows: int | None = None
    capacity: int | None = None
    nan: str = "raise"
    mode: str = "sync"
    workers: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > NAME_CHARS_MAX or not self.name.isprintable():
            raise ValueError(f"a table's name must have 1 to {NAME_CHARS_MAX} printable characters, not {self.name!r}")
        if self.kind not in ("dense", "embedding") or self.mode not in MODES or self.nan not in NAN_POLICIES:
            raise ValueError(
                f"table {self.name!r}: kind {self.kind!r}, mode {self.mode!r} or nan={self.nan!r} is not known; kinds "
                f"are dense and embedding, modes {', '.join(MODES)}, nan= is one of {', '.join(NAN_POLICIES)}"
            )
        if not all(_whole(n) and n >= 0 for n in self.shape) or not self.elements <= ELEMENTS_MAX:
            raise ValueError(
                f"table {self.name!r}: the shape {self.shape} is negative, or has more than {ELEMENTS_MAX} values"
            )
        if not (_whole(self.workers) and self.workers >= 1 and _whole(self.staleness) and self.staleness >= 0):
            raise ValueError(
                f"table {self.name!r}: {self.workers} workers, staleness {self.staleness}; there must be 1 worker or "
                "more, and staleness 0 or more"
            )
        if self.kind == "embedding":
            self._check_embedding()
        elif tuple(divide(self.elements, len(self.cuts) - 1)) != self.cuts:
            raise ValueError(f"table {self.name!r}: its parts do not fit its shape")

    def _check_embedding(self) -> None:
        if len(self.shape) != 1 or not 1 <= self.shape[0] <= 1 << 20 or self.init is None:
            raise ValueError(f"embedding {self.name!r}: dim must be from 1 to {1 << 20}")
        if self.optimizer.dense_only:
            name = type(self.optimizer).__name__
            raise ValueError(
                f"embedding {self.name!r}: {name} changes every row in each step, but a step of an embedding changes "
                "only the rows of the pushed keys: use LazyAdam"
            )
        for what, value in (("rows", self.rows), ("capacity", self.capacity)):
            if value is not None and not (_whole(value) and 1 <= value < ROWS_MAX):
                raise ValueError(f"embedding {self.name!r}: {what} is {value!r}; it must be from 1 to {ROWS_MAX - 1}")

    @property
    def elements(self) -> int:
        """Number of values of a dense table, or of a row of an embedding."""
        return math.prod(self.shape)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return PARTS if self.kind == "embedding" else len(self.cuts) - 1

    @property
    def dim(self) -> int:
        """Number of values in a row of an embedding."""
        return self.shape[-1]

    def to_json(self) -> dict[str, Any]:
        """The definition as JSON values."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        init = None if self.init is None else self.init.to_json()
        return {**found, "optimizer": self.optimizer.to_json(), "init": init}

    @staticmethod
    def from_json(found: Any) -> Spec:
        """Return the definition that `to_json` made.

        Raises:
            ValueError: the JSON is no valid definition.
        """
        names = {field.name for field in dataclasses.fields(Spec)}
        if not isinstance(found, dict) or set(found) != names:
            raise ValueError("the JSON is not the definition of a table")
        lists = [found["shape"], found["cuts"]]
        if not all(isinstance(one, list) and len(one) < 100 and all(map(_whole, one)) for one in lists):
            raise ValueError("the JSON is not the definition of a table")
        if not all(isinstance(found[name], str) for name in ("name", "kind", "mode", "nan")):
            raise ValueError("the JSON is not the definition of a table")
        return Spec(
            **{
                **found,
                "shape": tuple(found["shape"]),
                "cuts": tuple(found["cuts"]),
                "optimizer": optimizers.from_json(found["optimizer"]),
                "init": None if found["init"] is None else initializers.from_json(found["init"]),
            }
        )

    def difference(self, other: Spec) -> str:
        """Describe the differences between two definitions; empty if there are none."""
        mine, theirs = self.to_json(), other.to_json()
        return ", ".join(
            f"{name} {mine[name]!r} instead of {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
