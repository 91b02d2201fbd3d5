"""Errors of parameter tables, besides those of the whole package."""

from __future__ import annotations

from fastrt.errors import FastrtError


class TableMismatchError(FastrtError, ValueError):
    """A table of that name exists with another definition; the message says what differs. Use its definition."""


class TableTimeoutError(FastrtError, TimeoutError):
    """A push, pull or barrier waited too long for other workers or a server; the message names them.

    A push is not undone. Call again, with a longer timeout for slow workers: servers keep what they have received.
    """


class ServerLostError(FastrtError):
    """A parameter server is lost for good, or the process that started the servers has ended."""


class NotFiniteError(FastrtError, ValueError):
    """A gradient contains NaN or infinite values and the table's policy is "raise". Nothing of it was applied."""


class CheckpointError(FastrtError):
    """A checkpoint cannot be written, or one that is to be loaded is incomplete, damaged or of another format."""


class CutLostError(FastrtError):
    """A server does not hold the cut of a checkpoint because it was restarted. Internal to head and servers."""
