"""The engine of an example by a switch, in place of `import fastrt as ray` or `import ray` at its top."""

import argparse
import importlib
import inspect
import logging
import time

ENGINES = ("fastrt", "local", "ray", "ray-itself")


def start(engine, workers=2, address=None):
    """Start an engine and return the module that the program uses.

    Args:
        engine: fastrt; local: fastrt in this process; ray: fastrt's functions on Ray; ray-itself: Ray's.
        workers: CPUs, where the engine is started here.
        address: of a Ray cluster that runs already.
    """
    of_ray = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    where = {"num_cpus": workers} if address is None else {"address": address}
    module = importlib.import_module("ray" if engine == "ray-itself" else "fastrt")
    if engine == "ray-itself":
        module.init(**where, **of_ray)
    elif engine == "ray":
        module.init(engine="ray", **where, **of_ray)
    else:
        module.init(num_cpus=workers, local_mode=engine == "local")
    return module


def run(main, check, size):
    """Run an example's `main(ray, size)` by the command line, check its result, and print the time."""
    parser = argparse.ArgumentParser(description=inspect.getmodule(main).__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="fastrt", help="what runs it (default: fastrt)")
    parser.add_argument("--size", type=int, default=size, help=f"how much of it (default: {size})")
    parser.add_argument("--workers", type=int, default=2, help="CPUs (default: 2)")
    parser.add_argument("--address", help="of a Ray cluster that runs already")
    options = parser.parse_args()
    module = start(options.engine, options.workers, options.address)
    try:
        begun = time.perf_counter()
        result = main(module, options.size)
        seconds = time.perf_counter() - begun
    finally:
        module.shutdown()
    check(result, options.size)
    print(f"{str(result)[:200]}\nseconds: {seconds:.3f}")
