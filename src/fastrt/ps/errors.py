"""What the calls of parameter tables raise beside the errors of the whole package."""

from __future__ import annotations

from fastrt.errors import FastrtError


class TableMismatchError(FastrtError, ValueError):
    """A table of that name is another one than was asked for; the message says what differs. Use its definition."""


class TableTimeoutError(FastrtError, TimeoutError):
    """A push, a pull or a barrier waited in vain, for other workers or for a server; the message says for whom.

    What was pushed is not undone. Call again, with a longer timeout where workers are slow: what servers have is kept.
    """


class ServerLostError(FastrtError):
    """A parameter server is gone and does not come back, or the process that started the servers has ended."""


class NotFiniteError(FastrtError, ValueError):
    """A gradient contains NaN or infinite values, and the table's policy is "raise". Nothing of it was applied."""


class CheckpointError(FastrtError):
    """A checkpoint cannot be written, or one that is to be loaded is incomplete, damaged or of another format."""


class CutLostError(FastrtError):
    """A server does not know a cut that a checkpoint is made at: it has begun anew since; between head and servers."""
