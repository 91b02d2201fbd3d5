"""Run the programs that the command line names, one after the other in one session, each after a line of its own."""

import os
import runpy
import sys
from pathlib import Path

os.environ.update(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")

import ray

context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
print(sorted(context.address_info.keys() & {"node_id", "address", "session_dir", "node_ip_address"}), flush=True)
for name in sys.argv[1:]:
    print(f"== {name}", flush=True)
    runpy.run_path(str(Path(__file__).parent / f"{name}.py"), run_name="__main__")
with context:
    print("== end", ray.is_initialized(), os.path.isdir(context["session_dir"]), flush=True)
print(ray.is_initialized())
