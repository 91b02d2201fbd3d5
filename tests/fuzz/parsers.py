"""Coverage-guided fuzzing of all Python code that reads bytes of a stranger or of a file: one table of targets.

    python tests/fuzz/parsers.py 2                  seconds for each target; what `make check` runs
    python tests/fuzz/parsers.py 600 invitation     for these only

A module `*_parsers.py` beside this one adds targets by three names:

    TARGETS = {"name": function of bytes, which raises for an input that is handled wrongly}
    SEEDS = {"name": [inputs to begin with, among them those that once were handled wrongly]}
    PACKAGES = ["fastrt.collective"]                what is instrumented; its branches guide the fuzzing

`test_parsers.py` runs every target on damaged seeds in each test run. libFuzzer comes with atheris (extra `fuzz`);
without it nothing is fuzzed, and this says so. An input that ends a target is written to standard output: add it to the
target's seeds together with its fix.
"""

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INPUT_BYTES_MAX = 8192


class Target(NamedTuple):
    """One parser."""

    run: Callable[[bytes], None]
    seeds: list[bytes]
    packages: list[str]


def table() -> dict[str, Target]:
    """The targets of all modules, by name."""
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    found: dict[str, Target] = {}
    for path in sorted(HERE.glob("*_parsers.py")):
        if path.stem.startswith("test_"):
            continue
        module = importlib.import_module(path.stem)
        for name, run in module.TARGETS.items():
            assert name not in found, f"two targets have the name {name}"
            found[name] = Target(run, module.SEEDS[name], getattr(module, "PACKAGES", ["fastrt"]))
    return found


def fuzz_here(name: str, seconds: str) -> None:
    """Fuzz one target; libFuzzer ends this process."""
    import atheris

    target = table()[name]
    logging.disable()
    with atheris.instrument_imports(include=target.packages):
        for seed in target.seeds:
            target.run(seed)
    folder = ROOT / "build" / "fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=20", "-rss_limit_mb=2048"]
    found = f"-artifact_prefix={folder.parent}/{name}-"
    atheris.Setup([sys.argv[0], *limits, found, "-print_final_stats=1", str(folder)], target.run)
    atheris.Fuzz()


def main() -> int:
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(*sys.argv[2:])
        return 0
    if importlib.util.find_spec("atheris") is None:
        sys.stdout.write("parsers: nothing was fuzzed: atheris is not installed (extra `fuzz`)\n")
        return 0
    seconds, *names = sys.argv[1:]
    failed = []
    for name in names or table():
        command = [sys.executable, __file__, "--here", name, seconds]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        lines = done.stdout.splitlines()
        runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
        sys.stdout.write(f"{name}: {runs} inputs, {'no failure' if done.returncode == 0 else 'FAILED'}\n")
        if done.returncode:
            failed.append(name)
            sys.stdout.write("\n".join(lines[-40:]) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
