"""The reference pages, written from the code: public names, commands, settings, errors and protocols.

Nothing here repeats a fact of the code. A public name without a place in `GROUPS`, or a setting without a description,
ends the build.
"""

import enum
import importlib
import inspect
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import fastrt
from fastrt.cli.main import main as command_group
from fastrt.config import Config, origins
from fastrt.errors import ConfigError, FastrtError

PROTOS = Path(__file__).resolve().parents[2] / "protos"
# The names of `fastrt` itself, in the order in which a reader needs them. Errors have a page of their own.
GROUPS = {
    "Start and end": "init shutdown is_initialized Runtime",
    "Tasks": "remote RemoteFunction cancel",
    "Values": "ObjectRef put get wait as_completed empty ObjectRefGenerator",
    "Actors": "ActorClass ActorHandle method get_actor list_named_actors kill exit_actor",
    "Resources and nodes": "nodes cluster_resources available_resources waiting_demand NodeAffinity",
    "Placement groups": "placement_group PlacementGroup PlacementGroupSchedulingStrategy get_placement_group "
    "get_current_placement_group placement_group_table remove_placement_group",
    "Where code runs": "runtime_context RuntimeContext get_gpu_ids get_runtime_context",
    "Executor": "Executor",
    "Observing": "progress timeline report list_tasks list_actors list_objects list_workers",
}
# Other public modules, and what they are for.
MODULES = {
    "fastrt.util": "executor, pools and queues",
    "fastrt.util.metrics": "metrics of programs",
    "fastrt.util.multiprocessing": "multiprocessing.Pool under Ray's path",
    "fastrt.util.scheduling_strategies": "scheduling strategies under Ray's names",
    "fastrt.util.state": "lists of tasks and actors under Ray's path",
    "fastrt.collective": "collective operations",
    "fastrt.ps": "parameter servers",
    "fastrt.ps.cluster": "the membership of parameter servers",
    "fastrt.coordination": "the coordinator for JAX, and agents",
    "fastrt.scheduler": "the scheduler for other languages",
    "fastrt.durable": "records on disk",
    "fastrt.joblib": "the backend for joblib",
    "fastrt.dask": "the scheduler for Dask",
    "fastrt.config": "the settings as an object",
    "fastrt.testing": "failpoints for tests of crash safety",
}
# Modules without `__all__`: their public names.
NAMES = {
    "fastrt.joblib": ["register", "FastrtBackend"],
    "fastrt.dask": ["get"],
    "fastrt.config": ["Config", "Origin", "origins", "parse_bytes"],
    "fastrt.testing": ["Failpoints"],
}
# Methods that only fastrt's own modules call.
INTERNAL = {
    "AsyncAgent.fail",
    "AsyncAgent.register",
    "Executor.batch_ended",
    "Executor.drop_queued",
    "Executor.finished",
    "Executor.raised",
    "Executor.wait_idle",
    "Group.later",
    "Group.perform",
    "ObjectRefGenerator.waited_for",
    "PlacementGroup.inside",
}
CALLED_BY_OTHERS = {"FastrtBackend"}  # joblib's backend: programs name it only
INTERNAL_NAMES = {"forget", "to_json"}
# Comment, name, and for request and reply whether it is a stream, and its type.
_CALL = re.compile(
    r"((?:^\s*//.*\n)*)^\s*rpc (\w+)\s*\(\s*(stream )?([\w.]+)\s*\)\s*returns\s*\(\s*(stream )?([\w.]+)", re.M
)
_STREAM = {True: "stream of ", False: ""}


class MissingError(Exception):
    """A public name, setting or file has no place in the reference."""


def write_reference(folder: Path) -> list[tuple[str, str, str]]:
    """Write all pages of the reference.

    Args:
        folder: where Sphinx will read them; they go below `reference`.
    Returns:
        Name of the file, title and one line about each page.
    """
    seen: dict[int, str] = {}
    pages = [("fastrt", "fastrt", "tasks, values, actors: the names that most programs need", main_page(seen))]
    for name, about in MODULES.items():
        pages.append((name, name, about, module_page(name, seen)))
    pages += [
        ("errors", "Errors", "every error, its built-in base, and what to do", errors_page()),
        ("settings", "Settings", "every setting, its variable, default and allowed values", settings_page()),
        ("commands", "Commands", "every command of `fastrt` and its options", commands_page()),
        ("protocols", "Protocols", "the services on the wire, and their .proto files", protocols_page()),
    ]
    (folder / "reference").mkdir(parents=True, exist_ok=True)
    for name, _, _, text in pages:
        (folder / "reference" / f"{name}.rst").write_text(text)
    return [(f"reference/{name}.rst", title, about) for name, title, about, _ in pages]


