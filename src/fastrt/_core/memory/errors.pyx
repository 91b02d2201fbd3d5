# cython: language_level=3, freethreading_compatible=True
"""Convert the core's error codes to exceptions. No other module does so.

C functions of the core return a value >= 0 or a negative code (FRT_* in include/layout.h); a caller that
holds the GIL passes the returned value through `check`. fastrt.errors maps the codes to exception classes.
"""
from fastrt.errors import ERROR_CODES, FastrtError

from fastrt._core.memory.layout cimport FRT_FULL, FRT_INTERRUPTED

_ADVICE = {
    -1: "the object store is full",
    -2: "the object is gone: its last reference was dropped, or it belongs to an ended session",
    -3: "the time ran out",
    -4: "the shared segment holds an impossible state; restart the runtime and report this",
    -5: "a lock of the arena has been held for 5 s by a process that is stopped or starved",
    -6: "the object is larger than the whole store",
    -7: "a table of the arena is full: too many objects, tasks or functions at once",
    -8: "the runtime is shut down",
    -10: "every client slot of the arena is taken",
    -11: "there is no such record",
}


cdef int check(int code) except -1:
    """Pass `code` on when it is >= 0; raise its exception otherwise."""
    if code >= 0:
        return code
    if code == FRT_INTERRUPTED:
        # A signal came, and its Python handler returned without raising: the caller goes on waiting.
        return 0
    error = ERROR_CODES.get(code, FastrtError)(_ADVICE.get(code, f"core error {code}"))
    if code == FRT_FULL:
        error.may_pass = True
    raise error


def raise_code(int code):
    """Raise the exception for a core error code (for tests and Python callers).

    Args:
        code: a value returned by the core; >= 0 raises nothing.
    Returns:
        The code when it is >= 0.
    Raises:
        FastrtError: the subclass that `fastrt.errors.ERROR_CODES` names.
    """
    return check(code)
