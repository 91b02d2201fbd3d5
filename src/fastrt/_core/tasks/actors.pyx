# cython: language_level=3, freethreading_compatible=True
"""The table of actors: make, start, find by name, end.

    WANTED -> STARTING -> LIVE -> DOWN -> WANTED again, or DEAD        WANTED | STARTING -> DOWN | DEAD
    WANTED -> AWAY -> DOWN: by the client that represents its process, which runs on another node

An actor's state is its word; each change commits by one store or swap of it. The creator makes it WANTED, the actor's
own process STARTING and LIVE, recovery DOWN. Every other change is made by the daemon: it alone decides whether an
actor is started again. Names are looked up under the lock, in the records; there is no index that could disagree with
them.
"""
from fastrt.errors import AttachError

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset, strncmp

from fastrt.errors import ObjectStoreFullError

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit, segment_lock_grow
from fastrt._core.objects.handles cimport Ref, ref_use, ref_wrap
from fastrt._core.objects.mailbox cimport mailbox_forget, mailbox_wake
from fastrt._core.objects.objects cimport object_acquire, object_maybe_delete, object_release
from fastrt._core.objects.references cimport links_count, links_recount, links_uncount
from fastrt._core.tasks.calls cimport actor_of

cdef extern from "<string.h>" nogil:
    size_t strnlen(const char *, size_t)

EMPTY, WANTED, STARTING, LIVE, DOWN, DEAD, AWAY = (
    FRT_ACTOR_EMPTY, FRT_ACTOR_WANTED, FRT_ACTOR_STARTING, FRT_ACTOR_LIVE, FRT_ACTOR_DOWN, FRT_ACTOR_DEAD,
    FRT_ACTOR_AWAY)
KILLED, FAILED, EXITED = FRT_END_KILLED, FRT_END_FAILED, FRT_END_EXITED
ORDER_NONE, ORDER_KILL = FRT_ORDER_NONE, FRT_ORDER_KILL
ORDER_END = FRT_ORDER_KILL + 1  # the same after cleanup code
NAME_BYTES_MAX = 191
cdef enum:
    KEPT = 4  # slots of the client table that actors leave free for tools and drivers that join later
SLOTS_KEPT = KEPT


cdef inline frt_actor *_at(Client client, uint32_t a) except NULL:
    client.ensure()
    if a >= frt_actors(&client.x):
        raise IndexError(f"there is no actor {a}")
    return client.x.actors + a


cdef int _lock(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_ACTORS)
    if rc == FRT_LOCK_ORPHANED:
        # A record counts from the store of its word on; its object may have been counted before that.
        links_recount(x)
        frt_lock_mend(x.locks + FRT_LOCK_ACTORS)
        return FRT_OK
    return rc


cdef int actors_touch(frt_ctx *x) noexcept nogil:
    """Take the lock once, so that a death inside it is repaired now."""
    cdef int rc = _lock(x)
    if rc == FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_ACTORS)
    return rc


cdef frt_refslot actor_object(frt_actor *actor) noexcept nogil:
    cdef frt_refslot slot
    slot.objref, slot.index, slot.extra = actor.objref, actor.index, 0
    return slot


cdef bint _has_client(uint64_t word) noexcept nogil:
    """Return whether a client is the actor's process, or represents it."""
    return frt_word_state(word) in (FRT_ACTOR_STARTING, FRT_ACTOR_LIVE, FRT_ACTOR_AWAY)


cdef bint _answers(frt_actor *actor, const char *name) noexcept nogil:
    """Return whether an actor has that name and is not ending."""
    cdef int state = frt_word_state(a64_load_sc(&actor.word))
    return state != FRT_ACTOR_EMPTY and state != FRT_ACTOR_DEAD and a32_load_sc(&actor.ended) == 0 and \
        a32_load_sc(&actor.released) == 0 and strncmp(actor.name, name, sizeof(actor.name)) == 0


