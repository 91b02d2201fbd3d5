"""Actors in a kill test, through the core's calls alone: whoever enters one is its process, and there is no daemon."""

from collections.abc import Sequence

import work

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import actors, calls, submission, tasks
from fastrt._core.tasks.inbox import Inbox
from fastrt._core.tasks.submission import CallOfDead


def make(client: Client, function: Ref, name: str = "", detached: bool = False) -> tuple[Ref, int | None]:
    """An actor that wants a process, and a handle of it; no index when the name is taken."""
    ref = work.put(client, 9, 60)
    return ref, actors.create(client, ref, function.objref, name, -1, detached)


def call(client: Client, actor: Ref, op: int, seed: int, refs: Sequence[Ref] = (), big: int = 0) -> list[Ref]:
    """As `work.submit`, for an actor; a dead one's call is ended at once."""
    count = 3 if op == work.MANY else 1
    options = submission.CallOptions(actor, 0, count, work.RETRIES)
    try:
        made = submission.submit(client, options, work.packed(op, seed, refs, big))
    except CallOfDead as dead:
        task, made = dead.args
        work.fail(client, task)
    return made if count > 1 else [made]


def serve(client: Client, index: int, function: Ref, most: int = 1 << 30, wait_s: float = 0.0) -> int:
    """Run calls of the actor whose process this client is."""
    inbox = Inbox(client, index, True)
    done = 0
    while done < most and (task := inbox.next(wait_s, wait_s / 2)) != tasks.NO_TASK:
        work.perform(client, function, task)
        done += 1
    return done


def become(client: Client, index: int) -> bool:
    """Be the process of an actor that wants one."""
    if not actors.enter(client, index):
        return False
    actors.alive(client, index)
    return True


def end(client: Client, index: int) -> None:
    """As the daemon would: no process any more, and an error for each call."""
    ending = actors.end(client, index, "it is over")
    assert ending is not None, "it has a process"
    for task in ending:
        work.fail(client, task)


def look_after(client: Client, kept: int = -1) -> None:
    """What a daemon does: another process for the actor `kept`, and an end for all others that have none."""
    for index, state in actors.attention(client):
        if state == actors.LIVE:  # a bare one that shall end
            actors.drop(client, index)
            if actors.info(client, index)["state"] == actors.LIVE:
                continue  # another one stands for it, whom somebody that has died did not come to tell
        if state == actors.DOWN and index == kept:
            actors.start_again(client, index)
        elif index != kept:
            end(client, index)


def play(client: Client, function: Ref, shared: Ref) -> list[list[Ref]]:
    """Everything that can be done with actors, once."""
    made = [call(client, shared, work.INT, 9000), call(client, shared, work.BYTES, 9010, big=300)]
    made += [call(client, shared, work.SUM, 9020, [made[0][0], made[1][0]]), call(client, shared, work.MANY, 9030)]
    index = actors.index_of(client, shared)
    actors.info(client, index)
    if become(client, index):
        serve(client, index, function, 3)
    for detached in (False, True):
        own, mine = make(client, function, f"own {detached}", detached)
        if mine is not None:
            made += live(client, function, own, mine)
    doomed, late = make(client, function)
    assert late is not None
    made.append(call(client, doomed, work.INT, 9100))
    end(client, late)
    made.append(call(client, doomed, work.INT, 9110))
    made += stand_for(client, function)
    reserve(client)
    found = actors.find(client, "own True")
    if found is not None:
        made.append(call(client, found, work.INT, 9120))
    return made


def live(client: Client, function: Ref, own: Ref, mine: int) -> list[list[Ref]]:
    """An actor's life in one process, which also makes the calls."""
    first = work.submit(client, function, work.INT, 9200)
    made = [call(client, own, work.SUM, 9210, [first[0]]), call(client, own, work.INT, 9220)]
    if not become(client, mine):
        return made
    serve(client, mine, function, wait_s=0.0005)  # sleeps: the first call's argument is not there
    work.run_all(client, function)
    serve(client, mine, function)
    made += [call(client, own, work.INT, 9230 + k) for k in range(4)]
    what, task, _ = tasks.cancel(client, made[-2][0])
    if what == "ending":
        work.fail(client, task)
    inbox = Inbox(client, mine, False)
    for cell in inbox.take(0.0, 0.0):
        task = inbox.claim(cell)
        if task != tasks.NO_TASK:
            work.perform(client, function, task)
    handles.wait_all(client, [refs[0] for refs in made], 0.0, 0.0)
    actors.end_for_good(client, mine, actors.KILLED, "enough")
    actors.is_over(client, mine)
    return made


def reserve(client: Client) -> None:
    """The life of what is reserved for a placement group: it has a place, loses it, has it again, and ends."""
    demand = work.put(client, 8, 40)
    ref = work.put(client, 9, 62, [demand])
    index = actors.create(client, ref, 0, "", -1, False, demand, True)
    assert index is not None
    del demand
    actors.grant(client, index, actors.info(client, index)["gen"], 1)
    actors.hold(client, index)
    assert actors.info(client, index)["devices"] == 1
    actors.drop(client, index)
    if actors.start_again(client, index):
        actors.hold(client, index)
    assert (index, actors.info(client, index)["gen"]) in actors.demanding(client)
    actors.end_for_good(client, index, actors.KILLED, "enough")
    actors.drop(client, index)
    end(client, index)


def stand_for(client: Client, function: Ref) -> list[list[Ref]]:
    """Be what stands for the processes of two actors elsewhere, and leave some of the calls of one to its next process.

    One is of this node, the other is known by a handle.
    """
    own, mine = make(client, function)
    assert mine is not None
    made = [call(client, own, work.INT, 9300 + k) for k in range(3)]
    if not actors.carry(client, mine, actors.info(client, mine)["gen"]):
        return made
    actors.carried(client, mine)
    actors.order(client, mine, actors.ORDER_KILL)
    theirs = work.put(client, 9, 61)
    other = actors.stand_in(client, theirs, function.objref)
    made.append(call(client, theirs, work.INT, 9310))
    inboxes = [Inbox(client, index, True) for index in (mine, other)]
    for inbox in inboxes:
        inbox.arm()
    assert actors.take_order(client, mine) == actors.ORDER_KILL
    first, *rest = [task for inbox in inboxes for cell in inbox.look() if (task := inbox.claim(cell)) != tasks.NO_TASK]
    work.perform(client, function, rest.pop())
    for task in rest:
        if not calls.put_back(client, task, task == rest[0]):
            work.fail(client, task)
    work.perform(client, function, first)
    actors.has_calls(client, mine)
    for index in (other, mine):
        actors.drop(client, index, "its process over there ended")
    if actors.start_again(client, mine) and become(client, mine):
        serve(client, mine, function)
    return made
