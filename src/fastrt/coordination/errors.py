"""What a member of a coordinated job may be told. All are FastrtErrors; each names the call and the status code."""

from __future__ import annotations

from fastrt.errors import FastrtError


class CoordinationError(FastrtError):
    """The coordination service refused a call, or a member of the job failed. `code` and `source` say which.

    Attributes:
        code: the gRPC status code's name, as `INTERNAL`.
        source: the task whose error this is, as `job/3`; None when it is the caller's own or nobody's.
    """

    def __init__(self, message: str, code: str = "UNKNOWN", source: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.source = source


class CoordinationTimeoutError(CoordinationError, TimeoutError):
    """A key was not set, or a barrier not reached by all, in time. Its message names the missing tasks."""


class CoordinatorLostError(CoordinationError):
    """The coordinator broke off a call that may or may not have had effect, or has been away for too long."""


class KeyExistsError(CoordinationError):
    """The key is set already. Pass `overwrite=True` to replace its value."""


class KeyMissingError(CoordinationError, LookupError):
    """The key is not set. `get` waits for it."""