cdef bint _needs_slot(frt_actor *actor) noexcept nogil:
    """Return whether an actor has a process on this node, or gets one and nothing else has to happen first."""
    cdef int state = frt_word_state(a64_load_acq(&actor.word))
    if actor.flags & FRT_ACTOR_BARE or a32_load_acq(&actor.ended) or a32_load_acq(&actor.released):
        return False
    return state in (FRT_ACTOR_STARTING, FRT_ACTOR_LIVE, FRT_ACTOR_DOWN) or \
        state == FRT_ACTOR_WANTED and actor.demand == 0


cdef uint32_t _others(frt_ctx *x) noexcept nogil:
    """Count the slots that actors cannot have: of other processes, of workers to come, and those kept for tools."""
    cdef uint32_t c, kind, workers = 0, tools = 0, others = 0
    for c in range(frt_clients(x)):
        if frt_word_state(a64_load_acq(&x.clients[c].word)) != FRT_CLIENT_FREE:
            kind = x.clients[c].kind
            workers += kind == <uint32_t>FRT_KIND_WORKER
            tools += kind == <uint32_t>FRT_KIND_TOOL
            others += kind in (<uint32_t>FRT_KIND_DAEMON, <uint32_t>FRT_KIND_DRIVER)
    return others + max(tools, <uint32_t>KEPT) + max(workers, frt_most(&x.sb.wanted_workers, x.clients_limit))


cdef int _commit_record(frt_ctx *x, uint32_t a) noexcept nogil:
    """Commit memory for record a. The caller holds the actors lock."""
    cdef int rc
    if a < a32_load_acq(&x.sb.actors_committed):
        return FRT_OK
    rc = segment_lock_grow(x)
    if rc != FRT_OK:
        return rc
    rc = segment_commit(x, <char *>(x.actors + a) - x.base, FRT_ACTORS_STEP * sizeof(frt_actor))
    if rc == FRT_OK:
        a32_store_rel(&x.sb.actors_committed, a + FRT_ACTORS_STEP)
    frt_lock_give(x.locks + FRT_LOCK_GROW)
    return rc


def create(Client client, Ref ref, uint64_t function, str name, int32_t max_restarts, bint detached, Ref demand=None,
           bint bare=False, bint held=False):
    """Make the actor that lives as long as an object, and have it started.

    Args:
        ref: the object, which no other process knows yet.
        function: objref of the object of its class.
        name: for `find`; at most 191 bytes; "": none.
        max_restarts: how often it gets another process; -1: any number.
        detached: it lives to the end of the session, also without any handle.
        demand: object with the resources that it takes while it lives; `ref` or the table of functions keeps it alive.
            None: nothing.
        bare: it has no process, and only holds its resources.
        held: the caller keeps `ref` as long as the actor is to live, so the actor itself does not.
    Returns:
        The actor's index; None when another actor has that name.
    Raises:
        AttachError: it demands nothing, so it must run on this node, which has no client slot for another process.
        ObjectStoreFullError: the table of actors is full.
    """
    return _create(client, ref, function, name, max_restarts,
                   (FRT_ACTOR_DETACHED if detached else 0) | (FRT_ACTOR_BARE if bare else 0), demand, False, not held)


def stand_in(Client client, Ref ref, uint64_t function):
    """Make an object represent an actor of another node: calls of it come to this client, which forwards them.

    Args:
        ref, function: as for `create`; the object may still be without its value.
    Returns:
        The actor's index.
    Raises:
        ObjectStoreFullError: the table of actors is full.
    """
    return _create(client, ref, function, "", 0, 0, None, True, False)


