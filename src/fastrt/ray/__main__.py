"""`python -m fastrt.ray program.py ...`: run a program that says `import ray` on fastrt, unmodified.

`python -m fastrt.ray -m module ...` runs a module, as `python -m module` does.
"""

import os
import runpy
import sys

from fastrt.ray import alias

_USAGE = "usage: python -m fastrt.ray PROGRAM.py [ARGUMENTS]\n       python -m fastrt.ray -m MODULE [ARGUMENTS]\n"


def main() -> None:
    """Run the program that the command line names."""
    words = sys.argv[1:]
    by_name = words[:1] == ["-m"]
    words = words[1:] if by_name else words
    if not words or words[0].startswith("-"):
        sys.stderr.write(_USAGE)
        sys.exit(2)
    sys.argv = words
    sys.path[0] = os.getcwd() if by_name else os.path.dirname(os.path.abspath(words[0]))
    alias.install()
    if by_name:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
