"""The compiled core: bytes in shared memory. It knows no RPC, no pickle, no policy, no settings and no clock.

Reading order: include/layout.h, segment, clients, arena, objects, tasks, queue, wait.
"""

import sysconfig
from pathlib import Path

try:
    import fastrt._core.errors as _errors  # noqa: F401  (the probe: any compiled module would do)
except ModuleNotFoundError as exc:
    if not (exc.name or "").startswith("fastrt._core"):
        raise  # something else is missing, and Python's own message names it
    _here = Path(__file__).parent
    _wanted = sysconfig.get_config_var("EXT_SUFFIX")
    _found = sorted({path.name.partition(".")[2] for path in _here.glob("*.so")} - {str(_wanted).lstrip(".")})
    _why = f"it was built for another Python ({', '.join(_found)})" if _found else "it is not built"
    raise ImportError(
        f"fastrt's compiled core cannot be loaded from {_here}: {_why}; this Python needs *{_wanted}. "
        "Run `pip install .` (or `pip install -e .` to work on the sources) in the checkout with this Python; "
        "if you are inside the checkout's src/ folder, leave it so that the installed package is found."
    ) from exc
