"""Names of Ray Data, for programs that import some of them and never use them.

fastrt has Ray's core only. Libraries such as Modin import names of `ray.data` when they start, for conversions that few
programs call. So every name can be imported. It is a class without instances: `isinstance` answers False, and any other
use raises an UnsupportedError.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fastrt.errors import UnsupportedError
from fastrt.ray import refusals


class _Refused(type):
    """The type of the names of Ray Data."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(refusals.refuse(f"ray.data.{cls.__name__}", refusals.LIBRARY))

    def __getattr__(cls, name: str) -> NoReturn:
        raise refusals.RefusedName(refusals.refuse(f"ray.data.{cls.__name__}.{name}", refusals.LIBRARY))


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'ray.data' has no attribute {name!r}")
    return _Refused(name, (), {"__module__": "ray.data"})