cdef object _create(Client client, Ref ref, uint64_t function, str name, int32_t max_restarts, uint8_t flags,
                    Ref demand, bint away, bint counted):
    cdef frt_ctx *x = &client.x
    cdef bytes text = name.encode() + b"\0"
    cdef const char *chars = text
    cdef frt_actor *actor = NULL
    cdef frt_refslot slot
    cdef uint32_t a, processes = 0, others = 0
    cdef bint taken = False
    cdef int rc = FRT_OK
    client.ensure()
    ref_use(client, ref)
    if len(text) > NAME_BYTES_MAX + 1:
        raise ValueError(f"the name {name!r} has {len(text) - 1} bytes; at most {NAME_BYTES_MAX} are kept")
    check(_lock(x))
    for a in range(frt_actors(x)):
        if frt_word_state(x.actors[a].word) == FRT_ACTOR_EMPTY:
            actor = x.actors + a if actor == NULL else actor
        elif len(text) > 1 and _answers(x.actors + a, chars):
            taken = True
        else:
            processes += _needs_slot(x.actors + a)
    if not away and not flags & FRT_ACTOR_BARE and demand is None and not taken and \
            processes + KEPT >= x.clients_limit // 2:
        others = _others(x)
        if processes + others >= x.clients_limit:
            frt_lock_give(x.locks + FRT_LOCK_ACTORS)
            raise AttachError(
                f"no client slot is left for another actor: there are {x.clients_limit} (clients_max), {processes} of "
                f"them for actors and {others} for other processes and tools that join later. Raise "
                "clients_max (fastrt.init(clients_max=...) or FASTRT_CLIENTS_MAX), or end actors")
    if actor == NULL and frt_actors(x) < FRT_ACTORS:
        rc = _commit_record(x, frt_actors(x))
        if rc == FRT_OK:
            actor = x.actors + frt_actors(x)
            a32_store_rel(&x.sb.actors_fresh, frt_actors(x) + 1)
    if actor != NULL and not taken:
        memset(&actor.mailbox, 0, sizeof(frt_actor) - sizeof(uint64_t))
        memcpy(actor.name, chars, len(text))
        actor.function, actor.objref, actor.index, actor.max_restarts = function, ref.objref, ref.index, max_restarts
        if demand is not None:
            actor.demand, actor.demand_index = demand.objref, demand.index
        slot = actor_object(actor)
        actor.flags = flags
        if counted:
            rc = links_count(x, &slot, 1, &actor.flags, FRT_ACTOR_COUNTED)
        if rc == FRT_OK:
            x.entries[ref.index].actor = <uint32_t>(actor - x.actors) + 1
            x.entries[ref.index].flags |= FRT_ENTRY_ACTOR
            if away:
                a64_store_sc(&actor.word, frt_word(FRT_ACTOR_AWAY, x.me, frt_word_gen(actor.word)))  # commit
            else:
                a64_store_sc(&actor.word, frt_word(FRT_ACTOR_WANTED, 0, frt_word_gen(actor.word)))  # commit
    frt_lock_give(x.locks + FRT_LOCK_ACTORS)
    check(rc)
    if taken:
        return None
    if actor == NULL:
        raise ObjectStoreFullError(
            f"the node's table of actors and bundles of placement groups is full: it has {FRT_ACTORS} places, and an "
            "actor that has ended keeps its own while a handle is left; drop handles, or remove placement groups")
    return <uint32_t>(actor - x.actors)


def find(Client client, str name):
    """Return a reference to the object of the actor of that name; None when there is none."""
    cdef frt_ctx *x = &client.x
    cdef bytes text = name.encode() + b"\0"
    cdef const char *chars = text
    cdef frt_actor *actor
    cdef uint32_t a, index
    cdef uint64_t objref
    client.ensure()
    if 1 < len(text) <= NAME_BYTES_MAX + 1:
        for a in range(frt_actors(x)):
            actor = x.actors + a
            index, objref = actor.index, actor.objref
            if _answers(actor, chars) and index < x.objects_max and \
                    object_acquire(x, index, objref, False) == FRT_OK:  # fails when its last handle is just going
                return ref_wrap(client, index)
    return None


def names(Client client):
    """The names of all actors that have one and are not dead."""
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor
    cdef uint32_t a
    cdef list found = []
    client.ensure()
    for a in range(frt_actors(x)):
        actor = x.actors + a
        if actor.name[0] and _answers(actor, actor.name):
            found.append(actor.name[:strnlen(actor.name, sizeof(actor.name))].decode("utf-8", "replace"))
    return found


def index_of(Client client, Ref ref):
    """Return the index of the actor that lives as long as the object of `ref`."""
    client.ensure()
    return <uint32_t>(actor_of(client, ref) - client.x.actors)


