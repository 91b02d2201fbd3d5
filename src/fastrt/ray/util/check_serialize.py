"""`inspect_serializability`: the parts of a value that cannot be pickled."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple, TextIO

import cloudpickle

__all__ = ["FailureTuple", "inspect_serializability"]

_LINE = 80


class FailureTuple(NamedTuple):
    """A value that cannot be pickled.

    Attributes:
        obj: the value.
        name: of the variable or attribute that holds it.
        parent: the value that holds it.
    """

    obj: Any
    name: str
    parent: Any

    def __hash__(self) -> int:
        return hash((id(self.obj), self.name, id(self.parent)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FailureTuple) and hash(self) == hash(other)


def inspect_serializability(
    base_obj: Any, name: str | None = None, depth: int = 3, print_file: TextIO | None = None
) -> tuple[bool, set[FailureTuple]]:
    """Find the parts of a value that cannot be pickled, and print them.

    Args:
        base_obj: the value.
        name: of the value, for the report.
        depth: how deep variables of functions and attributes of objects are looked at.
        print_file: where the report goes; default: standard output.
    Returns:
        Whether the value can be pickled, and the parts that cannot.
    Source:
        The semantics of `ray.util.inspect_serializability`.
    """
    out = sys.stdout if print_file is None else print_file
    title = f"Checking Serializability of {base_obj}"
    rule = "=" * min(len(title), _LINE)
    out.write(f"{rule}\n{title}\n{rule}\n")
    failures: set[FailureTuple] = set()
    good = _look(base_obj, name or str(getattr(base_obj, "__name__", repr(base_obj))), None, depth, failures, out)
    if not good:
        out.write("These cannot be pickled:\n")
        for failure in failures:
            out.write(f"    {failure.name}: {failure.obj!r}, of {failure.parent!r}\n")
    return good, failures


def _look(value: Any, name: str, parent: Any, depth: int, failures: set[FailureTuple], out: TextIO) -> bool:
    try:
        cloudpickle.dumps(value)
        return True
    except Exception as exc:  # a value's own methods may raise anything
        out.write(f"{name}: {exc}\n")
    found = False
    if depth > 0:
        for inner_name, inner in _parts_of(value):
            if not _look(inner, inner_name, value, depth - 1, failures, out):
                found = True
    if not found:
        failures.add(FailureTuple(value, name, parent))
    return False


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        return [*names.globals.items(), *names.nonlocals.items()]
    if isinstance(value, dict):
        return [(repr(key), one) for key, one in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [(f"item {k}", one) for k, one in enumerate(value)]
    if inspect.isclass(value):
        return [(key, one) for key, one in vars(value).items() if not key.startswith("__")]
    return list(getattr(value, "__dict__", {}).items())
