"""Ray's exceptions: fastrt's own under their names in Ray."""

from fastrt.exceptions import *  # noqa: F403
from fastrt.exceptions import __all__  # noqa: F401
