"""Coverage-guided fuzzing of all that the core reads from the segment, on a build with AddressSanitizer and UBSan.

    python tests/fuzz/fuzz.py 20              seconds; what `make check` runs
    python tests/fuzz/fuzz.py 600 --keep      and take new inputs that reach more into corpus.txt

It needs gcc, and a checkout: an sdist has no .c files. libFuzzer comes with atheris (extra `fuzz`), which has wheels
for some Pythons only; without it nothing is fuzzed, and this says so. An input that ends the process is written to
standard output in hex: add it to corpus.txt together with its fix.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.txt"
KEPT_MOST = 600
INPUT_BYTES_MAX = 3 + 12 * 16
LINE = re.compile(r"#(\d+)\s+\w+.*?ft: (\d+) corp: (\d+)")
sys.path.insert(0, str(HERE.parent / "crash"))

import sanitizers  # noqa: E402
import variant  # noqa: E402


def corpus() -> list[bytes]:
    """The inputs that are kept: hex, one a line, with comments."""
    lines = [line.split("#")[0].strip() for line in CORPUS.read_text().splitlines()]
    return [bytes.fromhex(line) for line in lines if line]


def compile_coverage(home: Path) -> Path:
    """Make the library that connects gcc's coverage with libFuzzer."""
    made = home / "coverage.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(made), str(HERE / "coverage.c")]
    subprocess.run(command, check=True)
    return made


def environment(reports: Path) -> dict[str, str]:
    """For the process that fuzzes."""
    environ = sanitizers.environment("fuzzer", reports)
    coverage = compile_coverage(variant.ROOT / "build" / "fuzzer")
    environ["LD_PRELOAD"] = f"{coverage} {environ['LD_PRELOAD']}"
    environ["ASAN_OPTIONS"] += ":verify_asan_link_order=0:allocator_may_return_null=1"
    environ["PYTHONPATH"] += os.pathsep + os.path.dirname(os.path.dirname(find_atheris()))
    return environ


def find_atheris() -> str:
    spec = importlib.util.find_spec("atheris")
    return spec.origin or "" if spec is not None else ""


def keep(folder: Path) -> None:
    """Add the inputs of a folder to corpus.txt, the smallest first: each reached something new when it was found."""
    inputs = sorted({path.read_bytes() for path in folder.iterdir()} - set(corpus()))
    inputs.sort(key=len)
    with CORPUS.open("a") as file:
        for data in inputs[: KEPT_MOST - len(corpus())]:
            file.write(data.hex() + "\n")


def fuzz(seconds: int, keeping: bool, options: list[str]) -> int:
    """Run libFuzzer; its exit code. What it reached first and last is printed."""
    with tempfile.TemporaryDirectory(prefix="frt-fuzz-run-") as name:
        folder = Path(name)
        for part in ("corpus", "found"):
            (folder / part).mkdir()
        for number, data in enumerate(corpus()):
            (folder / "corpus" / f"{number:04}").write_bytes(data)
        environ = {**environment(folder / "report"), "TMPDIR": name}  # for the scene's spill files
        target = [sys.executable, str(HERE / "target.py")]
        limits = [f"-max_len={INPUT_BYTES_MAX}", "-len_control=0", "-timeout=20", "-rss_limit_mb=4096"]
        command = [*target, str(folder / "corpus"), *limits, f"-max_total_time={seconds}",
                   f"-artifact_prefix={folder}/found/", "-print_final_stats=1", *options]  # fmt: skip
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        seen: list[tuple[str, ...]] = []
        tail: list[str] = []
        for line in process.stdout:
            match = LINE.match(line)
            seen += [match.groups()] if match else []
            tail = [*tail[-200:], line]
        code = process.wait()
        # libFuzzer ends its process at once, with the segment still there; a damaged one looks as if it were in use.
        for left in folder.glob("segment"):
            Path(left.read_text()).unlink(missing_ok=True)
        for found in sorted((folder / "found").iterdir()):
            sys.stdout.write(f"an input that ends it: {found.name}\n{found.read_bytes().hex()}\n")
        if code:
            sys.stdout.write("".join(tail))
            for report in sorted(folder.glob("report*")):
                sys.stdout.write(report.read_text(errors="replace"))
        elif keeping:
            keep(folder / "corpus")
        if seen:
            first, last = seen[0], seen[-1]
            sys.stdout.write(
                f"fuzz: {last[0]} inputs tried; branches with their counts reached {first[1]} -> {last[1]}; "
                f"corpus {len(corpus())} -> {last[2]} inputs\n"
            )
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=int)
    parser.add_argument("--keep", action="store_true")
    options, rest = parser.parse_known_args()
    if not find_atheris():
        sys.stdout.write("fuzz: nothing was fuzzed: atheris is not installed (extra `fuzz`; wheels for 3.11 to 3.13)\n")
        return 0
    return fuzz(options.seconds, options.keep, rest)


if __name__ == "__main__":
    sys.exit(main())
