"""`import ray` gives `fastrt.ray`: one finder for the module and all that is below it.

`ray.util.queue` and `fastrt.ray.util.queue` are one module under two names, so classes and functions are the same
objects. Pickles name them as fastrt's, and load in every worker. Workers and other child processes that import `ray`
themselves find the folder `path/` of this package on their module path, which installs the finder there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from fastrt.errors import FastrtError, name_as_ray
from fastrt.ray import refusals

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")
_RAY = "ray"
_OURS = "fastrt.ray"


class Finder(MetaPathFinder, Loader):
    """Finds `ray` and modules below it as those of `fastrt.ray`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module below `ray`; None for other modules, and for those that Ray has not either.

        Raises:
            RefusedModule: Ray has the module and fastrt has not.
        """
        parent, _, name = fullname.removeprefix("fastrt.").rpartition(".")
        if refusals.reason_of(parent, name) is not None:
            raise refusals.RefusedModule(refusals.words_of(parent, name))
        if fullname != _RAY and not (fullname.startswith(_RAY + ".") and find_spec("fastrt." + fullname)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return fastrt's module of that name."""
        module = importlib.import_module("fastrt." + spec.name)
        spec.loader_state = module.__spec__
        _name_loaded()
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced; it has run already."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make `import ray` give `fastrt.ray` in this process and in its children, with Ray's names of tasks' errors.

    Raises:
        FastrtError: this process has imported Ray itself.
    """
    if hasattr(sys.modules.get(_RAY), "_config"):
        raise FastrtError("this process has imported Ray itself; start the program by `python -m fastrt.ray`")
    if not any(isinstance(one, Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    sys.modules[_RAY] = importlib.import_module(_OURS)
    name_as_ray()
    _name_loaded()
    if PATH not in sys.path:
        sys.path.insert(min(1, len(sys.path)), PATH)  # the first one is the program's folder
    if not is_inherited():
        given = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([PATH, *filter(None, [given])])


def is_inherited() -> bool:
    """Return whether this process or a parent of it has called `install`."""
    return PATH in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def _name_loaded() -> None:
    """Name all modules below `fastrt.ray` that are loaded as modules below `ray`, too.

    Else a later import of one would load it by the finder, and replace the attribute of its parent: a function there
    may have the module's name.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS + ".") and module is not None:
            sys.modules.setdefault(name.removeprefix("fastrt."), module)
