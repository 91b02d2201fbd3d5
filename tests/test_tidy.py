"""The rules of the tree, held by a test: who may import whom, sizes, documentation, and words that must not appear.

Each check takes files as {path: text} and returns complaints, so that a bad example proves it can fail.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES, FUNCTION_LINES, LINE_CHARS = 600, 70, 120
# Longer files, and why a split by length would tear apart what belongs together. They do not grow.
LONGER = {
    "src/fastrt/_core/include/layout.h": 643,  # all records of the arena
    "src/fastrt/_core/objects/handles.pyx": 646,  # the handle and all ways to give it up: one class
    "src/fastrt/_core/memory/segment.pyx": 602,  # create, attach and every check of a segment
    "src/fastrt/_core/refcounts/refcount.pyx": 664,  # the table of references: one class
    "src/fastrt/_core/tasks/actors.pyx": 635,  # the table of actors: all moves of one state machine
    "src/fastrt/config.py": 808,  # all settings, and the measurements of the machine that their defaults need
    "src/fastrt/store/client.py": 665,  # the store's public face
    "src/fastrt/store/messages.py": 780,  # one record for each message
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
Files = dict[str, str]
Complaints = Iterator[str]

# Left may import right; names joined by | never import each other.
LAYERS = (
    "ray > cli|joblib|dask|actor > dashboard > util|launch > runtime > observe > cluster > "
    "worker|node|ps|engines|objstore "
    "> tasks|transfer|collective > scheduler|coordination|membership > store|net|durable > config "
    "> _core|devices|exceptions|folders|foreign_text|ids|transitions|versions > "
    "ray_exceptions > errors|lazy|shortage > error_chains"
)
# The same inside of the core, whose sub-packages are these.
CORE_LAYERS = "repair > tasks > objects|collective|tables|refcounts|transfer > memory"
RANK, CORE_RANK = (
    {name: -i for i, names in enumerate(layers.split(" > ")) for name in names.split("|")}
    for layers in (LAYERS, CORE_LAYERS)
)
TOP = {"", "bench", "testing", "__main__"}  # `import fastrt` itself, and what stands above everything
STATE_MAY_IMPORT = ("fastrt.errors", "fastrt.foreign_text", "fastrt.transitions", "fastrt._core.refcounts.")


@functools.cache
def tree() -> Files:
    folders = ("src", "tests", "bench", "examples", "docs", ".ci")
    paths = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".pyi", ".pyx", ".pxd", ".h")]
    paths += [ROOT / "setup.py", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


@functools.cache
def modules() -> set[str]:
    return {module_of(path) for path in tree() if is_core(path)}


def is_core(path: str) -> bool:
    return path.startswith("src/fastrt/")


def module_of(path: str) -> str:
    return path.removeprefix("src/").rsplit(".", 1)[0].removesuffix("/__init__").replace("/", ".")


def part_of(module: str) -> str:
    """The layer's name: 'store' for fastrt.store.ref, '' for fastrt itself."""
    return [*module.split("."), ""][1]


@functools.cache  # for three checks
def imports_of(path: str, text: str) -> frozenset[str]:
    """Every module of fastrt that a file imports, also inside functions; not those for type checkers only."""
    return read_python(path, text)[0] if path.endswith((".py", ".pyi")) else frozenset(imported_by_cython(path, text))


@functools.cache  # a tree is not kept: collections would walk over all of them
def read_python(path: str, text: str) -> tuple[frozenset[str], tuple[tuple[str, int, int], ...]]:
    """Imports and functions of a file, which is parsed once for both."""
    module = ast.parse(text, path)
    found = list(statements(module))
    functions = (node for node in found if isinstance(node, FUNCTIONS))
    sizes = ((node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1) for node in functions)
    return frozenset(imported_by(path, module)), tuple(sizes)


