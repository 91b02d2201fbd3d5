"""`import ray` in a process whose module path begins with the folder above: the module becomes `fastrt.ray`."""

from fastrt.ray import alias

alias.install()
