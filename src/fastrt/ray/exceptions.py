"""Ray's exceptions: fastrt's own under their names in Ray."""

from fastrt.errors import name_as_ray
from fastrt.exceptions import *  # noqa: F403
from fastrt.exceptions import __all__  # noqa: F401
from fastrt.ray.alias import is_inherited

if is_inherited():  # in a worker of a program that says `import ray`: its functions name `fastrt.ray`
    name_as_ray()
