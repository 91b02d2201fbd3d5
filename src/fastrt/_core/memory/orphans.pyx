# cython: language_level=3, freethreading_compatible=True
"""Orphans: processes whose parent has ended. They become children of init, or of a process that adopts them."""

cdef extern from "<sys/prctl.h>" nogil:
    int prctl(int, ...)
    int PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER


def can_adopt_orphans() -> bool:
    """Whether the kernel lets this process adopt orphans. It changes nothing, so other threads may adopt meanwhile."""
    cdef int now = 0
    return prctl(PR_GET_CHILD_SUBREAPER, &now) == 0


def adopt_orphans(wanted: bool) -> bool:
    """Set whether descendants of this process whose parent ends become its children (prctl(2), CHILD_SUBREAPER).

    Args:
        wanted: whether they do from now on.
    Returns:
        Whether they did before.
    Raises:
        OSError: the kernel refuses it.
    """
    cdef int before = 0
    if prctl(PR_GET_CHILD_SUBREAPER, &before) != 0 or prctl(PR_SET_CHILD_SUBREAPER, <unsigned long>wanted) != 0:
        raise OSError("this process cannot adopt orphans")
    return before != 0