def public_names() -> dict[str, str]:
    """Map what a docstring may call a public name, with and without its module, to the documented name."""
    names: dict[str, str] = {}
    for module in MODULES:
        short = {name: f"{module}.{name}" for name in NAMES.get(module) or importlib.import_module(module).__all__}
        names |= {full: full for full in short.values()}
    for names_of_group in GROUPS.values():
        for name in names_of_group.split():
            names[name] = names[f"fastrt.{name}"] = f"fastrt.{name}"
    for kind in errors():
        names[kind.__name__] = names[public_name(kind)] = public_name(kind)
    return names


def main_page(seen: dict[int, str]) -> str:
    """Document the names of `fastrt`, by group."""
    grouped = [name for names in GROUPS.values() for name in names.split()]
    public = [name for name in fastrt.__all__ if not _is_error(getattr(fastrt, name)) and not _is_module(name)]
    if sorted(grouped) != sorted(public):
        raise MissingError(f"names in GROUPS and in fastrt.__all__ differ: {set(grouped) ^ set(public)}")
    lines = [*_title("fastrt"), "Everything below is a name of ``fastrt`` itself: ``import fastrt``.", ""]
    for group, names in GROUPS.items():
        lines += _title(group, "-")
        for name in names.split():
            lines += _entry("fastrt", name, getattr(fastrt, name), seen)
    return "\n".join(lines)


def module_page(module: str, seen: dict[int, str]) -> str:
    """Document a public module: its docstring and its names, without its errors."""
    loaded = importlib.import_module(module)
    names = NAMES.get(module) or loaded.__all__
    lines = [*_title(module), f".. automodule:: {module}", "   :no-members:", ""]
    errors = []
    for name in names:
        thing = getattr(loaded, name)
        if _is_error(thing):
            errors.append(f":py:obj:`{name} <{public_name(thing)}>`")
        else:
            lines += _entry(module, name, thing, seen)
    if errors:
        lines += [*_title("Errors", "-"), ", ".join(errors) + ": see :doc:`errors`.", ""]
    return "\n".join(lines)


def errors() -> list[type[BaseException]]:
    """Every error of fastrt that a program can meet, those of `fastrt` first, then by name."""
    for module in MODULES:
        importlib.import_module(module)
    found: list[type[BaseException]] = []
    pending: list[type[BaseException]] = [FastrtError]
    while pending:
        kind = pending.pop()
        # Classes that are made at run time, of TaskError and a task's own exception, have no place.
        if kind not in found and getattr(inspect.getmodule(kind), kind.__name__, None) is kind:
            found.append(kind)
        pending += kind.__subclasses__()
    public = [kind for kind in [*found, fastrt.PerformanceWarning] if not kind.__name__.startswith("_")]
    return sorted(public, key=lambda kind: (public_name(kind).count("."), public_name(kind)))


def public_name(kind: type[BaseException]) -> str:
    """The name by which a program imports an error: from the outermost public module that has it."""
    for module in ("fastrt", "fastrt.exceptions", *MODULES):
        if getattr(importlib.import_module(module), kind.__name__, None) is kind:
            return f"{module}.{kind.__name__}"
    return f"{kind.__module__}.{kind.__name__}"


def errors_page() -> str:
    """List all errors in a table, then document each; then the names that Ray gives them."""
    lines = _title("Errors")
    lines += ["``except fastrt.FastrtError`` catches all of them, and ``except`` with the built-in class in the second"]
    lines += ["column the error beside it. The message says what happened, to what, and what to do.", ""]
    rows, entries = [], []
    for kind in errors():
        name = public_name(kind)
        base = next((b.__name__ for b in kind.__mro__[1:] if b.__module__ == "builtins"), "")
        base = base if base != "Exception" else ""
        sentence = re.split(r"(?<=\.)\s", " ".join((kind.__doc__ or "").split()))[0]
        rows.append([f":py:obj:`{name.removeprefix('fastrt.')} <{name}>`", _code(base), sentence])
        entries += [f".. autoexception:: {name}", "   :show-inheritance:", "   :no-members:", ""]
    lines += _table(["error", "also a", "when"], rows, [25, 20, 55])
    lines += [*_title("Details", "-"), *entries, *_title("Ray's names", "-")]
    lines += ["``fastrt.exceptions`` has Ray's names of these errors.", ""]
    aliases = importlib.import_module("fastrt.exceptions")
    rows = []
    for name in aliases.__all__:
        kind = getattr(aliases, name)
        if kind.__name__ != name:
            rows.append([_code(name), f":py:obj:`{kind.__name__} <{public_name(kind)}>`"])
    return "\n".join([*lines, *_table(["in Ray", "in fastrt"], rows, [50, 50])])


