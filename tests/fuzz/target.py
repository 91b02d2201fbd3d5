"""The process that fuzz.py starts: libFuzzer, by way of atheris, around `damage.Scene.run`.

python target.py CORPUS_FOLDER [libFuzzer options]
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
import atheris  # noqa: E402  (its libFuzzer must be visible to all)
import damage  # noqa: E402


def connect() -> None:
    """Give libFuzzer the counters of the core's build."""
    library = next(path for path in os.environ["LD_PRELOAD"].split() if path.endswith("coverage.so"))
    coverage = ctypes.CDLL(library)
    (path,) = Path(atheris.__file__).parent.glob("core_with_libfuzzer*.so")
    fuzzer = ctypes.CDLL(str(path))  # loaded already: this is the same one
    for function in (coverage.frt_coverage_counters, coverage.frt_coverage_end):
        function.restype = ctypes.c_void_p
    sizes = [ctypes.cast(getattr(fuzzer, f"__sanitizer_cov_trace_cmp{n}"), ctypes.c_void_p) for n in (1, 2, 4, 8)]
    coverage.frt_coverage_start(*sizes)
    start = ctypes.c_void_p(coverage.frt_coverage_counters())
    fuzzer.__sanitizer_cov_8bit_counters_init(start, ctypes.c_void_p(coverage.frt_coverage_end()))


def main() -> None:
    scene = damage.Scene()
    Path(tempfile.gettempdir(), "segment").write_text(str(scene.path))  # for fuzz.py, which removes it
    atheris.Setup(sys.argv, scene.run)
    connect()
    atheris.Fuzz()


if __name__ == "__main__":
    main()
