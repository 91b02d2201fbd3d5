"""Transports errors over a connection: an error becomes an answer, and the caller raises one of the same class."""

from __future__ import annotations

import builtins
from typing import Any

from fastrt import errors as all_errors
from fastrt.errors import FastrtError
from fastrt.ps import errors as our_errors

Meta = dict[str, Any]


def refusal(error: BaseException) -> Meta:
    """Describe an error as an answer; see `raise_refusal`."""
    return {"error": type(error).__name__, "text": str(error)}


def raise_refusal(answer: Meta) -> None:
    """Raise the error that an answer describes, if it does.

    Raises:
        FastrtError: or the error's class, if this process knows it.
    """
    if "error" not in answer:
        return
    for module in (our_errors, all_errors, builtins):
        kind = getattr(module, str(answer["error"]), None)
        if isinstance(kind, type) and issubclass(kind, (FastrtError, ValueError, TypeError, LookupError)):
            raise kind(str(answer.get("text")))
    raise FastrtError(f"{answer['error']}: {answer.get('text')}")
