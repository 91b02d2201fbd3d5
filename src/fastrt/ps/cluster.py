"""The membership of a parameter-server cluster, under the name that users of parameter servers look for."""

from fastrt.membership import *  # noqa: F403
from fastrt.membership import __all__ as __all__
