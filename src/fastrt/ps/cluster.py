"""The membership of a parameter-server cluster, under the name that users of parameter servers look for."""

from fastrt.cluster import *  # noqa: F403
from fastrt.cluster import __all__ as __all__
