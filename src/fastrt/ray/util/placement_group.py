"""Placement groups under their path in Ray."""

from fastrt.util.placement_group import *  # noqa: F403
from fastrt.util.placement_group import __all__  # noqa: F401
