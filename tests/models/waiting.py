"""Tasks that wait for their arguments: waiter lists under the links lock against sealers who look without it.

Two task records, two results. `word`, `next`, `before` (of the first task: the last one), `dep` (the result it is
linked to), `linked`, `need` are per task, `object`, `waiter` per result; `queued` is a ghost for the ready queue.
Scenario `chain`: task 0 needs result 0, task 1 needs both; two workers seal them. Scenario `cancel`: task 0 is
cancelled while it waits, its record then serves a task that needs result 1; one worker seals both.
"""

from collections.abc import Callable
from typing import ClassVar

from .explorer import BLOCKED, Memory, Model, Program, at, await_victim, bit_on, get, lock, put, store, unlock

L, R, T, OBJ, S = "references.", "recovery.", "tasks.", "objects.", "submission."
NEW, WAITING, READY, ENDING, GONE = "NEW", "WAITING", "READY", "ENDING", "GONE"


def swap(s: Memory, t: int, want: tuple, to: tuple) -> bool:
    if s["word"][t] != want:
        return False
    put(s, "word", t, to)
    return True


def renew(s: Memory, t: int, me: int) -> None:
    """The record serves another task, one that needs result 1."""
    if s["word"][t] != (ENDING, me):
        s["need"] = ((), ())
    else:
        put(s, "word", t, (NEW, 0))
        put(s, "need", t, (1,))


# What only the holder of the lock looks at changes in one step with a word that others look at: after a death
# inside the lock all of it is made anew.


def peek(s: Memory, t: int) -> tuple:
    return s["word"][t], s["linked"][t], s["need"][t]


def link(s: Memory, t: int, i: int) -> None:
    head = s["waiter"][i]
    last = s["before"][head - 1] if head else 0
    put(s, "next", t, 0)
    put(s, "before", t, last or t + 1)
    if last:
        put(s, "next", last - 1, t + 1)
        put(s, "before", head - 1, t + 1)
    put(s, "linked", t, 1)
    put(s, "dep", t, i)
    put(s, "waiter", i, head or t + 1)


def unlink(s: Memory, t: int) -> None:
    head = s["waiter"][s["dep"][t]]
    if head == t + 1:
        put(s, "waiter", s["dep"][t], leave(s, t))
    elif s["before"][t] and s["next"][s["before"][t] - 1] == t + 1:
        put(s, "next", s["before"][t] - 1, s["next"][t])
        put(s, "before", (s["next"][t] or head) - 1, s["before"][t])
    put(s, "linked", t, 0)


def leave(s: Memory, t: int) -> int:
    """Take the first task of a list out of it; return the next."""
    put(s, "linked", t, 0)
    if s["next"][t]:
        put(s, "before", s["next"][t] - 1, s["before"][t])
    return s["next"][t]


def await_task(s: Memory, t: int) -> object:
    return BLOCKED if s["word"][t][0] == NEW else s["word"][t]