def is_actor(Client client, Ref ref):
    """Return whether an object is an actor's."""
    client.ensure()
    ref_use(client, ref)
    return client.x.entries[ref.index].flags & FRT_ENTRY_ACTOR != 0


def info(Client client, uint32_t a):
    """Return an actor's record as a dict, for the daemon, listings and error messages."""
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_acq(&actor.word)
    cdef uint32_t w = frt_word_client(word)
    cdef bint there = _has_client(word) and w < frt_clients(&client.x)
    return {"actor": a, "state": frt_word_state(word), "gen": frt_word_gen(word), "client": w if there else None,
            "pid": client.x.clients[w].pid if there else None, "last_pid": a32_load_acq(&actor.pid),
            "function": actor.function,
            "object": (actor.objref, actor.index), "max_restarts": actor.max_restarts, "restarts": actor.restarts,
            "released": actor.released != 0, "ended": a32_load_acq(&actor.ended), "order": actor.order,
            "detached": actor.flags & FRT_ACTOR_DETACHED != 0, "bare": actor.flags & FRT_ACTOR_BARE != 0,
            "devices": actor.devices, "demand": (actor.demand, actor.demand_index) if actor.demand else None,
            "name": actor.name[:strnlen(actor.name, sizeof(actor.name))].decode("utf-8", "replace"),
            "reason": actor.reason[:strnlen(actor.reason, 448)].decode("utf-8", "replace"),
            "how": actor.how[:strnlen(actor.how, 256)].decode("utf-8", "replace"), "node_lost": actor.node_lost != 0}


# ---- the actor's own process ----

def grant(Client client, uint32_t a, uint32_t gen, uint32_t devices):
    """Give devices to an actor or a bundle that is WANTED.

    Args:
        a, gen: the actor's index and generation.
        devices: a bit for each device of the node.
    """
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word
    check(_lock(&client.x))
    word = a64_load_sc(&actor.word)
    if frt_word_state(word) == FRT_ACTOR_WANTED and frt_word_gen(word) == gen:
        a32_store_sc(&actor.devices, devices)
    frt_lock_give(client.x.locks + FRT_LOCK_ACTORS)


def enter(Client client, uint32_t a, bint needs_devices=False):
    """Become the process of an actor that is WANTED; False when it is in another state or must end.

    Args:
        a: the actor's index.
        needs_devices: whether its demand has some; then it is also False when it has none. A daemon that takes over
            takes back the devices of all actors that are WANTED, whose processes may be on their way.
    """
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word
    cdef bint entered = False
    check(_lock(&client.x))  # so that its devices do not change between this look and the swap
    word = a64_load_sc(&actor.word)
    if frt_word_state(word) == FRT_ACTOR_WANTED and not actor.ended and \
            (not needs_devices or a32_load_sc(&actor.devices)):
        a32_store_sc(&actor.rescan, 1)  # a former process may have taken calls out of the mailbox
        entered = a64_cas_sc(&actor.word, word, frt_word(FRT_ACTOR_STARTING, client.x.me, frt_word_gen(word)))
        if entered:
            a32_store_rel(&actor.pid, client.x.clients[client.x.me].pid)
    frt_lock_give(client.x.locks + FRT_LOCK_ACTORS)
    return entered


def alive(Client client, uint32_t a):
    """Mark the actor LIVE: its process, which is this client, takes calls from now on."""
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_sc(&actor.word)
    if frt_word_client(word) == client.x.me and frt_word_state(word) == FRT_ACTOR_STARTING:
        a64_store_sc(&actor.word, frt_word(FRT_ACTOR_LIVE, client.x.me, frt_word_gen(word)))
        if not actor.flags & FRT_ACTOR_DETACHED:
            check(actor_uncount(&client.x, actor))


def hold(Client client, uint32_t a):
    """Mark a bare actor LIVE: its resources are reserved. This client, the daemon, becomes its client."""
    if enter(client, a):
        alive(client, a)


# ---- a client that represents a process on another node ----

