"""Actors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fastrt.dashboard import sections
from fastrt.dashboard.pages import stacks, tasks
from fastrt.dashboard.sections import Section, many
from fastrt.dashboard.watched import Watched
from fastrt.observe import listing, reading
from fastrt.store.client import Store

_ROWS = 100


def actors(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """All actors, those that are alive first."""
    rows = sorted(listing.actors(store), key=lambda row: (row["state"] == "dead", row["class"], row["actor"]))
    states = Counter(row["state"] for row in rows)
    return [
        sections.facts("states", [(state, count, "count") for state, count in sorted(states.items())]),
        sections.table(
            "actors", many(len(rows), "actor"), [
                ("actor", "code"), ("class", "text"), ("name", "text"), ("state", "state"), ("pid", "code"),
                ("calls not ended", "count"), ("restarts", "text"), ("why it is dead", "text"),
            ], (
                (
                    sections.link(row["actor"], "actor", actor=row["actor"]), row["class"], row["name"], row["state"],
                    "" if row["pid"] is None else sections.link(row["pid"], "process", pid=row["pid"]), row["calls"],
                    f"{row['restarts']} of {row['max_restarts']}" if row["max_restarts"] else "", row["reason"],
                ) for row in rows[:_ROWS]
            ), "There are no actors. @fastrt.remote on a class makes one.",
        ),
    ]  # fmt: skip


def actor(session: Watched, store: Store, args: Mapping[str, str]) -> list[Section]:
    """One actor: its state, and its calls that have not ended."""
    way = sections.way("way", [sections.link("all actors", "actors")])
    found = [row for row in listing.actors(store) if str(row["actor"]) == args.get("actor", "")]
    if not found:
        return [way, sections.text("gone", "This actor is dead and no handle of it is left.", "warn")]
    row = found[0]
    calls = reading.page(store, "tasks", {"actor": row["actor"]}, limit=_ROWS)
    return [
        way,
        sections.facts("actor", [
            ("class", row["class"], "text"), ("name", row["name"] or "-", "text"), ("state", row["state"], "state"),
            ("pid", row["pid"], "code"), ("calls not ended", row["calls"], "count"),
            ("restarts", f"{row['restarts']} of {row['max_restarts']}", "text"),
            ("detached", "yes" if row["detached"] else "no", "text"),
        ]),
        *([sections.text("reason", row["reason"], "bad")] if row["reason"] else []),
        sections.buttons("kill", [
            ("Kill this actor", "act/kill", {"actor": row["actor"], "id": row["actor_id"]}, f"Kill {row['class']}?"),
        ]),
        sections.table("calls", "Calls that have not ended", tasks.COLUMNS, [tasks.row_of(one) for one in calls.rows],
                       "None: the actor is idle."),
        *stacks.of_process(session, row["pid"], "actor"),
        sections.links("more", [sections.link("log of this actor", "logs", actor=row["name"] or row["actor"])]),
    ]  # fmt: skip
