"""Remote functions under their path in Ray."""

from fastrt.tasks.remote import RemoteFunction

__all__ = ["RemoteFunction"]