def carry(Client client, uint32_t a, uint32_t gen):
    """Take an actor that is WANTED, to run it on another node; False when it is in another state or must end."""
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_sc(&actor.word)
    if frt_word_state(word) != FRT_ACTOR_WANTED or frt_word_gen(word) != gen or actor.ended:
        return False
    a32_store_sc(&actor.rescan, 1)
    actor.order = FRT_ORDER_NONE
    return a64_cas_sc(&actor.word, word, frt_word(FRT_ACTOR_AWAY, client.x.me, gen))


def carried(Client client, uint32_t a):
    """Drop the count of an actor's object: the other node has received everything that it needs to build the actor."""
    cdef frt_actor *actor = _at(client, a)
    if _is_mine(client, actor) and not actor.flags & FRT_ACTOR_DETACHED:
        check(actor_uncount(&client.x, actor))


def tell_how(Client client, uint32_t a, str how):
    """Note in an actor's record how its process ended. It is noted before the record says DOWN, so the daemon finds it.

    Args:
        how: about 250 bytes of it are kept; the first note stays until the actor is started again.
    """
    cdef frt_actor *actor = _at(client, a)
    if not actor.how[0]:
        _write(actor.how, sizeof(actor.how), how)


def drop(Client client, uint32_t a, str how="", bint node_lost=False):
    """Mark an actor DOWN that this client represents: it has no process any more. The daemon decides what follows.

    A bare actor that is dropped has lost its resources.

    Args:
        how, node_lost: how it ended, as for `tell_how`, and whether because its node was lost.
    """
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_sc(&actor.word)
    if _is_mine(client, actor):
        tell_how(client, a, how)
        actor.node_lost = node_lost
        a32_store_sc(&actor.asleep, 0)
        a64_store_sc(&actor.word, frt_word(FRT_ACTOR_DOWN, 0, frt_word_gen(word)))  # commit


def has_calls(Client client, uint32_t a):
    """Return whether there are calls of the actor that have not ended."""
    _at(client, a)
    return _has_calls(&client.x, a)


def order(Client client, uint32_t a, uint32_t what):
    """Send an order to the client that represents an actor's process: ORDER_KILL or ORDER_END."""
    cdef frt_actor *actor = _at(client, a)
    a32_store_sc(&actor.order, what)
    mailbox_wake(&client.x, actor)


def take_order(Client client, uint32_t a):
    """Take the order for this client, which represents the actor's process; ORDER_NONE when there is none."""
    cdef frt_actor *actor = _at(client, a)
    cdef uint32_t what = a32_load_sc(&actor.order)
    if what != FRT_ORDER_NONE:
        a32_store_sc(&actor.order, FRT_ORDER_NONE)
    return what


cdef bint _is_mine(Client client, frt_actor *actor) noexcept:
    cdef uint64_t word = a64_load_sc(&actor.word)
    return frt_word_client(word) == client.x.me and (
        frt_word_state(word) == FRT_ACTOR_AWAY or
        frt_word_state(word) == FRT_ACTOR_LIVE and actor.flags & FRT_ACTOR_BARE != 0)


cdef int actor_uncount(frt_ctx *x, frt_actor *actor) noexcept nogil:
    """Drop the count of the actor's object; it is deleted now if there is no handle left."""
    cdef frt_refslot slot = actor_object(actor)
    cdef int rc = FRT_OK
    if actor.flags & FRT_ACTOR_COUNTED:
        rc = links_uncount(x, &slot, 1, &actor.flags, FRT_ACTOR_COUNTED)
        if rc == FRT_OK and slot.index < x.objects_max:
            object_maybe_delete(x, slot.index)
    return rc


def end_for_good(Client client, uint32_t a, uint32_t why, str reason):
    """Mark an actor so that it is not started again.

    Args:
        why: KILLED, FAILED or EXITED.
        reason: for the errors of its calls; about 440 bytes of it are kept.
    Returns:
        False when it was marked before, for another reason.
    Raises:
        LockStuck: a stopped process holds the lock of the table.
    """
    cdef frt_actor *actor = _at(client, a)
    check(_lock(&client.x))
    try:
        if actor.ended:
            return False
        _write(actor.reason, sizeof(actor.reason), reason)
        a32_store_sc(&actor.ended, why)  # commit: who sees it sees the reason
    finally:
        frt_lock_give(client.x.locks + FRT_LOCK_ACTORS)
    return True


