"""Whether a call of the system failed because something is used up: the same call may succeed later."""

from __future__ import annotations

import errno


def is_short(error: BaseException) -> bool:
    """Return whether an error says that the descriptors or the memory of this process or machine are used up.

    Source: accept(2), open(2), mmap(2).
    """
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
