"""`fastrt doctor`: whether fastrt can work here, and what to do where it cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import click

from fastrt.cli.config import unread_variables
from fastrt.cli.tables import table_console
from fastrt.config import RUNTIME_FOLDER, SHM_DIR, SPILL_FOLDER, Origin, cpu_count, origins
from fastrt.observe.machine import (
    FINE,
    NOTE,
    WRONG,
    Finding,
    check_all,
    check_packages,
    check_python,
    disk_of,
    read_machine,
)

_CONNECT_S = 2.0
_DEFAULT_PORT = 6465
_SPILL_FREE_MIN = 1 << 30
_STYLES = {FINE: "green", NOTE: "yellow", WRONG: "bold red"}
_PORTS = {"FASTRT_PORT": "fastrt start --head", "FASTRT_SCHEDULER_PORT": "the scheduler of fastrt start --head",
          "FASTRT_COORDINATOR_PORT": "the coordinator of fastrt start --head"}  # fmt: skip
_PEERS = {"FASTRT_ADDRESS": "the cluster's head", "FASTRT_SCHEDULER": "the scheduler"}


@click.command(short_help="Check whether fastrt can work on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--clean", is_flag=True, help="Remove what crashed sessions of this user have left.")
def doctor(as_json: bool, clean: bool) -> None:
    """Check the machine, the packages and the settings; show facts, judgement and advice.

    The exit code is 1 if something stops fastrt from working, else 0. Nothing is changed without --clean, which removes
    only what belongs to crashed sessions; sessions that run are not touched.

    \f
    Raises:
        click.ClickException: --clean is refused, because another user could change the runtime folder.
    """
    settings = {origin.name: origin for origin in origins()}
    if clean:
        _clean(settings)
        return
    findings = _all_findings(settings)
    is_fine = not any(finding.level == WRONG for finding in findings)
    if as_json:
        click.echo(json.dumps({"fine": is_fine, "checks": [dataclasses.asdict(one) for one in findings]}, indent=2))
    else:
        _show(findings)
    sys.exit(0 if is_fine else 1)


def _all_findings(settings: dict[str, Origin]) -> list[Finding]:
    workers = settings["num_workers"].value
    machine = read_machine(shm=disk_of(SHM_DIR))
    return [
        check_python(sys.version_info[:2], sys.implementation.name),
        _packages(),
        *check_all(machine, cpu_count() if workers is None else workers, time.time()),
        _settings(settings),
        _variables(),
        _folder("runtime folder", settings["runtime_dir"], RUNTIME_FOLDER),
        _folder("spill folder", settings["spill_dir"], SPILL_FOLDER),
        *_ports(settings),
        _leftovers(settings),
    ]


def _packages() -> Finding:
    from importlib import metadata

    try:
        requirements = metadata.requires("fastrt") or []
    except metadata.PackageNotFoundError:
        advice = "install it with pip, so that its packages can be checked"
        return Finding("packages", "fastrt itself is not installed: this is a source tree", NOTE, advice)
    versions = {}
    for requirement in requirements:
        name = requirement.split(";")[0].rstrip("<>=!~,. 0123456789")
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return check_packages(requirements, versions)


def _settings(settings: dict[str, Origin]) -> Finding:
    wrong = [origin for origin in settings.values() if origin.error]
    if wrong:
        advice = ", ".join(f"{'set' if one.is_default else 'correct or unset'} {one.variable}" for one in wrong)
        return Finding("settings", "; ".join(one.error for one in wrong), WRONG, advice)
    changed = [origin.variable for origin in settings.values() if not origin.is_default]
    found = f"{len(settings) - len(changed)} have their default"
    return Finding("settings", f"{found}; set: {', '.join(changed)}" if changed else found)


def _variables() -> Finding:
    unread = unread_variables()
    if unread:
        advice = "correct the names, or unset them; `fastrt config` lists the known ones"
        return Finding("variables", f"no part of fastrt reads {', '.join(unread)}", NOTE, advice)
    return Finding("variables", "every FASTRT_ variable that is set is known")


def _folder(name: str, origin: Origin, purpose: str) -> Finding:
    from fastrt.folders import UnsafeFolderError, has_private_folder

    folder = origin.value
    if folder is None:
        return Finding(name, "unknown", WRONG, f"correct {origin.variable}")
    is_runtime = purpose == RUNTIME_FOLDER
    try:
        # Sessions have folders of their own in the spill folder, so that one may be shared.
        exists = has_private_folder(folder, purpose) if is_runtime else folder.is_dir()
    except (UnsafeFolderError, OSError) as exc:
        return Finding(name, str(exc), WRONG, f"do as it says, or set {origin.variable} to another folder")
    above = next(path for path in (folder, *folder.parents) if path.exists())
    disk = disk_of(above)
    text = f"{folder}{'' if exists else ', to be created'}, {(disk.free if disk else 0) >> 20:,} MiB free"
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        return Finding(name, text, WRONG, f"{above} is not writable: set {origin.variable} to another folder")
    if not is_runtime and disk is not None and disk.free < _SPILL_FREE_MIN:
        return Finding(name, text, NOTE, f"values that do not fit into memory go there: set {origin.variable}")
    return Finding(name, text)


def _ports(settings: dict[str, Origin]) -> list[Finding]:
    """Check the ports that the settings of `fastrt start` name, and the default one of a head."""
    host = os.environ.get("FASTRT_HOST") or "127.0.0.1"
    found = []
    for variable, user in _PORTS.items():
        text = os.environ.get(variable, "")
        if not text and variable != "FASTRT_PORT":
            continue
        name = f"port {text or _DEFAULT_PORT}"
        if text and not (text.isdecimal() and int(text) < 1 << 16):
            found.append(Finding(name, f"{variable}={text!r} is no port", WRONG, f"set {variable} from 0 to 65535"))
            continue
        advice = f"for {user}: end the program that has it, or choose another port with {variable}; 0 takes a free one"
        port, level = int(text or _DEFAULT_PORT), WRONG if text else NOTE
        error = _why_not_free(host, port)
        if not error:
            found.append(Finding(name, f"{host}:{port} is free for {user}"))
        elif _is_own_node(f"{host}:{port}", settings):
            found.append(Finding(name, f"{host}:{port} is in use by a node of this user"))
        else:
            found.append(Finding(name, f"{host}:{port}: {error}", level, advice))
    for variable, peer in _PEERS.items():
        if os.environ.get(variable):
            found.append(_peer(variable, os.environ[variable], peer))
    return found


def _why_not_free(host: str, port: int) -> str:
    """Return why no program can listen there now; empty if one can."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _is_own_node(address: str, settings: dict[str, Origin]) -> bool:
    from fastrt.errors import FastrtError
    from fastrt.net.address import is_same
    from fastrt.runtime.nodefile import nodes_here

    try:
        nodes = nodes_here(settings["runtime_dir"].value)
        return any(is_same(address, one) for node in nodes for one in (node.address, node.head))
    except (FastrtError, OSError):
        return False