def settings() -> list[tuple[str, str, str, str, str]]:
    """Name, variable, default, allowed values and meaning of each setting.

    Raises:
        MissingError: a setting has no description in the docstring of Config.
    """
    meanings = _attributes(Config)
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("FASTRT_")}
    try:
        found = []
        for origin in origins():
            if origin.name not in meanings:
                raise MissingError(f"Config has no description of {origin.name}")
            meaning = meanings[origin.name]
            try:
                Config.load(**{origin.name: -1})
                raise MissingError(f"{origin.name} accepts -1")
            except ConfigError as exc:
                allowed = str(exc).partition(": ")[2].removeprefix("must be ")
            # The default of those that describe it depends on the machine.
            value = {True: "on", False: "off"}[origin.value] if isinstance(origin.value, bool) else origin.value
            default = "" if "default" in meaning else str(value)
            if origin.name.endswith(("_memory", "_bytes")):
                default, allowed = _sizes_in_words(default), _sizes_in_words(allowed)
            found.append((origin.name, origin.variable, default, allowed, meaning))
        return found
    finally:
        os.environ.update(hidden)


def settings_page() -> str:
    """List every setting in a table."""
    lines = _title("Settings")
    lines += ["A setting comes from the first of: a keyword of :py:obj:`fastrt.init`, its variable, the default. Sizes"]
    lines += ["may have units (``512MiB``, ``1.5GB``). ``fastrt config`` shows the values on a machine and where each"]
    lines += ["comes from. :doc:`commands` lists the variables that set options of commands.", ""]
    rows = []
    for name, variable, default, allowed, meaning in settings():
        facts = [f"Default: {_code(default)}." if default else "", f"Values: {_escape(allowed)}."]
        rows.append([f"{_code(name)} {_code(variable)}", " ".join([_escape(_upper(meaning)), *filter(None, facts)])])
    lines += _table(["setting, variable", "meaning"], rows, [30, 70])
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its full name, groups before their own commands."""

    def walk(name: str, command: click.Command, parent: click.Context | None) -> Iterator[Any]:
        context = click.Context(command, info_name=name, parent=parent)
        yield context.command_path, command, context
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield from walk(child, found, context)

    return walk("fastrt", command_group, None)


def commands_page() -> str:
    """Describe every command: its use, its text, and a table of its options."""
    lines = [*_title("Commands"), "Every command shows its options with ``--help``.", ""]
    for name, command, context in commands():
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [*_title(name, "-"), "::", "", f"    {name} {usage}", ""]
        lines += [_escape(part) + "\n" for part in _paragraphs(command.help or "")]
        rows = []
        for param in command.get_params(context):
            record = param.get_help_record(context) if isinstance(param, click.Option) else None
            if record is None or "--help" in param.opts:
                continue
            shown, about = record
            variable = param.envvar if isinstance(param.envvar, str) else ""
            about = _escape(about) + (f" Variable: ``{variable}``." if variable else "")
            rows.append([_code(shown), about])
        if rows:
            lines += _table(["option", "meaning"], rows, [35, 65])
    return "\n".join(lines)


def protocols() -> Iterator[tuple[Path, str, list[tuple[str, list[tuple[str, str, str, str]]]]]]:
    """Each .proto file: its path, its opening comment, and its services with their calls.

    A call is its name, the type of its request, that of its reply, and its comment.
    """
    for path in sorted(PROTOS.glob("*/*.proto")):
        text = path.read_text()
        opening = re.match(r"(?://.*\n)+", text)
        services = []
        for match in re.finditer(r"^service (\w+) \{\n(.*?)^\}", text, re.M | re.S):
            calls = [
                (call[2], _STREAM[bool(call[3])] + call[4], _STREAM[bool(call[5])] + call[6], _comment(call[1]))
                for call in _CALL.finditer(match[2])
            ]
            services.append((match[1], calls))
        yield path, _comment(opening[0] if opening else ""), services


def protocols_page() -> str:
    """Describe each .proto file, its services and calls, and show it."""
    lines = [*_title("Protocols"), "The files that ``fastrt protos DIR`` writes; :doc:`/peers` shows programs in other"]
    lines += ["languages that use them.", ""]
    for path, opening, services in protocols():
        lines += [*_title(str(path.relative_to(PROTOS)), "-"), _escape(opening), ""]
        for service, calls in services:
            lines += [*_title(f"Service {service}", "~")]
            rows = [[_code(name), f"{_code(asked)} → {_code(reply)}", _escape(c)] for name, asked, reply, c in calls]
            lines += _table(["call", "request → reply", "meaning"], rows, [22, 38, 40])
        lines += [".. raw:: html", "", '   <details class="source"><summary>The file</summary>', ""]
        lines += [".. code-block:: protobuf", "", textwrap.indent(path.read_text(), "   ")]
        lines += [".. raw:: html", "", "   </details>", ""]
    return "\n".join(lines)


def _entry(module: str, name: str, thing: Any, seen: dict[int, str]) -> list[str]:
    """Directives for one name; a name of something that is documented already becomes a line."""
    full = f"{module}.{name}"
    if isinstance(thing, ModuleType):
        return []
    home = getattr(thing, "__module__", module)
    if home.split(".")[0] != "fastrt":
        return [f"``{full}`` is ``{home.removeprefix('_')}.{thing.__name__}`` of the standard library.", ""]
    if seen.setdefault(id(thing), full) != full:
        return [f"``{full}`` is :py:obj:`{seen[id(thing)]}`.", ""]
    if not inspect.isclass(thing):
        return [f".. {'autofunction' if callable(thing) else 'autodata'}:: {full}", ""]
    if issubclass(thing, enum.Enum):
        return [f".. autoclass:: {full}", "   :members:", "   :undoc-members:", ""]
    members = _members(thing)
    option = f":members: {', '.join(members)}" if members else ":no-members:"
    return [f".. autoclass:: {full}", f"   {option}", ""]


def _members(kind: type) -> list[str]:
    """Public methods and properties with a docstring, also those of fastrt's own bases."""
    found: dict[str, None] = {}
    if kind.__name__ in CALLED_BY_OTHERS:
        return []
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "fastrt":
            for name, member in vars(base).items():
                plain = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                documented = callable(plain) or isinstance(plain, property)
                hidden = name.startswith("_") or name in INTERNAL_NAMES or f"{kind.__name__}.{name}" in INTERNAL
                if documented and not hidden and getattr(plain, "__doc__", None):
                    found[name] = None
    return list(found)


