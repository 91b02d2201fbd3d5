"""Messages that a program logs once."""

from __future__ import annotations

import time

_PERIOD_S = 60.0
_logged: set[str] = set()
_state = {"disabled": False, "periodic": False, "last": 0.0}


def log_once(key: str) -> bool:
    """Whether this is the first call with that key in this process.

    Source:
        The semantics of `ray.util.log_once`.
    """
    now = time.time()
    if _state["disabled"]:
        return False
    if key not in _logged:
        _logged.add(key)
        _state["last"] = now
        return True
    if _state["periodic"] and now - _state["last"] > _PERIOD_S:
        _logged.clear()
        _state["last"] = now
    return False


def disable_log_once_globally() -> None:
    """Let `log_once` answer False from now on."""
    _state["disabled"] = True


def enable_periodic_logging() -> None:
    """Let `log_once` forget its keys once a minute."""
    _state["periodic"] = True
