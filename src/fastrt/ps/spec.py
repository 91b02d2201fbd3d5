"""What a table is: its definition, as it is sent, stored and compared. Everything in it is checked here."""

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
        shape: of a dense table; (dim,) of an embedding.
        optimizer: what updates it.
        init: first values; None for a dense table whose values came with its definition.
        cuts: where the parts of a dense table begin; see `placement.divide`.
        rows: of an embedding: keys are from 0 to rows - 1; None: any 64 bits.
        capacity: how many rows of an embedding there can be before the least recently used are evicted.
        nan: what to do with gradients that are not finite.
        mode: "sync", "async" or "ssp".
        workers: how many push.
        staleness: of ssp: how many pushes a worker may be ahead of the slowest.
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
            raise ValueError(f"a table's name has from 1 to {NAME_CHARS_MAX} printable characters, not {self.name!r}")
        if self.kind not in ("dense", "embedding") or self.mode not in MODES or self.nan not in NAN_POLICIES:
            raise ValueError(
                f"table {self.name!r}: {self.kind!r}, {self.mode!r}, nan={self.nan!r}; there are dense and embedding, "
                f"{', '.join(MODES)}, and {', '.join(NAN_POLICIES)}"
            )
        if not all(_whole(n) and n >= 0 for n in self.shape) or not self.elements <= ELEMENTS_MAX:
            raise ValueError(
                f"table {self.name!r} of shape {self.shape}: at most {ELEMENTS_MAX} float32, none negative"
            )
        if not (_whole(self.workers) and self.workers >= 1 and _whole(self.staleness) and self.staleness >= 0):
            raise ValueError(f"table {self.name!r}: {self.workers} workers, staleness {self.staleness}")
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
                f"embedding {self.name!r}: {name} changes every row at each step, and an embedding only those of the "
                "pushed keys: use LazyAdam"
            )
        for what, value in (("rows", self.rows), ("capacity", self.capacity)):
            if value is not None and not (_whole(value) and 1 <= value < ROWS_MAX):
                raise ValueError(f"embedding {self.name!r}: {what} is {value!r}; it must be from 1 to {ROWS_MAX - 1}")

    @property
    def elements(self) -> int:
        """How many float32 a dense table has, or a row of an embedding."""
        return math.prod(self.shape)

    @property
    def parts(self) -> int:
        """How many parts it is divided into."""
        return PARTS if self.kind == "embedding" else len(self.cuts) - 1

    @property
    def dim(self) -> int:
        """Values of a row of an embedding."""
        return self.shape[-1]

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        init = None if self.init is None else self.init.to_json()
        return {**found, "optimizer": self.optimizer.to_json(), "init": init}

    @staticmethod
    def from_json(found: Any) -> Spec:
        """What `to_json` made.

        Raises:
            ValueError: it is none.
        """
        names = {field.name for field in dataclasses.fields(Spec)}
        if not isinstance(found, dict) or set(found) != names:
            raise ValueError("this is no definition of a table")
        lists = [found["shape"], found["cuts"]]
        if not all(isinstance(one, list) and len(one) < 100 and all(map(_whole, one)) for one in lists):
            raise ValueError("this is no definition of a table")
        if not all(isinstance(found[name], str) for name in ("name", "kind", "mode", "nan")):
            raise ValueError("this is no definition of a table")
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
        """What differs between two definitions, in words; empty if nothing does."""
        mine, theirs = self.to_json(), other.to_json()
        return ", ".join(
            f"{name} {mine[name]!r} and not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