cdef int _write(char *field, size_t room, str words) except -1:
    """Write words to a field of a record, cut to its size."""
    cdef bytes text = words.encode("utf-8", "replace")[:room - 1]
    text = text.decode("utf-8", "ignore").encode() + b"\0"  # not half a character
    memcpy(field, <char *>text, len(text))
    return 0


cdef bint _has_calls(frt_ctx *x, uint32_t a) noexcept nogil:
    cdef uint32_t t
    cdef int state
    for t in range(frt_tasks(x)):
        state = frt_word_state(a64_load_acq(x.task_words + t))
        if state > FRT_TASK_RESERVED and state != FRT_TASK_ENDING and x.tasks[t].actor == a + 1:
            return True
    return False


def is_over(Client client, uint32_t a):
    """Return whether the actor has no handles left, and all its calls have ended."""
    cdef frt_actor *actor = _at(client, a)
    return a32_load_sc(&actor.released) != 0 and not _has_calls(&client.x, a)


# ---- the daemon ----

def of_client(Client client, uint32_t v):
    """Find the actors whose process client v is, or represents."""
    cdef frt_ctx *x = &client.x
    cdef uint64_t word
    cdef uint32_t a
    cdef list found = []
    client.ensure()
    for a in range(frt_actors(x)):
        word = a64_load_acq(&x.actors[a].word)
        if frt_word_client(word) == v and _has_client(word):
            found.append(a)
    return found


def demanding(Client client):
    """Find the actors with a demand: a list of (index, generation)."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t a
    cdef list found = []
    client.ensure()
    for a in range(frt_actors(x)):
        if frt_word_state(a64_load_acq(&x.actors[a].word)) != FRT_ACTOR_EMPTY and x.actors[a].demand:
            found.append((a, frt_word_gen(a64_load_acq(&x.actors[a].word))))
    return found


def states(Client client, list actors):
    """Return the states of actors, given (index, generation) of each; EMPTY where the record was used again."""
    cdef frt_ctx *x = &client.x
    cdef uint32_t a, gen
    cdef uint64_t word
    cdef list found = []
    client.ensure()
    for a, gen in actors:
        word = a64_load_acq(&x.actors[a].word) if a < frt_actors(x) else 0
        found.append(frt_word_state(word) if word and frt_word_gen(word) == gen else EMPTY)
    return found


def attention(Client client, dict waiting=None):
    """Find the actors that the daemon must act on: a list of (index, state); see `node.actors`.

    Args:
        waiting: generations by index of WANTED actors that may not start yet: they are left out.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor
    cdef uint32_t a
    cdef int state
    cdef list found = []
    client.ensure()
    for a in range(frt_actors(x)):
        actor = x.actors + a
        state = frt_word_state(a64_load_sc(&actor.word))
        if state == FRT_ACTOR_WANTED and waiting is not None and not a32_load_sc(&actor.ended) and \
                not a32_load_sc(&actor.released) and waiting.get(a) == frt_word_gen(a64_load_sc(&actor.word)):
            continue
        if state == FRT_ACTOR_WANTED or state == FRT_ACTOR_DOWN or \
                state == FRT_ACTOR_DEAD and not a32_load_sc(&actor.swept) or \
                state == FRT_ACTOR_LIVE and actor.flags & FRT_ACTOR_BARE and (
                    a32_load_sc(&actor.ended) or a32_load_sc(&actor.released)):
            found.append((a, state))
    return found


def let_go(Client client, uint32_t a):
    """Drop the count of an actor's object when the actor is DOWN and has no calls: it ends with its last handle.

    An actor whose process ended before it was built has kept the count for its calls. A bare one, WANTED, has none.
    """
    cdef frt_actor *actor = _at(client, a)
    cdef int state = frt_word_state(a64_load_sc(&actor.word))
    if (state == FRT_ACTOR_DOWN or state == FRT_ACTOR_WANTED and actor.flags & FRT_ACTOR_BARE) and \
            not actor.flags & FRT_ACTOR_DETACHED and actor.flags & FRT_ACTOR_COUNTED and not _has_calls(&client.x, a):
        check(actor_uncount(&client.x, actor))


