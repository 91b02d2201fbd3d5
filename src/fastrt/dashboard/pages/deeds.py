"""Requests that change the program: only a dashboard that was started with --allow-actions carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrt._core.repair import pages
from fastrt.dashboard.watched import Watched
from fastrt.observe import listing
from fastrt.store.client import Store
from fastrt.tasks.actor_records import kill_in
from fastrt.tasks.cancel import cancel_record


def cancel(session: Watched, store: Store, body: Mapping[str, Any]) -> str:
    """Cancel a task, as `fastrt.cancel` does; the tasks that it has submitted go on.

    Raises:
        ValueError: the body names no task.
    """
    number = body.get("task")
    if not isinstance(number, str) or len(number) != 16:
        raise ValueError("the request names no task")
    rows = pages.page_tasks(store.client, id=int(number, 16), limit=1)[0]
    if not rows:
        return "the task has ended"
    cancel_record(store, rows[0]["task"], rows[0]["id"])
    return "cancelled"


def kill(session: Watched, store: Store, body: Mapping[str, Any]) -> str:
    """Kill an actor for good, as `fastrt.kill` does.

    Raises:
        ValueError: the body names no actor.
    """
    index, name = body.get("actor"), body.get("id")
    if type(index) is not int or not isinstance(name, str):
        raise ValueError("the request names no actor")
    if all(row["actor"] != index or row["actor_id"] != name for row in listing.actors(store)):
        return "the actor is gone"
    kill_in(store, index, "it was killed from the dashboard")
    return "killed"