def _peer(variable: str, address: str, peer: str) -> Finding:
    from fastrt.net.address import is_address

    if not is_address(address):
        return Finding(variable, f"{address!r} is no address", WRONG, f"set {variable}=HOST:PORT")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as exc:
        advice = f"start {peer}, open the port in firewalls, or correct {variable}"
        return Finding(variable, f"{peer} at {address} cannot be reached: {exc}", WRONG, advice)
    return Finding(variable, f"{peer} at {address} accepts connections")


def _leftovers(settings: dict[str, Origin]) -> Finding:
    from fastrt.node.leftovers import find_leftovers

    folders = [settings[name].value for name in ("runtime_dir", "spill_dir")]
    if None in folders:
        return Finding("dead sessions", "not looked for, as a folder's setting is wrong", NOTE, "correct the setting")
    try:
        found = find_leftovers(*folders)
    except OSError as exc:
        return Finding("dead sessions", f"cannot be looked for: {exc}", NOTE, "make the folder readable for this user")
    if not found.sessions:
        return Finding("dead sessions", "none")
    names = ", ".join(map(str, [*found.segments, *found.folders]))
    text = f"{len(found.sessions)} left behind: {names} ({found.shm_bytes >> 20:,} MiB of memory)"
    return Finding("dead sessions", text, NOTE, "remove them: fastrt doctor --clean")


def _clean(settings: dict[str, Origin]) -> None:
    from fastrt.errors import FastrtError
    from fastrt.node.leftovers import find_leftovers, sweep_sessions

    folders: list[Path] = []
    for name in ("runtime_dir", "spill_dir"):
        if settings[name].error:
            raise click.ClickException(settings[name].error)
        folders.append(settings[name].value)
    runtime_dir, spill_dir = folders
    try:
        before: Any = find_leftovers(runtime_dir, spill_dir)
        sweep_sessions(runtime_dir, spill_dir)
    except (FastrtError, OSError) as exc:
        raise click.ClickException(str(exc)) from exc
    removed = [path for path in [*before.segments, *before.folders] if not path.exists()]
    for path in removed:
        click.echo(f"removed {path}")
    if not removed:
        click.echo("crashed sessions have left nothing that can be removed")


def _show(findings: list[Finding]) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("", "what", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for one in findings:
        level = f"[{_STYLES[one.level]}]{one.level}[/]"
        table.add_row(level, escape(one.name), escape(one.found), escape(one.advice))
    table_console().print(table)
    wrong = sum(one.level == WRONG for one in findings)
    notes = sum(one.level == NOTE for one in findings)
    end = f"{wrong} of {len(findings)} stop fastrt from working" if wrong else "fastrt can work here"
    click.echo(f"{end}; {notes} could be better" if notes else end)