def lacks_process(Client client, uint32_t a):
    """Return whether a process is all that an actor needs: it is WANTED, demands nothing and need not end."""
    cdef frt_actor *actor = _at(client, a)
    return frt_word_state(a64_load_sc(&actor.word)) == FRT_ACTOR_WANTED and actor.demand == 0 and \
        not actor.flags & FRT_ACTOR_BARE and a32_load_sc(&actor.ended) == 0


def start_again(Client client, uint32_t a):
    """Make an actor that is DOWN WANTED again, and count a restart. False when it is not, or has no handle left."""
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_sc(&actor.word)
    cdef frt_refslot slot = actor_object(actor)
    cdef int rc = FRT_OK
    let_go(client, a)
    if frt_word_state(word) == FRT_ACTOR_WANTED:  # it is killed before its process is up: the next one is a restart
        actor.restarts += 1
    if frt_word_state(word) != FRT_ACTOR_DOWN or slot.index >= x.objects_max or \
            object_acquire(x, slot.index, slot.objref, False) != FRT_OK:
        return False
    if not actor.flags & FRT_ACTOR_COUNTED:
        rc = links_count(x, &slot, 1, &actor.flags, FRT_ACTOR_COUNTED)
    object_release(x, slot.index, False)
    check(rc)
    actor.restarts += 1
    memset(actor.how, 0, sizeof(actor.how))
    actor.node_lost = False
    a64_store_sc(&actor.word, frt_word(FRT_ACTOR_WANTED, 0, frt_word_gen(word)))
    return True


def end(Client client, uint32_t a, str reason):
    """Declare an actor dead that has no process. If it is dead already, look for calls once more.

    Args:
        reason: for the errors of its calls, unless there is one already.
    Returns:
        Indexes of tasks: its calls. This client must end them by sealing an error. None when the actor has a process,
        also one that has joined since the caller looked: the actor lives on.
    """
    cdef frt_ctx *x = &client.x
    cdef frt_actor *actor = _at(client, a)
    cdef uint64_t word = a64_load_sc(&actor.word)
    cdef uint32_t t
    cdef list ending = []
    if frt_word_state(word) not in (FRT_ACTOR_WANTED, FRT_ACTOR_DOWN, FRT_ACTOR_DEAD):
        return None
    if not actor.reason[0]:
        _write(actor.reason, sizeof(actor.reason), reason)
    if frt_word_state(word) == FRT_ACTOR_WANTED and not a64_cas_sc(
            &actor.word, word, frt_word(FRT_ACTOR_DEAD, 0, frt_word_gen(word))):
        return None
    a64_store_sc(&actor.word, frt_word(FRT_ACTOR_DEAD, 0, frt_word_gen(word)))  # before the look at its calls
    for t in range(frt_tasks(x)):
        word = a64_load_sc(x.task_words + t)
        if frt_word_state(word) == FRT_TASK_READY and x.tasks[t].actor == a + 1 and a64_cas_sc(
                x.task_words + t, word, frt_word(FRT_TASK_ENDING, x.me, frt_word_gen(word))):
            ending.append(t)
    check(actor_uncount(x, actor))
    a32_store_sc(&actor.swept, 1)  # from here on the record may be used for another actor at any time
    mailbox_forget(actor)
    return ending


cdef void actors_of_dead(frt_ctx *x, uint32_t v) noexcept nogil:
    """Make the actors DOWN whose process client v was, or represented."""
    cdef frt_actor *actor
    cdef uint64_t word
    cdef uint32_t a
    for a in range(frt_actors(x)):
        actor = x.actors + a
        word = a64_load_acq(&actor.word)
        if frt_word_client(word) == v and _has_client(word):
            a32_store_sc(&actor.asleep, 0)
            a64_store_sc(&actor.word, frt_word(FRT_ACTOR_DOWN, 0, frt_word_gen(word)))  # commit
        mailbox_forget(actor)  # the dead client may have been about to free the record