class Waiting(Model):
    LOCKS = ("links", "janitor")
    SCENARIOS: ClassVar = {"cancel": 1, "chain": 1}
    MUTANTS: ClassVar = {
        "linking twice is noticed": "chain", "state is read again after linking": "cancel",
        "list is detached": "cancel",
        "rebuild clears sealed lists": "cancel", "recovery tells what was sealed": "cancel",
        "sealing is announced first": "cancel", "recovery unlinks what it ends": "cancel",
        "lists are rebuilt after a death": "cancel", "canceller unlinks": "cancel", "READY by swap": "cancel",
        "hand-over to the queue is announced": "cancel",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "word": ((NEW, 0), (NEW, 0)), "next": (0, 0), "before": (0, 0), "dep": (-1, -1), "linked": (0, 0),
            "need": ((0,), (0, 1)),
            "object": ("PENDING", "PENDING"), "waiter": (0, 0), "queued": 0, "sealing": (0,) * n, "pushing": (0,) * n,
            "links": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("sealer0", lambda me: self.seal(me, 0)), ("sealer1", lambda me: self.seal(me, 1))]
        actors += [("submitter", self.submitter)]
        if self.scenario == "cancel":
            actors[:2] = [("sealer", self.sealer), ("canceller", self.canceller)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(2))]

    def check(self, s: Memory) -> str | None:
        if s["need"][0] == ():
            return "a task becomes READY while it is being ended"
        if s["links"]:
            return None
        for i in (0, 1):
            seen, t, before = 0, s["waiter"][i] - 1, 0
            while t >= 0:
                if seen >> t & 1:
                    return "a waiter list is a circle"
                if s["word"][t][0] not in (WAITING, ENDING) or s["dep"][t] != i:
                    return f"the list of result {i} has task {t}, which does not wait for it"
                if before and s["before"][t] != before:
                    return f"task {t} does not name the one before it"
                seen, t, before = seen | 1 << t, s["next"][t] - 1, t + 1
            if before and s["before"][s["waiter"][i] - 1] != before:
                return f"the first task that waits for result {i} does not name the last"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        for t in (0, 1):
            if s["word"][t][0] == READY and not s["queued"] >> t & 1:
                return f"task {t} is READY and not queued"
            if s["word"][t][0] == WAITING and all(s["object"][i] == "SEALED" for i in s["need"][t]):
                return f"task {t} waits though all it needs is there"
            if s["word"][t][0] == ENDING:
                return f"task {t} is not ended"
        return None

    # ---- the core's functions ----

    def lock_links(self, me: int) -> Program:
        if (yield at(L + "_lock: frt_lock_take"), lock, "links", me) and not self.no("lists are rebuilt after a death"):
            for i in (0, 1):
                sealed = (yield "ghost: is it sealed", get, "object", i) == "SEALED"
                if not (sealed and self.no("rebuild clears sealed lists")):
                    yield at(L + "_rebuild: a32_store_sc(&x.entries[i].waiter, 0)"), put, "waiter", i, 0
            yield at(L + "_rebuild: flags &= ~FRT_TASK_LINKED"), store, "linked", (0, 0)
            for t in (0, 1):
                if (yield at(L + "_rebuild: == FRT_TASK_WAITING"), get, "word", t)[0] == WAITING:
                    yield from self.advance(me, t)

    def advance(self, me: int, t: int) -> Program:
        word, linked, need = yield at(L + "_advance: word = a64_load_acq"), peek, t
        if word[0] != WAITING or (linked and not self.no("linking twice is noticed")):
            return
        for i in (0, 1):
            if i not in need:
                continue
            if (yield at(L + "_advance: if frt_word_state(a64_load_sc"), get, "object", i) == "PENDING":
                yield at(L + "_advance: _append(x, &x.entries[i].waiter, t)"), link, t, i
                if self.no("state is read again after linking"):
                    return
                if (yield at(L + "_advance: if frt_word_state(a64_load_sc"), get, "object", i) == "PENDING":
                    return
                yield at(L + "_advance: _take(x, &x.entries[i].waiter, t)"), unlink, t
        if not self.no("hand-over to the queue is announced"):
            yield at(L + "_advance: pushing, t + 1"), put, "pushing", me, t + 1
        if self.no("READY by swap"):
            yield at(L + "_advance: FRT_TASK_READY"), put, "word", t, (READY, me)
            yield at(L + "_advance: queue_push"), bit_on, "queued", t
        elif (yield at(L + "_advance: FRT_TASK_READY"), swap, t, word, (READY, me)):
            yield at(L + "_advance: queue_push"), bit_on, "queued", t
        yield at(L + "_advance: pushing, 0"), put, "pushing", me, 0

    def wait(self, me: int, t: int) -> Program:
        yield from self.lock_links(me)
        yield from self.advance(me, t)
        yield at(L + "links_wait: _unlock"), unlock, "links"

    def unwait(self, me: int, t: int) -> Program:
        yield from self.lock_links(me)
        if (yield at(L + "_unlink: FRT_TASK_LINKED"), get, "linked", t):
            yield at(L + "_unlink: _take(x, &x.entries[i].waiter, t)"), unlink, t
        yield at(L + "links_unwait: _unlock"), unlock, "links"

    def tell(self, me: int, i: int) -> Program:
        if not (yield at(L + "links_sealed: .waiter) == 0"), get, "waiter", i):
            return
        yield from self.lock_links(me)
        waiter = yield at(L + "links_sealed: waiters = a32_load_rlx(&x.entries[i].waiter"), get, "waiter", i
        if not self.no("list is detached"):
            yield at(L + "links_sealed: a32_store_sc(&x.entries[i].waiter, 0)"), put, "waiter", i, 0
        while waiter:
            t = waiter - 1
            waiter = yield at(L + "links_sealed: _take(x, &waiters, t)"), leave, t
            yield from self.advance(me, t)
        yield at(L + "links_sealed: _unlock"), unlock, "links"

    def seal(self, me: int, i: int) -> Program:
        early = not self.no("sealing is announced first")
        if early:
            yield at(OBJ + "_seal_pending: a32_store_rel(&me.sealing, i + 1)"), put, "sealing", me, i + 1
        yield at(OBJ + "_seal_pending: a64_store_sc(state"), put, "object", i, "SEALED"
        if not early:
            yield at(OBJ + "_seal_pending: a32_store_rel(&me.sealing, i + 1)"), put, "sealing", me, i + 1
        yield from self.tell(me, i)
        yield at(OBJ + "_seal_pending: a32_store_rel(&me.sealing, 0)"), put, "sealing", me, 0

    # ---- who does what ----

    def sealer(self, me: int) -> Program:
        yield from self.seal(me, 0)
        yield from self.seal(me, 1)

    def submit(self, me: int, t: int) -> Program:
        yield at(S + "_commit_task: pushing, t + 1"), put, "pushing", me, t + 1
        yield at(S + "_commit_task: a64_store_sc(x.task_words + t"), put, "word", t, (WAITING, me)
        yield from self.wait(me, t)
        yield at(S + "_commit_task: pushing, 0"), put, "pushing", me, 0

    def submitter(self, me: int) -> Program:
        yield from self.submit(me, 0)
        if self.scenario == "chain":
            yield from self.submit(me, 1)

    def canceller(self, me: int) -> Program:
        word = yield at(T + "_cancel: word = a64_load_sc"), await_task, 0
        if word[0] in (WAITING, READY) and (yield at(T + "_cancel: FRT_TASK_ENDING"), swap, 0, word, (ENDING, me)):
            if not self.no("canceller unlinks"):
                yield from self.unwait(me, 0)
            yield at("records.task_done: FRT_TASK_RESERVED"), renew, 0, me
            yield from self.submit(me, 0)

    def janitor(self, me: int) -> Program:
        first = len(self.programs()) - 2
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, first
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield from self.lock_links(me)
            yield at(L + "links_touch: _unlock"), unlock, "links"
            yield from self.intents(me, v)
            for t in (0, 1):
                word = yield at(R + "_scan_tasks: word = a64_load_acq"), get, "word", t
                if word == (ENDING, v):
                    yield at(R + "_end_here: FRT_TASK_ENDING"), put, "word", t, (ENDING, me)
                    if not self.no("recovery unlinks what it ends"):
                        yield from self.unwait(me, t)
                    yield at("records.task_done: FRT_TASK_RESERVED"), put, "word", t, (GONE, me)
            for i in (0, 1):
                mine = v == (0 if self.scenario == "cancel" else i)
                if mine and (yield at(L + "task_result: FRT_OBJ_PENDING"), get, "object", i) == "PENDING":
                    yield from self.seal(me, i)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            del v, t, i, word, mine

    def intents(self, me: int, v: int) -> Program:
        i = yield at(R + "_intents: t = slot.sealing"), get, "sealing", v
        if i and not self.no("recovery tells what was sealed"):
            yield from self.tell(me, i - 1)
            yield at(R + "_intents: slot.sealing = 0"), put, "sealing", v, 0
        t = yield at(R + "_intents: t = slot.pushing"), get, "pushing", v
        if t:
            word = yield at(R + "_intents: state = frt_word_state"), get, "word", t - 1
            if word[0] == READY:
                yield at(R + "_intents: queue_push"), bit_on, "queued", t - 1
            elif word[0] == WAITING:
                yield from self.wait(me, t - 1)
            yield at(R + "_intents: slot.pushing = 0"), put, "pushing", v, 0