def statements(node: ast.AST, for_checkers: bool = True) -> Iterator[ast.AST]:
    """All statements below a node, at any depth. Expressions hold none, and are nine tenths of the nodes.

    Args:
        node: a module.
        for_checkers: also the statements that only type checkers read.
    """
    todo = [node]
    while todo:
        node = todo.pop()
        yield node
        bodies = [vars(node).get(name, ()) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
        if not for_checkers and isinstance(node, ast.If) and "TYPE_CHECKING" in names_in(node.test):
            bodies = [node.orelse]
        for body in bodies:
            todo += body


def names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def imported_by_cython(path: str, text: str) -> Iterator[str]:
    if path.endswith((".pyx", ".pxd")):
        package = module_of(path).rpartition(".")[0]
        for match in re.finditer(r"^\s*from\s+([\w.]+)\s+c?import\s+(\([^)]*\)|[^#\n]+)", text, re.M):
            base = package + match[1] if match[1].startswith(".") else match[1]
            yield from names_below(base.rstrip("."), re.findall(r"(\w+)(?:\s+as\s+\w+)?", match[2]))
        for match in re.finditer(r"^\s*c?import\s+([\w., ]+)", text, re.M):
            yield from (name.split(" as ")[0].strip() for name in match[1].split(","))
        yield from (f"{package}.{name}" for name in re.findall(r"^\s*include\s+[\"'](\w+)\.px", text, re.M))


def imported_by(path: str, module: ast.AST) -> Iterator[str]:
    for node in statements(module, for_checkers=False):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = [*module_of(path).split("."), ""] if path.endswith("__init__.py") else module_of(path).split(".")
            base = ".".join([*folder[: -node.level], *filter(None, [node.module])]) if node.level else node.module or ""
            yield from names_below(base, [alias.name for alias in node.names])


def names_below(base: str, names: list[str]) -> list[str]:
    """`from fastrt import config` imports fastrt.config; `from fastrt.config import Config` imports fastrt.config."""
    return [f"{base}.{name}" if f"{base}.{name}" in modules() or base == "fastrt" else base for name in names]


def check_layers(files: Files) -> Complaints:
    for path, text in files.items():
        mine = part_of(module_of(path))
        if not is_core(path) or mine in TOP:
            continue
        if mine not in RANK:
            yield f"{path}: {mine!r} has no layer; the layers are {LAYERS}"
            continue
        for name in sorted(imports_of(path, text)):
            other = part_of(name) if name.split(".")[0] == "fastrt" else mine
            if other in TOP and mine == "cli":
                continue  # commands are programs that use the public names, as a user's are
            if other != mine and (other in TOP or RANK.get(other, 1) >= RANK[mine]):
                yield f"{path}: imports {name}, but {mine} may only import what is right of it in: {LAYERS}"


def check_core_layers(files: Files) -> Complaints:
    for path, text in files.items():
        module = module_of(path)
        if not is_core(path) or part_of(module) != "_core" or path.endswith((".h", "/_core/__init__.py")):
            continue
        mine = module.split(".")[2]
        if mine not in CORE_RANK:
            yield f"{path}: {mine!r} has no layer in the core; the layers are {CORE_LAYERS}"
            continue
        for name in sorted(imports_of(path, text)):
            other = name.split(".")[2] if name.startswith("fastrt._core.") else mine
            if other != mine and CORE_RANK.get(other, 1) >= CORE_RANK[mine]:
                yield f"{path}: imports {name}, but {mine} may only import what is right of it in: {CORE_LAYERS}"


def check_no_circles(files: Files) -> Complaints:
    """Inside a layer too; an import inside a function counts, one for type checkers only does not."""
    code = {module_of(path): imports_of(path, text) for path, text in files.items() if path.endswith(".py")}
    try:
        TopologicalSorter({name: imported & code.keys() for name, imported in code.items()}).prepare()
    except CycleError as e:
        yield "these import each other in a circle: " + " > ".join(e.args[1])


def check_states_are_pure(files: Files) -> Complaints:
    """A state.py may be split: the modules beside it that it imports are held to the same."""
    for path in files:
        if is_core(path) and path.endswith("/state.py"):
            folder = path.rpartition("/")[0]
            package = folder.removeprefix("src/").replace("/", ".")
            pending, seen = [path], {path}
            while pending:
                part = pending.pop()
                for name in imports_of(part, files[part]):
                    words = name.removeprefix(package + ".").split(".")
                    beside = f"{folder}/{words[0]}.py"
                    if name.startswith(package + ".") and beside in files:
                        pending += {beside} - seen
                        seen.add(beside)
                    elif name.startswith("fastrt") and name != package and not name.startswith(STATE_MAY_IMPORT):
                        yield f"{part}: imports {name}; a state machine imports only {STATE_MAY_IMPORT}"


def functions_of(path: str, text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and count of lines of each function; Cython's by their indentation."""
    if path.endswith(".py"):
        yield from read_python(path, text)[1]
        return
    lines = text.splitlines()
    for i, line in enumerate(lines):
        match = re.match(r"(\s*)(?:def|cpdef|cdef(?!\s+(?:extern|class|struct|enum)\b))\b[^=]*?(\w+)\s*\(", line)
        if not match:
            continue
        body = i + 1
        while body < len(lines) and not lines[body - 1].split("#")[0].rstrip().endswith(":"):
            body += 1
        end = body
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(match[1] + " ")):
            end += 1
        while end > i and not lines[end - 1].strip():
            end -= 1
        yield match[2], i + 1, end - i


def check_sizes(files: Files) -> Complaints:
    for path, text in files.items():
        if path.endswith(".md"):
            continue
        lines = text.splitlines()
        most = LONGER.get(path, FILE_LINES)
        if len(lines) > most:
            yield f"{path}: {len(lines)} lines; at most {most}"
        yield from (f"{path}:{i}: line longer than {LINE_CHARS}" for i, s in enumerate(lines, 1) if len(s) > LINE_CHARS)
        if path.endswith((".py", ".pyx")):
            for name, line, count in functions_of(path, text):
                if count > FUNCTION_LINES:
                    yield f"{path}:{line}: {name} has {count} lines; at most {FUNCTION_LINES}"


def check_headers_hold_no_state(files: Files) -> Complaints:
    for path, text in files.items():
        # In failpoint.h each extension's own copy is what is wanted: its own list of points, in test builds only.
        if path.endswith(".h") and not path.endswith("/failpoint.h"):
            for i, line in enumerate(text.splitlines(), 1):
                if re.match(r"\s*(?:_Thread_local\s+|__thread\s+)?static\b(?!.*\b(?:inline|const)\b)", line):
                    yield f"{path}:{i}: each extension would get its own copy of this; keep it in the segment"


def check_compiled_modules_are_described(files: Files) -> Complaints:
    for path in files:
        if path.endswith(".pyx"):
            yield from (f"{path}: has no {end}" for end in (".pxd", ".pyi") if path[:-4] + end not in files)


def check_every_module_is_used(files: Files) -> Complaints:
    used = {name for path, text in files.items() if not path.endswith((".md", ".h")) for name in imports_of(path, text)}
    used |= {name for text in files.values() for name in re.findall(r"[\"' ](fastrt(?:\.\w+)+)[\"':]", text)}
    for path in files:
        name = module_of(path)
        code = path.endswith((".py", ".pyx")) and not path.endswith(("__init__.py", "__main__.py"))
        # By the console script; by programs that import ray.
        elsewhere = {"fastrt.cli.main", "fastrt.ray.path.ray", "fastrt.ray._raylet", "fastrt.ray.data"}
        if is_core(path) and code and name not in used | elsewhere:
            yield f"{path}: nobody imports {name}"


def check_public_docstrings(files: Files) -> Complaints:
    for path, text in files.items():
        if not is_core(path) or not path.endswith(".py"):
            continue
        module = ast.parse(text, path)
        if text.strip() and not ast.get_docstring(module):
            yield f"{path}: does not open with its idea"
        owners: list[ast.Module | ast.ClassDef] = [module]
        owners += [node for node in module.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in (node for owner in owners for node in owner.body):
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                doc = ast.get_docstring(node) or ""
                overload = any("overload" in ast.unparse(d) or "setter" in ast.unparse(d) for d in node.decorator_list)
                if not doc and not overload:
                    yield f"{path}:{node.lineno}: {node.name} is public and has no docstring"
                elif not isinstance(node, ast.ClassDef) and raises_itself(node) and "Raises:" not in doc:
                    yield f"{path}:{node.lineno}: {node.name} raises, and its docstring has no 'Raises:'"


def raises_itself(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function's own statements raise something new; a bare `raise` passes on what came."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return False


# What must not appear, where it is looked for, and what to do instead. [x] keeps a pattern from matching itself.
SAYS = r"^src/fastrt/(?!cli/)"
BANNED = [
    (r"\b(?:FIXM[E]|TOD[O]|XX[X])\b", r"", "open an issue, or do it"),
    (r"(?<![\w.])print\(", SAYS + r".*\.(?:py|pyx)$", "raise, log or return it"),
    (r"\bexcept\s*:", r"\.(?:py|pyx)$", "name what is expected"),
    (r"\btime\.(?:time|monotonic)\(|\bdatetime\.", r"/state\.py$", "a state machine gets `now` in its events"),
    (r"(?<!\w)slee[p]\(", r"^tests/.*\.py$", "wait for a state: the fixture wait_until"),
    (r"mark\.(?:skip|xfail)(?!if)\b(?!\(.*reason)", r"^tests/.*\.py$", "say the reason"),
    (r"\bjson\.loads?\b|\bfrom json import", r"^src/fastrt/(?!foreign_text\.py)", "fastrt.foreign_text has bounds"),
    (r"\bpickl[e]\b.*\bimport|\bimport\s+pickl[e]", r"^src/fastrt/_core/", "the core knows no pickle"),
]


def check_banned_words(files: Files) -> Complaints:
    for path, text in files.items():
        for pattern, where, instead in BANNED:
            if re.search(where, path) and not path.endswith("test_tidy.py") and re.search(pattern, text, re.M):
                for i, line in enumerate(text.splitlines(), 1):
                    if re.search(pattern, line):
                        yield f"{path}:{i}: {line.strip()!r}: {instead}"


def check_commands_are_tested(files: Files) -> Complaints:
    """Each fenced python or console block of the pages appears, by its first line, in tests/test_docs.py."""
    tested = files.get("tests/test_docs.py", "")
    for path, text in files.items():
        if path == "README.md" or path.startswith("docs/"):
            for block in re.findall(r"^```(?:python|console)\n(.*?)^```", text, re.M | re.S):
                first = block.strip().splitlines()[0].removeprefix("$ ")
                if first not in tested and f'"{path}"' not in tested:
                    yield f"{path}: nothing in tests/test_docs.py runs the block that begins with {first!r}"


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tree_keeps_the_rule(check: Callable[[Files], Complaints]) -> None:
    complaints = list(check(tree()))
    assert not complaints, "\n" + "\n".join(complaints)


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
BAD = [
    (check_layers, {"src/fastrt/store/a.py": "from fastrt.tasks import submit"}),
    (check_layers, {"src/fastrt/store/a.py": "def f():\n    from fastrt import config, node"}),
    (check_layers, {"src/fastrt/worker/a.py": "import fastrt.node.daemon"}),
    (check_layers, {"src/fastrt/worker/a.py": "from ..node import daemon"}),
    (check_layers, {"src/fastrt/store/a.py": "import fastrt"}),
    (check_layers, {"src/fastrt/_core/memory/a.pyx": "from fastrt.config import Config"}),
    (check_layers, {"src/fastrt/_core/memory/a.pxd": "from fastrt.store.ref cimport Ref"}),
    (check_layers, {"src/fastrt/misc/a.py": ""}),
    (check_core_layers, {"src/fastrt/_core/objects/a.pyx": "from fastrt._core.tasks.records cimport task_done"}),
    (check_core_layers, {"src/fastrt/_core/memory/a.pxd": "from fastrt._core.objects.handles cimport (\n    Ref,\n)"}),
    (check_core_layers, {"src/fastrt/_core/tables/a.pyi": "from fastrt._core.collective.groups import GroupMemory"}),
    (check_core_layers, {"src/fastrt/_core/a.pyx": ""}),
    (
        check_no_circles,
        {
            "src/fastrt/store/a.py": "import fastrt.store.b",
            "src/fastrt/store/b.py": "def f():\n    import fastrt.store.a",
        },
    ),
    (check_states_are_pure, {"src/fastrt/scheduler/state.py": "from fastrt.config import Config"}),
    (
        check_states_are_pure,
        {
            "src/fastrt/scheduler/state.py": "from fastrt.scheduler.parts import Part",
            "src/fastrt/scheduler/parts.py": "from fastrt.config import Config",
        },
    ),
    (check_sizes, {"src/fastrt/a.py": "x = 1\n" * (FILE_LINES + 1)}),
    (check_sizes, {"src/fastrt/a.py": "x = '" + "x" * LINE_CHARS + "'"}),
    (check_sizes, {"src/fastrt/a.py": LONG}),
    (
        check_sizes,
        {"src/fastrt/_core/memory/a.pyx": LONG.replace("def f():", "cdef int f(\n        int a) except -1:")},
    ),
    (check_headers_hold_no_state, {"src/fastrt/_core/include/a.h": "static int armed = 0;"}),
    (check_headers_hold_no_state, {"src/fastrt/_core/include/a.h": "static _Thread_local int depth;"}),
    (check_compiled_modules_are_described, {"src/fastrt/_core/memory/a.pyx": "", "src/fastrt/_core/memory/a.pxd": ""}),
    (check_every_module_is_used, {"src/fastrt/store/a.py": "import os", "tests/test_a.py": "import os"}),
    (check_public_docstrings, {"src/fastrt/a.py": "x = 1"}),
    (check_public_docstrings, {"src/fastrt/a.py": '"""A."""\ndef f():\n    return 1'}),
    (check_public_docstrings, {"src/fastrt/a.py": '"""A."""\ndef f():\n    """F."""\n    raise ValueError("x")'}),
    (check_banned_words, {"src/fastrt/a.py": "# TOD" + "O: later"}),
    (check_banned_words, {"src/fastrt/store/a.py": "print(1)"}),
    (check_banned_words, {"bench/a.py": "try:\n    pass\nexcept:\n    pass"}),
    (check_banned_words, {"src/fastrt/membership/state.py": "now = time.time()"}),
    (check_banned_words, {"tests/test_a.py": "time.sleep" + "(1)"}),
    (check_banned_words, {"tests/test_a.py": "@pytest.mark.skip" + "()"}),
    (check_banned_words, {"src/fastrt/_core/memory/a.pyx": "import pickle"}),
    (check_banned_words, {"src/fastrt/ps/a.py": "found = json.loads(text)"}),
    (check_banned_words, {"src/fastrt/ps/a.py": "from json import load"}),
    (check_commands_are_tested, {"README.md": "```console\n$ fastrt fly\n```\n", "tests/test_docs.py": ""}),
]
GOOD = {
    "src/fastrt/store/a.py": '"""A."""\nfrom fastrt.errors import FastrtError\nfrom fastrt.config import Config\n',
    "src/fastrt/store/b.py": '"""B."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fastrt.node\n'
    "from . import a\n",
    "tests/test_b.py": "from fastrt.store import a\nimport fastrt.store.b\nimport fastrt.store.a\n",
    "src/fastrt/_core/include/a.h": "static inline int f(void) { return 1; }\nstatic const int K = 2;\n",
}


@pytest.mark.parametrize(("check", "files"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_bad_example_is_noticed(check: Callable[[Files], Complaints], files: Files) -> None:
    assert len(list(check(files))) == 1


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_example_passes(check: Callable[[Files], Complaints]) -> None:
    assert not list(check(GOOD))


def test_every_check_has_a_bad_example() -> None:
    assert {check for check, _ in BAD} == set(CHECKS)
