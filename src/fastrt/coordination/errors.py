"""The errors of a member of a coordinated job. All are FastrtErrors; each names the call and the status code."""

from __future__ import annotations

from fastrt.errors import FastrtError


class CoordinationError(FastrtError):
    """The coordination service rejected a call, or a member of the job failed; see `code` and `source`.

    Attributes:
        code: the gRPC status code's name, such as `INTERNAL`.
        source: the task that failed, such as `job/3`; None when it is the caller's error, or not one of a task.
    """

    def __init__(self, message: str, code: str = "UNKNOWN", source: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.source = source


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """A key was not set, or not all tasks arrived at a barrier, in time. The message names the missing tasks."""


class CoordinatorLostError(CoordinationError):
    """The coordinator broke off a call that may have had effect, or could not be reached for too long."""


class KeyExistsError(CoordinationError):
    """The key is set already. Pass `overwrite=True` to replace its value."""


class KeyMissingError(CoordinationError, LookupError):
    """The key is not set. `get` waits for it."""
