"""The life of one object: holders against deleters, the hand-over of holds, seal, death and recovery.

Scenario `handover`: a driver holds the object, gives it to a task (ref -> counted) and lets go; a worker takes the
task's argument (counted -> ref), ends the task and lets go; somebody else drops a reference at any time.
Scenario `result`: a task's result is sealed while its only holder drops it; the entry is then free for others.
Scenario `stranger`: somebody who knows an object by name only asks for it while it goes and another takes its place.
Scenario `relay`: one process gives the object away, takes it back and gives it away again.
`task` is the record that counts the object: (state, client); `flag` its COUNTED flag. `holding` is a ghost: who
believes that he holds the object.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import (
    BLOCKED,
    Memory,
    Model,
    Program,
    add,
    at,
    await_victim,
    bit_off,
    bit_on,
    cas,
    load,
    lock,
    put,
    store,
    unlock,
)

EMPTY, RESERVED, PENDING, SEALED, DELETING, FREEING = (
    "EMPTY",
    "RESERVED",
    "PENDING",
    "SEALED",
    "DELETING",
    "FREEING",
)
BIAS = 100
OBJ, L, R, T, S = "objects.", "references.", "recovery.", "tasks.", "submission."
NEW, READY, RUNNING, ENDING, GONE, STRAY = (
    "NEW",
    "READY",
    "RUNNING",
    "ENDING",
    "GONE",
    "STRAY",
)


def look(s: Memory, me: int) -> Any:
    """Read the state; the ghost notes whether this makes the reader a holder."""
    if s["word"][0] in (SEALED, PENDING) and s["name"] == 1:
        s["holding"] |= 1 << me
    return (*s["word"], s["name"])


def let_go(s: Memory, me: int) -> None:
    s["refs"] &= ~(1 << me)
    s["holding"] &= ~(1 << me)


def free_entry(s: Memory, me: int) -> None:
    s["name"] = 0
    s["word"] = (RESERVED, me, s["word"][2] + 1)


def return_entry(s: Memory, v: int) -> None:
    if s["word"][:2] == (RESERVED, v):
        s["word"] = (EMPTY, -1, s["word"][2])


def take_entry(s: Memory, me: int) -> bool:
    if s["word"][0] != EMPTY:
        return False
    s["word"] = (RESERVED, me, s["word"][2])
    return True


def seal_new(s: Memory, me: int) -> None:
    s["word"], s["name"] = (SEALED, 0, s["word"][2]), 2


def claim(s: Memory, me: int) -> Any:
    if s["task"][0] == NEW:
        return BLOCKED
    return cas(s, "task", (READY, 0), (RUNNING, me))


class Objects(Model):
    LOCKS = ("links", "janitor")
    SCENARIOS: ClassVar = {"handover": 2, "relay": 3, "result": 3, "stranger": 3}
    MUTANTS: ClassVar = {
        "bit before state": "stranger", "holders again after DELETING": "handover", "FREEING by swap": "stranger",
        "refs before counted": "relay", "failed acquire decides again": "stranger",
        "spared object is decided again": "handover", "bias while counting again": "relay",
        "sealer looks for holders": "result", "janitor puts DELETING back": "handover",
        "janitor clears bits of EMPTY entries": "stranger", "janitor clears bits": "handover",
        "janitor deletes what nobody holds": "handover", "name compared after the bit": "stranger",
        "counts rebuilt after a death": "handover", "count before own ref is dropped": "handover",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        result = self.scenario == "result"
        first = {"result": 0b010, "stranger": 0b010}.get(self.scenario, 0b101)
        return {
            "word": (PENDING if result else SEALED, 0, 0), "name": 1, "refs": first,
            "holding": first, "counted": 0, "flag": 0, "links": 0, "janitor": 0, "dead": 0,
            "task": ({"result": RUNNING, "stranger": GONE}.get(self.scenario, NEW), 0), "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("driver", self.driver), ("worker", self.worker), ("holder", self.holder)]
        if self.scenario == "relay":
            actors = [("relay", self.relay), ("bystander", self.bystander), ("holder", self.holder)]
        if self.scenario == "result":
            actors = [("sealer", self.sealer), ("holder", self.holder)]
        if self.scenario == "stranger":
            actors = [("stranger", self.stranger), ("holder", self.holder)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def crash(self, s: Memory, me: int) -> None:
        super().crash(s, me)
        s["holding"] &= ~(1 << me)

    def check(self, s: Memory) -> str | None:
        gone = s["word"][0] in (FREEING, RESERVED, EMPTY) or not s["name"]
        if gone and s["holding"]:
            return f"an object goes that clients {s['holding']:b} hold"
        counts = s["task"][0] in (READY, RUNNING) if self.scenario == "handover" else not s["dead"] & 1
        if gone and s["flag"] and counts:
            return "an object goes that a task counts"
        if any(word == "FREE" and s["refs"] >> v & 1 for v, word in enumerate(s["slots"])):
            return "a bit of a client that is not there any more stays"
        return "a name leads to another object" if s["task"][0] == STRAY else None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if s["counted"] != s["flag"] and s["word"][0] in (SEALED, PENDING):
            return f"counted is {s['counted']}, records say {s['flag']}"
        if s["word"][0] in (DELETING, FREEING):
            return f"the object stays {s['word'][0]}"
        if s["word"][0] == SEALED and not s["refs"] and not s["flag"]:
            return "an object that nobody holds stays"
        if any(s["dead"] >> v & 1 and word != "FREE" for v, word in enumerate(s["slots"])):
            return None if s["dead"] >> len(s["slots"]) - 3 == 7 else "a dead client is not recovered"
        return None

    # ---- the core's functions ----

    def condemn(self, me: int) -> Program:
        while True:
            word = yield at(OBJ + "_condemn: word = a64_load_sc"), load, "word"
            if word[0] != SEALED or (yield from self.held("!= FRT_OBJ_SPILLED or _held")):
                return False
            deleting = (DELETING, me, word[2])
            if not (yield at(OBJ + "_condemn: if not a64_cas_sc(state, word, deleting)"), cas, "word", word, deleting):
                continue
            held = False
            if not self.no("holders again after DELETING"):
                held = yield from self.held("if not _held")
            freeing = at(OBJ + "_condemn: FRT_OBJ_FREEING")
            if not held:
                if self.no("FREEING by swap"):
                    yield freeing, store, "word", (FREEING, me, word[2])
                    return True
                if (yield freeing, cas, "word", deleting, (FREEING, me, word[2])):
                    return True
            else:
                yield at(OBJ + "_condemn: frt_word_undeleted(deleting)"), cas, "word", deleting, word
                if self.no("spared object is decided again"):
                    return False

    def held(self, text: str) -> Program:
        names = ("counted", "refs") if self.no("refs before counted") else ("refs", "counted")
        if (yield at(OBJ + "_condemn: " + text), load, names[0]):
            return True
        return (yield at(OBJ + "_condemn: " + text), load, names[1]) != 0

    def maybe_delete(self, me: int) -> Program:
        if (yield from self.condemn(me)):
            yield from self.free(me)

    def free(self, me: int) -> Program:
        yield at(OBJ + "object_free: FRT_OBJ_RESERVED, x.me"), free_entry, me
        yield at("pool.pool_return: FRT_OBJ_EMPTY"), return_entry, me

    def acquire(self, me: int) -> Program:
        bit = at(OBJ + "object_acquire: a64_or_sc(bits, x.me_bit)"), bit_on, "refs", me
        if not self.no("bit before state"):
            yield bit
        word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), look, me
        while word[0] == DELETING:
            yield at(OBJ + "object_acquire: a64_cas_sc(state, word"), cas, "word", word[:3], (SEALED, 0, word[2])
            word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), look, me
        if self.no("bit before state"):
            yield bit
        if word[0] in (SEALED, PENDING) and (word[3] == 1 or self.no("name compared after the bit")):
            return True
        yield at(OBJ + "object_acquire: a64_and_sc(bits, ~x.me_bit)"), bit_off, "refs", me
        if not self.no("failed acquire decides again"):
            yield from self.maybe_delete(me)
        return False

    def release(self, me: int) -> Program:
        yield at(OBJ + "object_release: a64_and_sc("), let_go, me
        yield from self.maybe_delete(me)

    def count(self, me: int) -> Program:
        yield from self.lock_links(me)
        yield at(L + "links_count: a32_add_sc"), add, "counted", 1
        yield at(L + "links_count: flags[0] |= flag"), store, "flag", 1
        yield at(L + "links_count: _unlock"), unlock, "links"

    def uncount(self, me: int) -> Program:
        yield from self.lock_links(me)
        if (yield at(L + "links_uncount: if flags[0] & flag"), load, "flag"):
            if (yield at(L + "links_uncount: if links_names"), load, "name") == 1:
                yield at(L + "links_uncount: a32_sub_sc"), add, "counted", -1
            yield at(L + "links_uncount: flags[0] &= ~flag"), store, "flag", 0
        yield at(L + "links_uncount: _unlock"), unlock, "links"

    def lock_links(self, me: int) -> Program:
        if (yield at(L + "_lock: frt_lock_take"), lock, "links", me) and not self.no("counts rebuilt after a death"):
            bias = 0 if self.no("bias while counting again") else BIAS
            yield at(L + "_rebuild: counted, BIAS"), store, "counted", bias
            if (yield at(L + "_rebuild: FRT_TASK_COUNTED"), load, "flag") and (
                yield at(L + "_count: if links_names"), load, "name"
            ) == 1:
                yield at(L + "_count: a32_add_sc"), add, "counted", 1
            yield at(L + "_rebuild: a32_sub_sc"), add, "counted", -bias

    # ---- who does what ----

    def driver(self, me: int) -> Program:
        early = self.no("count before own ref is dropped")
        if early:
            yield from self.release(me)
        yield from self.count(me)
        yield at(S + "_commit_task: a64_store_sc(x.task_words + t"), store, "task", (READY, 0)
        if not early:
            yield from self.release(me)

    def relay(self, me: int) -> Program:
        """Gives the object to a task, takes it back and gives it away again: ref -> counted -> ref -> counted."""
        yield from self.count(me)
        yield from self.release(me)
        yield from self.acquire(me)
        yield from self.uncount(me)
        yield from self.maybe_delete(me)
        yield from self.count(me)
        yield from self.release(me)

    def bystander(self, me: int) -> Program:
        """Counts other objects; dies where it hurts."""
        yield from self.lock_links(me)
        yield at(L + "links_count: _unlock"), unlock, "links"

    def worker(self, me: int) -> Program:
        if (yield at("queue.queue_pop: FRT_TASK_CLAIMED"), claim, me):
            held = yield from self.acquire(me)
            yield from self.task_done(me)
            if held:
                yield from self.release(me)

    def task_done(self, me: int) -> Program:
        yield from self.uncount(me)
        yield from self.maybe_delete(me)
        yield at("records.task_done: FRT_TASK_RESERVED"), store, "task", (GONE, me)

    def holder(self, me: int) -> Program:
        """Drops its reference; then puts another object, if the entry is free."""
        yield from self.release(me)
        another = self.scenario in ("result", "stranger")
        if another and (yield at("pool._refill: FRT_OBJ_RESERVED, x.me"), take_entry, me):
            yield at(OBJ + "object_seal_new: object_hold_new"), bit_on, "refs", me
            yield at(OBJ + "object_seal_new: a64_store_rel"), seal_new, me
            yield from self.release(me)

    def stranger(self, me: int) -> Program:
        if (yield from self.acquire(me)):
            if (yield "ghost: which object is it", load, "name") != 1:
                yield "ghost: it is another", store, "task", (STRAY, 0)
            yield from self.release(me)

    def sealer(self, me: int) -> Program:
        yield at(OBJ + "_seal_pending: a64_store_sc(state"), store, "word", (SEALED, 0, 0)
        held = yield at(OBJ + "_seal_pending: if not frt_any"), load, "refs"
        if not held and not self.no("sealer looks for holders"):
            yield from self.maybe_delete(me)
        yield at("records.task_done: FRT_TASK_RESERVED"), store, "task", (GONE, me)

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, len(self.programs()) - 3
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield at(R + "recover: FRT_CLIENT_DYING"), put, "slots", v, "DYING"
            yield from self.lock_links(me)
            yield at(L + "links_touch: _unlock"), unlock, "links"
            to_seal = yield from self.scan_task(me, v)
            yield from self.scan_object(me, v)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            if to_seal:
                yield from self.sealer(me)
            del v, to_seal

    def scan_task(self, me: int, v: int) -> Program:
        task = yield at(R + "_scan_tasks: word = a64_load_acq"), load, "task"
        if task[0] == READY and v == 0 and self.scenario != "result":
            if not (yield at(R + "_take_waiting: FRT_TASK_ENDING, x.me"), cas, "task", task, (ENDING, me)):
                return False
        elif task[0] == NEW and v == 0:
            yield from self.uncount(me)
            yield at(R + "_unsubmit: pool_return(x, True"), store, "task", (GONE, me)
            return False
        elif task in ((RUNNING, v), (ENDING, v)):
            yield at(R + "_end_here: FRT_TASK_ENDING"), store, "task", (ENDING, me)
        else:
            return False
        if self.scenario == "result":
            return (yield at(L + "task_result: FRT_OBJ_PENDING"), load, "word")[0] == PENDING
        yield from self.task_done(me)
        return False

    def scan_object(self, me: int, v: int) -> Program:
        word = yield at(R + "_scan_objects: word = a64_load_acq"), load, "word"
        if word[:2] == (RESERVED, v):
            yield at(R + "_scan_objects: a64_and_sc(refs, ~bit)"), bit_off, "refs", v
            yield at(R + "_scan_objects: pool_return"), return_entry, v
            return
        if word[:2] == (FREEING, v):
            yield at(R + "_scan_objects: FRT_OBJ_FREEING, x.me"), store, "word", (FREEING, me, word[2])
            yield from self.free(me)
            return
        if word[:2] == (DELETING, v) and not self.no("janitor puts DELETING back"):
            yield at(R + "_scan_objects: frt_word_undeleted(word)"), cas, "word", word, (SEALED, 0, word[2])
        if word[0] == EMPTY and self.no("janitor clears bits of EMPTY entries"):
            return
        if not self.no("janitor clears bits"):
            yield at(R + "_scan_objects: a64_and_sc(refs, ~bit)"), bit_off, "refs", v
        held = yield at(R + "_scan_objects: if not frt_any"), load, "refs"
        if not held and not self.no("janitor deletes what nobody holds"):
            yield from self.maybe_delete(me)
