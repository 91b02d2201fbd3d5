"""Signatures of the functions and classes of users."""

import inspect
import sys
from collections.abc import Callable
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature also where an annotation names what only type checkers import.

    Python 3.14 evaluates annotations when they are first read; there a name that is missing becomes a `ForwardRef`.

    Raises:
        TypeError: it cannot be called.
        ValueError: it has no signature, as some builtins.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format  # imported by inspect already

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)
