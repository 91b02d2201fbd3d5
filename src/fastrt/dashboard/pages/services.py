"""A coordinator and parameter servers, if the dashboard has their addresses."""

from __future__ import annotations

from typing import Any

from fastrt.dashboard import sections
from fastrt.dashboard.sections import Section
from fastrt.dashboard.services import Polled, Services

_ROWS = 100
_STATES = {"CONNECTED": "alive", "ERROR": "failed", "DISCONNECTED": "waiting"}
_NO_COORDINATOR = (
    "Coordinator: none is shown. A coordinator for JAX is a service of its own, which no session knows. Start the "
    "dashboard by `fastrt dashboard --coordinator HOST:PORT`, for one under TLS with `--coordinator-ca`."
)
_NO_SERVERS = (
    "Parameter tables: none are shown. Parameter servers are processes of their own, which no session knows, and their "
    "rows are never read from outside. Servers with HTTP endpoints (http_port=) tell the tables and the counts of "
    "their rows: start the dashboard by `fastrt dashboard --servers HOST:PORT --servers-token FILE`."
)


def services(found: Services) -> list[Section]:
    """The tasks and barriers of a coordinator, and the members and tables of parameter servers."""
    return [*_coordinator(found), *_servers(found)]


def _coordinator(found: Services) -> list[Section]:
    if found.coordinator is None:
        return [sections.text("no-coordinator", _NO_COORDINATOR)]
    missing = _look("coordinator", found.coordinator)
    answer = found.coordinator.value
    if answer is None:
        return missing
    return [
        *missing,
        sections.facts("coordinator", [
            ("coordinator", found.addresses.coordinator, "code"), ("up for", answer.uptime_s, "seconds"),
            ("keys", answer.key_count, "count"), ("bytes of keys", answer.key_bytes, "bytes"),
            ("barriers", answer.barrier_count, "count"), ("calls waiting", answer.waiting_calls, "count"),
            ("state", "kept on disk" if answer.durable else "in memory", "text"),
        ]),
        *([sections.text("coordinator-error", answer.error, "bad")] if answer.error else []),
        sections.table(
            "coordinator-tasks", "Tasks of the coordinator", [
                ("task", "text"), ("state", "state"), ("silent, s", "number"), ("error", "message"),
            ], (
                (f"{one.role}/{one.rank}", _STATES.get(one.state, one.state.lower()),
                 None if one.silent_s < 0 else one.silent_s, one.error_message) for one in answer.members[:_ROWS]
            ), "No task has connected.",
        ),
        sections.table(
            "coordinator-barriers", "Barriers, open ones first", [
                ("barrier", "text"), ("state", "state"), ("arrived", "text"), ("missing", "text"), ("result", "text"),
            ], (
                (one.id, "waiting" if one.open else "passed" if not one.code else "failed",
                 f"{one.arrived_count} of {one.member_count}", ", ".join(one.missing), one.message)
                for one in answer.barriers[:_ROWS]
            ), "There have been none.",
        ),
    ]  # fmt: skip


def _servers(found: Services) -> list[Section]:
    if found.servers is None:
        return [sections.text("no-servers", _NO_SERVERS)]
    missing = _look("servers", found.servers)
    answer = found.servers.value
    if answer is None:
        return missing
    tables = [
        (name, rank, about.get("parts"), about.get("rows"))
        for rank, one in sorted(answer["stats"].items()) for name, about in sorted(one.get("tables", {}).items())
    ]  # fmt: skip
    return [
        *missing,
        sections.facts("servers", [
            ("parameter servers", found.addresses.servers, "code"), ("state", answer["state"], "text"),
            ("members", len(answer["nodes"]), "count"), ("tables", len({row[0] for row in tables}), "count"),
        ]),
        sections.table(
            "tables", "Parameter tables by server", [
                ("table", "text"), ("server", "count"), ("parts", "count"), ("rows", "count"),
            ], tables[:_ROWS], "There are none, or these servers hold no tables.",
        ),
        sections.table(
            "members", "Members", [("member", "code"), ("role", "text"), ("rank", "text")],
            ((_word(one, "node_id"), _word(one, "role"), _word(one, "rank_id")) for one in answer["nodes"][:_ROWS]),
            "There are none.",
        ),
    ]  # fmt: skip


def _look(name: str, polled: Polled) -> list[Section]:
    polled.look()
    if polled.why:
        return [sections.text(f"{name}-silent", polled.why, "warn")]
    return [] if polled.value is not None else [sections.text(f"{name}-wait", "It is being asked.")]


def _word(row: Any, name: str) -> str:
    return str(row.get(name, "")) if isinstance(row, dict) else ""
