"""Actors by their records in the arena: the name of an actor's class, and its end.

The daemon uses these too. They need no plan and no options of actors, so that its start does not import those.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from fastrt._core.memory.clients import table
from fastrt._core.objects import handles
from fastrt._core.objects.functions import function_name
from fastrt._core.tasks import actors
from fastrt.errors import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, StaleReferenceError
from fastrt.store import messages
from fastrt.store.client import Store

DEMANDS = "it demands"  # how the reason begins of one that no node can have
CONSTRUCTOR_RAISED = "its constructor raised"  # how the reason of a death by that begins


def class_name(store: Store, index: int) -> str:
    """Return the name of an actor's class, for messages."""
    return function_name(store.client, actors.info(store.client, index)["function"])


def group_of_bundle(store: Store, record: int) -> Any:
    """Return the placement group of a bundle, by the bundle's record; None: its last reference was dropped."""
    try:
        return store.load(handles.acquire(store.client, *actors.info(store.client, record)["object"])).group
    except StaleReferenceError:
        return None


def kill_in(store: Store, index: int, reason: str, no_restart: bool = True, force: bool = True) -> None:
    """Kill the actor with that index, as `kill` does.

    Args:
        reason: why it ends.
        no_restart, force: as for `kill`.
    """
    info = actors.info(store.client, index)
    if no_restart or (info["state"] == actors.WANTED and 0 <= info["max_restarts"] <= info["restarts"]):
        actors.end_for_good(store.client, index, actors.KILLED, reason)
    elif info["state"] == actors.WANTED:
        actors.start_again(store.client, index)
    info = actors.info(store.client, index)
    if info["bare"] and info["state"] != actors.AWAY:
        return  # the daemon notices it by itself
    if info["state"] == actors.AWAY:
        actors.order(store.client, index, actors.ORDER_KILL if force else actors.ORDER_END)
        return
    if info["pid"] is None:
        if store.tell is not None:
            store.tell(messages.ActorsChanged())
        return
    _end_process(store, index, info, signal.SIGKILL if force else signal.SIGTERM)


def death_of_call(store: Store, index: int, words: str) -> ActorDiedError:
    """Return the error of a call whose actor's process ended while it ran the call, for these words."""
    info = actors.info(store.client, index)
    left = info["max_restarts"] < 0 or info["restarts"] < info["max_restarts"]
    is_dead = info["ended"] or info["state"] == actors.DEAD
    if is_dead or (info["state"] in (actors.DOWN, actors.AWAY) and not left):
        error = ActorDiedError(words)
    else:
        error = ActorUnavailableError(f"{words}; the actor is started again")
    error.actor_id = long_actor_id(info)
    return error


def death_of(info: Mapping[str, Any], name: str, reason: str) -> ActorDiedError:
    """Return the error of calls of a dead actor, given its record, the name of its class, and why it is dead."""
    kind = ActorUnschedulableError if reason.startswith(DEMANDS) else ActorDiedError
    error = kind(f"actor {name} is dead: {reason}")
    error.on_purpose = info["ended"] in (actors.KILLED, actors.EXITED)
    error.actor_id = long_actor_id(info)
    error.actor_init_failed = reason.startswith(CONSTRUCTOR_RAISED)
    return error


def long_actor_id(info: Mapping[str, Any]) -> str:
    """Return the id of an actor in the length of Ray's, given its record."""
    from fastrt.ids import ActorID  # here: few programs need it

    return str(ActorID.widened(f"{info['object'][0]:016x}"))


def _end_process(store: Store, index: int, info: dict[str, Any], number: signal.Signals) -> None:
    try:
        pidfd = os.pidfd_open(info["pid"])
    except ProcessLookupError:
        return
    try:
        # The pid was the actor's after the descriptor was opened, so the descriptor is the actor's.
        known = {row["client"]: row["pid"] for row in table(store.client.segment)}
        now = actors.info(store.client, index)
        if now["state"] != actors.AWAY and now["client"] == info["client"] and known.get(info["client"]) == info["pid"]:
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
