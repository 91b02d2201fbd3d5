"""The janitor, killed at each step and continued by the next, over a client that died holding one of each kind.

The dead client leaves a container it was freeing (its child goes with it), an entry it was filling (with a block),
one it was deleting, a claimed task, and a task whose results are sealed. A live worker takes what is queued, and a
live client still holds the entry that was being deleted. Every leaving must be dealt with exactly once.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Model, Program, add, at, await_victim, cas, load, lock, put, store, unlock

R, OBJ, L, A, P, Q = "recovery.", "objects.", "references.", "arena.", "pool.", "queue."
VICTIM, EMPTY = 0, ("EMPTY", -1)


def retire(s: Memory, name: str, me: int) -> None:
    """FREEING -> RESERVED(me): the entry lies in our magazine."""
    s["wrong"] = s["wrong"] or s[name][0] != "FREEING"
    s[name] = ("RESERVED", me)


def empty(s: Memory, name: str) -> None:
    s["wrong"] = s["wrong"] or s[name] == EMPTY
    s[name] = EMPTY


def take_task(s: Memory, me: int) -> Any:
    if not s["ring"]:
        return BLOCKED
    s["ring"] -= 1
    return cas(s, "claimed", ("READY", 0), ("CLAIMED", me))


class Janitor(Model):
    LOCKS = ("janitor", "links", "pool")
    SCENARIOS: ClassVar = {"all": 3}
    MUTANTS: ClassVar = {
        "a slot that is DYING is begun again": "all", "slot is freed last": "all", "flag says what is counted": "all",
        "block is freed before it is forgotten": "all", "EMPTY entries are left alone": "all",
        "requeueing is announced": "all", "undecided means sealed": "all",
        "the janitor's own slot is recovered": "all",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "container": ("FREEING", VICTIM), "child": ("SEALED", 0), "counted": 1, "flag": 1,
            "filling": ("RESERVED", VICTIM),
            "block": 1, "home": 1, "deleting": ("DELETING", VICTIM), "claimed": ("CLAIMED", VICTIM), "ring": 0,
            "done": ("RUNNING", VICTIM), "pushing": (0,) * n, "runs": 0, "wrong": False, "stack": (), "links": 0,
            "janitor": 0, "pool": 0, "dead": 1, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        victim = ("victim", self.nobody)
        return [victim, ("worker", self.worker), *((f"janitor{k}", self.janitor) for k in range(4))]

    def nobody(self, me: int) -> Program:
        yield from ()

    def check(self, s: Memory) -> str | None:
        if s["wrong"] or len(set(s["stack"])) < len(s["stack"]):
            return f"something is given back twice; the free stack holds {s['stack']}"
        if s["counted"] < 0:
            return "a count is taken back twice"
        names = ("container", "child", "filling", "deleting", "claimed", "done")
        for name in names:
            state, client = s[name]
            if state not in ("EMPTY", "SEALED", "READY", "GONE") and s["slots"][client] == "FREE":
                return f"{name} is {state} by a client that is not there any more"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if s["home"] or s["block"]:
            return "a block leaks"
        if s["child"][0] == "SEALED" and not s["counted"]:
            return "a child that nobody holds stays"
        if s["claimed"][0] == "READY" and not s["dead"] & 2:
            return "a task is READY and not queued"
        for v, slot in enumerate(s["slots"]):
            if s["dead"] >> v & 1 and slot != "FREE":
                return f"slot {v} of a dead client is not given back"
        return "what was undecided stays" if s["deleting"][0] == "DELETING" else None

    # ---- the core's functions ----

    def touch_links(self, me: int) -> Program:
        if (yield at(L + "_lock: frt_lock_take"), lock, "links", me):
            yield at(L + "_rebuild: a32_sub_sc"), self.recount

    def recount(self, s: Memory) -> None:
        s["counted"] = s["flag"] if s["child"][0] == "SEALED" else 0

    def uncount(self, me: int) -> Program:
        yield from self.touch_links(me)
        if (yield at(L + "links_uncount: if flags[0] & flag"), load, "flag") or self.no("flag says what is counted"):
            yield at(L + "links_uncount: a32_sub_sc"), add, "counted", -1
            yield at(L + "links_uncount: flags[0] &= ~flag"), store, "flag", 0
        yield at(L + "links_uncount: _unlock"), unlock, "links"

    def free_container(self, me: int) -> Program:
        yield from self.uncount(me)
        yield from self.maybe_delete_child(me)
        yield at(OBJ + "object_free: FRT_OBJ_RESERVED"), retire, "container", me

    def maybe_delete_child(self, me: int) -> Program:
        if (yield at(OBJ + "_condemn: if not _held(x, i):"), load, "counted"):
            return
        if (yield at(OBJ + "_condemn: FRT_OBJ_FREEING"), cas, "child", ("SEALED", 0), ("FREEING", me)):
            yield at(OBJ + "object_free: FRT_OBJ_RESERVED"), retire, "child", me

    def free_block(self) -> Program:
        free = at(A + "arena_free: a32_store_rel(_owner"), store, "block", 0
        if not (yield at(A + "arena_free: offset = home[0]"), load, "home"):
            return
        if not self.no("block is freed before it is forgotten"):
            yield free
        yield at(A + "arena_free: a64_store_rel(home, 0)"), store, "home", 0
        if self.no("block is freed before it is forgotten"):
            yield free

    def give_back(self, me: int, name: str) -> Program:
        if (yield at(P + "_lock: frt_lock_take"), lock, "pool", me):
            yield at(P + "_rebuild: pool.free_count = n"), self.rebuild_stack
        yield at(P + "pool_return: FRT_OBJ_EMPTY"), empty, name
        yield at(P + "pool_return: a32_store_rlx(&pool.free_count"), self.push, name
        yield at(P + "pool_return: _unlock"), unlock, "pool"

    def push(self, s: Memory, name: str) -> None:
        s["stack"] = (*s["stack"], name)

    def rebuild_stack(self, s: Memory) -> None:
        s["stack"] = tuple(n for n in ("container", "child", "filling") if s[n] == EMPTY)

    def requeue(self, me: int) -> Program:
        if not self.no("requeueing is announced"):
            yield at(R + "_requeue: pushing, t + 1"), put, "pushing", me, 1
        yield at(R + "_requeue: FRT_TASK_READY"), store, "claimed", ("READY", 0)
        yield at(Q + "queue_push: a64_store_sc(&sb.ring_tail"), add, "ring", 1
        yield at(R + "_requeue: pushing, 0"), put, "pushing", me, 0

    # ---- who does what ----

    def worker(self, me: int) -> Program:
        while True:
            if (yield at(Q + "queue_pop: FRT_TASK_CLAIMED"), take_task, me):
                yield "user code", add, "runs", 1
                yield at("records.task_done: FRT_TASK_RESERVED"), store, "claimed", ("GONE", me)

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), self.victim, me
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield at(R + "recover: FRT_CLIENT_DYING"), put, "slots", v, "DYING"
            if self.no("slot is freed last"):
                yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield from self.touch_links(me)
            yield at(L + "links_touch: _unlock"), unlock, "links"
            if (yield at(R + "_intents: t = slot.pushing"), load, "pushing")[v]:
                if (yield at(R + "_intents: state = frt_word_state"), load, "claimed")[0] == "READY":
                    yield at(R + "_intents: queue_push"), add, "ring", 1
                yield at(R + "_intents: slot.pushing = 0"), put, "pushing", v, 0
            yield from self.scan(me, v)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            del v

    def victim(self, s: Memory, me: int) -> Any:
        left = dict(s)
        if self.no("a slot that is DYING is begun again"):
            left["slots"] = tuple("FREE" if word == "DYING" else word for word in s["slots"])
        if self.no("the janitor's own slot is recovered"):
            left["slots"] = (*left["slots"][:2], *("FREE" for _ in left["slots"][2:]))
        return await_victim(left, me, 2)

    def scan(self, me: int, v: int) -> Program:
        word = at(R + "_scan_tasks: word = a64_load_acq")
        if (yield word, load, "claimed") == ("CLAIMED", v):
            yield from self.requeue(me)
        if (yield word, load, "done") in (("RUNNING", v), ("ENDING", v)):
            yield at(R + "_end_here: FRT_TASK_ENDING"), store, "done", ("ENDING", me)
            yield at("records.task_done: FRT_TASK_RESERVED"), store, "done", ("RESERVED", me)
        elif (yield word, load, "done") == ("RESERVED", v):
            yield at(R + "_unsubmit: pool_return"), store, "done", EMPTY
        word = at(R + "_scan_objects: word = a64_load_acq")
        for name in ("container", "child", "filling", "deleting"):
            found = yield word, load, name
            if found == ("FREEING", v):
                yield at(R + "_scan_objects: FRT_OBJ_FREEING, x.me"), store, name, ("FREEING", me)
                if name == "container":
                    yield from self.free_container(me)
                else:
                    yield at(OBJ + "object_free: FRT_OBJ_RESERVED"), retire, name, me
            elif found == ("RESERVED", v) or (found == EMPTY and self.no("EMPTY entries are left alone")):
                if name == "filling":
                    yield from self.free_block()
                yield from self.give_back(me, name)
            elif found == ("DELETING", v) and not self.no("undecided means sealed"):
                yield at(R + "_scan_objects: frt_word_undeleted(word)"), cas, name, found, ("SEALED", 0)
            elif found == ("SEALED", 0) and name == "child":
                yield from self.maybe_delete_child(me)
