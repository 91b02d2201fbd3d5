"""`python -m fastrt.ray program.py ...`: run a program that says `import ray` on fastrt, unmodified.

`python -m fastrt.ray -m module ...` runs a module, and `python -m fastrt.ray -c code ...` code, as `python` does.
"""

import os
import runpy
import sys
from types import ModuleType

from fastrt.ray import alias

_USAGE = """usage: python -m fastrt.ray PROGRAM.py [ARGUMENTS]
       python -m fastrt.ray -m MODULE [ARGUMENTS]
       python -m fastrt.ray -c CODE [ARGUMENTS]
"""


def main() -> None:
    """Run the program that the command line names."""
    words = sys.argv[1:]
    option = words.pop(0) if words[:1] in (["-m"], ["-c"]) else ""
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return
    if not words or (words[0].startswith("-") and option != "-c"):
        sys.stderr.write(_USAGE)
        sys.exit(2)
    if not option and not os.path.exists(words[0]):
        sys.stderr.write(f"python -m fastrt.ray: there is no file {words[0]!r}\n{_USAGE}")
        sys.exit(2)
    sys.argv = ["-c", *words[1:]] if option == "-c" else words
    sys.path[0] = os.getcwd() if option else os.path.dirname(os.path.abspath(words[0]))
    alias.install()
    if option == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif option:
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), module.__dict__)  # noqa: S102 (the user asks for it)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
