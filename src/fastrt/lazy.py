"""Names of a package that are imported at their first use: `__getattr__` and `__dir__` for its `__init__`.

The package imports the same names under `if TYPE_CHECKING`; `tests/test_lazy.py` compares the two lists.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, homes: Mapping[str, str], first: str = ""
) -> tuple[Callable[[str], Any], Callable[[], Sequence[str]]]:
    """Make the functions `__getattr__` and `__dir__` of a package.

    A name becomes an attribute of the package when it is first read, so that later reads cost what they always do.

    Args:
        package: the package's `__name__`.
        homes: names, with spaces between them, by the module that has them. A module without names is one itself.
        first: a module that is imported before any of them.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split() or [module.rpartition(".")[2]]}

    def read(name: str) -> Any:
        here = sys.modules[package]
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=here)
        if first:
            importlib.import_module(first)
        module = importlib.import_module(home_of[name])
        found = getattr(module, name) if homes[home_of[name]] else module
        setattr(here, name, found)
        return found

    def names() -> Sequence[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return read, names