def _attributes(kind: type) -> dict[str, str]:
    """The descriptions under "Attributes:" of a docstring, by name."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    parts = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section, re.M | re.S)
    return {name: " ".join(text.split()) for name, text in parts}


def _is_error(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, (FastrtError, fastrt.PerformanceWarning))


def _is_module(name: str) -> bool:
    return isinstance(getattr(fastrt, name), ModuleType)


def _title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


def _code(text: str) -> str:
    return f"``{text}``" if text else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _escape(text: str) -> str:
    """Plain text as reStructuredText: only code between backticks keeps its meaning."""
    parts = re.split(r"(`[^`]+`)", text)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            parts[i] = f"`{part}`"
        else:
            part = re.sub(r"([\\*_|`])", r"\\\1", part)
            parts[i] = re.sub(r"(?<![\w-])--[a-z][\w-]*", r"``\g<0>``", part)  # an option
    return "".join(parts)


def _sizes_in_words(text: str) -> str:
    """Write powers of two from 1 KiB on as sizes: 16777216 as 16MiB."""

    def words(match: re.Match[str]) -> str:
        number = int(match[0])
        power = (number & -number).bit_length() - 1
        unit = min(power // 10, 4)
        return f"{number >> 10 * unit}{['', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}" if number else "0"

    return re.sub(r"\d+", words, text)


def _comment(text: str) -> str:
    return " ".join(line.strip().removeprefix("//").strip() for line in text.splitlines())


def _paragraphs(text: str) -> list[str]:
    shown = inspect.cleandoc(text).partition("\f")[0]
    return [" ".join(part.split()) for part in shown.split("\n\n") if part.strip()]


def _table(header: list[str], rows: list[list[str]], widths: list[int]) -> list[str]:
    shares = " ".join(map(str, widths))
    lines = [".. list-table::", "   :class: rows", "   :header-rows: 1", f"   :widths: {shares}", ""]
    for row in [header, *rows]:
        for i, cell in enumerate(row):
            lines.append(f"   {'*' if i == 0 else ' '} - {cell}".rstrip())
    return [*lines, ""]
