"""Groups of actors: the driver has each of them join, and what runs inside one finds the group by its name.

Each actor runs `init_group` in its own process, so nothing of an operation passes by the driver. Every making of a
group meets under a name of its own: what is left of one that failed cannot get in the way of the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastrt.collective.start import join_group
from fastrt.errors import ActorDiedError, CollectiveTimeout, FastrtError
from fastrt.store import client as store_client

if TYPE_CHECKING:
    from fastrt.collective.group import Group

_GRACE_S = 5.0  # beyond the ranks' own timeout, after which they say themselves what was missing
_joined: dict[str, Group] = {}  # this process's, by name


def get_group(name: str = "default") -> Group:
    """The group of that name that `create_group` has made this actor's process a rank of.

    Args:
        name: as given to `create_group`.
    Raises:
        FastrtError: there is none.
    """
    found = _joined.get(name)
    if found is None:
        there = ", ".join(sorted(_joined)) or "none"
        raise FastrtError(
            f"this process is in no group {name!r} made by create_group; it is in: {there}. Groups are known in the "
            "processes of their actors only"
        )
    return found


class ActorGroup:
    """What the driver has of a group of actors. Made by `create_group`; use it with `with`, or `destroy` it.

    Attributes:
        name: by which the actors' code gets it: `get_group(name)`.
        actors: their handles, in the order of ranks.
    """

    def __init__(
        self, name: str, actors: Sequence[Any], address: str | None, timeout: float, insecure: bool = False
    ) -> None:
        self.name = name
        self.actors = list(actors)
        self._address = address
        self._timeout = timeout
        self._insecure = insecure

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __repr__(self) -> str:
        return f"<group {self.name!r} of {self.world_size} actors>"

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.actors)

    def rebuild(self, *, timeout: float | None = None) -> ActorGroup:
        """Make the group anew of the actors that live, in their order here, under the same name.

        Those that were restarted (`max_restarts`) are taken in again. The old group ends in all of them.

        Args:
            timeout: seconds; by default that of `create_group`.
        Returns:
            The new group.
        Raises:
            ActorDiedError: none lives.
            CollectiveTimeout: an actor is busy, or they did not all join in time.
        """
        patience = self._timeout if timeout is None else timeout
        dead = _dead(self.actors, patience)
        alive = [actor for rank, actor in enumerate(self.actors) if rank not in dead]
        if not alive:
            raise ActorDiedError(f"group {self.name!r}: none of its actors lives: {dead[0]}")
        return create_group(alive, name=self.name, address=self._address, timeout=patience, insecure=self._insecure)

    def destroy(self) -> None:
        """End the group in all its actors; those that are dead or busy leave it by themselves."""
        left = [actor.__fastrt_call__.remote(_leave, self.name) for actor in self.actors]
        store_client.wait(left, num_returns=len(left), timeout=_GRACE_S)


def create_group(
    actors: Sequence[Any],
    *,
    name: str = "default",
    address: str | None = None,
    timeout: float = 30.0,
    insecure: bool = False,
) -> ActorGroup:
    """Make a group of actors; returns when all of them have joined. Their code gets it by `get_group(name)`.

    Args:
        actors: handles; the first is rank 0, and so on. Each runs the joining as a call, after those before it.
        name: what the actors call the group. One of that name that an actor is in already ends there.
        address: `host:port` of a coordinator, for actors on several machines. The driver makes a token for the group
            and gives it to the actors in its calls.
        timeout: how long to wait for the actors, and by default in every operation of theirs, in seconds.
        insecure: with an address: do not encrypt connections between machines; see `init_group`.
    Returns:
        The group as the driver sees it.
    Raises:
        TypeError: one is no handle of an actor.
        ValueError: there are none, or one is there twice.
        ActorDiedError: one of them is dead.
        CollectiveTimeout: one is busy, or they did not all join in time.
    """
    handles = list(actors)
    for handle in handles:
        if not hasattr(handle, "__fastrt_call__"):
            raise TypeError(f"create_group takes handles of actors, not {type(handle).__name__}")
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"a group needs actors, each of them once; these are {handles}")
    # First without anybody waiting for another: a dead one is told of at once.
    dead = _dead(handles, timeout)
    if dead:
        rank, why = next(iter(dead.items()))
        raise ActorDiedError(f"group {name!r}: rank {rank} cannot join: {why}")
    meeting = f"{name}/{secrets.token_hex(8)}"
    token = None if address is None else _new_token()
    joins = [
        handle.__fastrt_call__.remote(_join, name, meeting, rank, len(handles), address, timeout, token, insecure)
        for rank, handle in enumerate(handles)
    ]
    ready, late = store_client.wait(joins, num_returns=len(joins), timeout=timeout + _GRACE_S)
    store_client.get(ready)
    if late:
        ranks = ", ".join(str(joins.index(ref)) for ref in late)
        raise CollectiveTimeout(f"group {name!r}: these ranks did not join in time: {ranks}")
    return ActorGroup(name, handles, address, timeout, insecure)


def _new_token() -> str:
    from fastrt.net.grpc.identity import new_token  # imports `cryptography`, which groups of one machine do not need

    return new_token()


def _dead(actors: list[Any], timeout: float) -> dict[int, ActorDiedError]:
    """Which of some actors are dead, and why.

    Raises:
        CollectiveTimeout: one has not answered in time.
    """
    asked = [actor.__fastrt_call__.remote(_be_there) for actor in actors]
    _, late = store_client.wait(asked, num_returns=len(asked), timeout=timeout)
    if late:
        ranks = ", ".join(str(asked.index(ref)) for ref in late)
        raise CollectiveTimeout(f"these actors did not answer in {timeout:g} s, they are busy: {ranks}")
    dead = {}
    for rank, ref in enumerate(asked):
        try:
            store_client.get(ref)
        except ActorDiedError as error:
            dead[rank] = error
    return dead


# ---- what runs in the actors ----


def _be_there(instance: Any) -> None:
    """Answer: the actor lives, and has done what was asked of it before."""


def _join(
    instance: Any,
    name: str,
    meeting: str,
    rank: int,
    world_size: int,
    address: str | None,
    timeout: float,
    token: str | None,
    insecure: bool,
) -> None:
    _leave(instance, name)
    _joined[name] = join_group(meeting, rank, world_size, address, timeout, None, name, token, insecure)


def _leave(instance: Any, name: str) -> None:
    old = _joined.pop(name, None)
    if old is not None:
        old.destroy()
