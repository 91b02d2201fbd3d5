"""The compiled core: bytes in shared memory. It has no RPC, no pickle, no policy, no settings and no clock.

Import order: memory < objects < tasks < repair, each importing only sub-packages before it; collective, tables,
refcounts and transfer import only memory. Reading order: include/layout.h; memory/segment, memory/clients,
memory/arena; objects/objects; tasks/tasks; memory/queue, memory/wait.
"""

import sysconfig
from pathlib import Path

try:
    import fastrt._core.memory.errors as _errors  # noqa: F401  (the probe: any compiled module would do)
except ModuleNotFoundError as exc:
    if not (exc.name or "").startswith("fastrt._core"):
        raise  # another module is missing, and Python's message names it
    _here = Path(__file__).parent
    _wanted = sysconfig.get_config_var("EXT_SUFFIX")
    _found = sorted({path.name.partition(".")[2] for path in _here.rglob("*.so")} - {str(_wanted).lstrip(".")})
    _why = f"it was built for another Python ({', '.join(_found)})" if _found else "it is not built"
    raise ImportError(
        f"fastrt's compiled core cannot be loaded from {_here}: {_why}; this Python needs *{_wanted}. "
        "Run `pip install .` (or `pip install -e .` to work on the sources) in the checkout with this Python; "
        "if you are inside the checkout's src/ folder, leave it so that the installed package is found."
    ) from exc
