"""Groups of actors: the driver has each actor join, and the actors' code finds the group by its name.

Each actor runs `init_group` in its own process, so the data of operations does not pass through the driver. Each new
group meets under a random name, so that leftovers of a group that failed cannot disturb the next one.
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
    from fastrt.tasks.actor_handle import ActorHandle
    from fastrt.tasks.method import Actor

_GRACE_S = 5.0  # added to the ranks' timeout, so that their error arrives, which names the missing ranks
_joined: dict[str, Group] = {}  # the groups of this process, by name


def get_group(name: str = "default") -> Group:
    """Return the group of this name in which `create_group` made this actor's process a rank.

    Args:
        name: as given to `create_group`.
    Raises:
        FastrtError: there is no such group in this process.
    """
    found = _joined.get(name)
    if found is None:
        known = ", ".join(sorted(_joined)) or "none"
        raise FastrtError(
            f"this process is in no group {name!r} made by create_group; it is in: {known}. A group is known only in "
            "the processes of its actors"
        )
    return found


class ActorGroup:
    """The driver's handle of a group of actors. Made by `create_group`; use it with `with`, or `destroy` it.

    Attributes:
        name: the actors' code gets the group by it: `get_group(name)`.
        actors: their handles, in the order of ranks.
    """

    def __init__(
        self,
        name: str,
        actors: Sequence[ActorHandle | Actor],
        address: str | None,
        timeout: float,
        insecure: bool = False,
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
        """Number of ranks."""
        return len(self.actors)

    def rebuild(self, *, timeout: float | None = None) -> ActorGroup:
        """Make the group again from the actors that are alive, in the same order and under the same name.

        Restarted actors (`max_restarts`) belong to it again. The old group ends in all of them.

        Args:
            timeout: seconds; default: that of `create_group`.
        Returns:
            The new group.
        Raises:
            ActorDiedError: no actor is alive.
            CollectiveTimeout: an actor is busy, or not all of them joined in time.
        """
        patience = self._timeout if timeout is None else timeout
        dead = _dead(self.actors, patience)
        alive = [actor for rank, actor in enumerate(self.actors) if rank not in dead]
        if not alive:
            raise ActorDiedError(f"group {self.name!r}: none of its actors is alive: {dead[0]}")
        return create_group(alive, name=self.name, address=self._address, timeout=patience, insecure=self._insecure)

    def destroy(self) -> None:
        """End the group in all its actors; dead or busy ones are not waited for."""
        left = [actor.__fastrt_call__.remote(_leave, self.name) for actor in self.actors]
        store_client.wait(left, num_returns=len(left), timeout=_GRACE_S)


def create_group(
    actors: Sequence[ActorHandle | Actor],
    *,
    name: str = "default",
    address: str | None = None,
    timeout: float = 30.0,
    insecure: bool = False,
) -> ActorGroup:
    """Make a group of actors; returns when all of them have joined. The actors' code gets it with `get_group(name)`.

    Args:
        actors: handles; the first is rank 0, and so on. Each actor joins in a call that is queued behind earlier ones.
        name: the name of the group in the actors. An older group of this name ends in an actor that joins.
        address: `host:port` of a coordinator, for actors on several machines. The driver makes a token for the group
            and sends it to the actors in its calls.
        timeout: how long to wait for the actors, and the default time limit of their operations, in seconds.
        insecure: with an address: do not encrypt connections between machines; see `init_group`.
    Returns:
        The driver's handle of the group.
    Raises:
        TypeError: an element is not an actor's handle.
        ValueError: there are no actors, or one occurs twice.
        ActorDiedError: one of them is dead.
        CollectiveTimeout: one of them is busy, or not all of them joined in time.
    """
    handles = list(actors)
    for handle in handles:
        if not hasattr(handle, "__fastrt_call__"):
            raise TypeError(f"create_group takes handles of actors, not {type(handle).__name__}")
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"a group needs at least one actor, and each only once, not {handles}")
    # First ask each actor alone: a dead one is reported at once, and no rank waits for it.
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
    """Find the dead actors, and the reasons.

    Raises:
        CollectiveTimeout: an actor did not answer in time.
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

    # ---- runs in the actors ----


def _be_there(instance: Any) -> None:
    """Return, which shows that the actor is alive and has finished its earlier calls."""


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
