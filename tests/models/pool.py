"""Records of a table: magazines, the free stack and its repair; and client slots, given to the next process.

`word` per record, `stack` and `fresh` under the pool's lock, `kept` a ghost: what lies in each process's magazine.
Scenario `slots`: a newcomer gets the slot of a dead client and with it the stamp on its records.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Model, Program, at, await_victim, get, load, lock, put, unlock

P, R, C = "pool.", "recovery.", "clients."
EMPTY, RECORDS, BATCH = ("EMPTY", -1), 3, 2


def next_record(s: Memory) -> int:
    return s["stack"][-1] if s["stack"] else s["fresh"] if s["fresh"] < RECORDS else -1


def take_off(s: Memory, me: int, i: int) -> None:
    if s["stack"]:
        s["stack"] = s["stack"][:-1]
    else:
        s["fresh"] += 1
    put(s, "kept", me, (*s["kept"][me], i))


def give(s: Memory, me: int, i: int) -> None:
    put(s, "word", i, EMPTY)
    put(s, "kept", me, tuple(k for k in s["kept"][me] if k != i))


def push(s: Memory, i: int) -> None:
    s["stack"] = (*s["stack"], i)


def rebuild(s: Memory) -> None:
    s["stack"] = tuple(i for i in range(s["fresh"]) if s["word"][i] == EMPTY)


def await_slot(s: Memory, slot: int) -> Any:
    return None if s["slots"][slot] == "FREE" else BLOCKED


class Pool(Model):
    LOCKS = ("pool", "janitor")
    SCENARIOS: ClassVar = {"magazines": 3, "slots": 3}
    MUTANTS: ClassVar = {
        "free stack is rebuilt": "magazines", "stamped before it leaves the stack": "magazines",
        "recovery gives stamped records back": "magazines", "a record is given back once": "magazines",
        "slot is freed last": "slots", "one recovery for each death": "slots",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {"word": (EMPTY,) * RECORDS, "stack": (), "fresh": 0, "kept": ((),) * n, "pool": 0, "janitor": 0,
                "dead": 0, "slots": ("LIVE",) * n}  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("client1", self.client), ("client2", self.client), ("nobody", self.nobody)]
        if self.scenario == "slots":
            actors[1:] = [("newcomer", lambda me: self.client(me, 0)), ("recoverer", self.second_recoverer)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def crash(self, s: Memory, me: int) -> None:
        super().crash(s, me)
        put(s, "kept", me, ())

    def stamp(self, process: int) -> int:
        return 0 if self.scenario == "slots" and process == 1 else process

    def check(self, s: Memory) -> str | None:
        for p, kept in enumerate(s["kept"]):
            for i in kept:
                if s["word"][i] != ("RESERVED", self.stamp(p)):
                    return f"record {i} lies in the magazine of process {p} and is {s['word'][i]}"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        free = sorted(i for i in range(s["fresh"]) if s["word"][i] == EMPTY)
        if not s["pool"] and free != sorted(s["stack"]):
            return f"records {free} are empty, the free stack holds {s['stack']}"
        for i, (state, slot) in enumerate(s["word"][: s["fresh"]]):
            if state == "RESERVED" and s["slots"][slot] == "FREE":
                return f"record {i} belongs to a client that is not there any more"
        return None

    # ---- the core's functions ----

    def lock_pool(self, me: int) -> Program:
        if (yield at(P + "_lock: frt_lock_take"), lock, "pool", me) and not self.no("free stack is rebuilt"):
            yield at(P + "_rebuild: pool.free_count = n"), rebuild

    def refill(self, me: int, slot: int) -> Program:
        yield from self.lock_pool(me)
        for _k in range(BATCH):
            i = yield at(P + "_refill: i = free["), next_record
            if i >= 0:
                stamp = at(P + "_refill: FRT_OBJ_RESERVED, x.me"), put, "word", i, ("RESERVED", slot)
                early = not self.no("stamped before it leaves the stack")
                if early:
                    yield stamp
                yield at(P + "_refill: a32_store_rlx(&pool.free_count"), take_off, me, i
                if not early:
                    yield stamp
        yield at(P + "_refill: _unlock"), unlock, "pool"

    def give_back(self, me: int, i: int) -> Program:
        yield from self.lock_pool(me)
        yield at(P + "pool_return: FRT_OBJ_EMPTY"), give, me, i
        yield at(P + "pool_return: a32_store_rlx(&pool.free_count"), push, i
        yield at(P + "pool_return: _unlock"), unlock, "pool"

    # ---- who does what ----

    def client(self, me: int, slot: int = -1) -> Program:
        if slot >= 0:
            yield at(C + "_free_slot: == FRT_CLIENT_FREE"), await_slot, slot
            yield at(C + "admit: FRT_CLIENT_LIVE, 0, gen"), put, "slots", slot, "LIVE again"
        yield from self.refill(me, me if slot < 0 else slot)
        kept = yield at(P + "pool_flush: objects_kept"), get, "kept", me
        if kept:
            yield from self.give_back(me, kept[-1])

    def nobody(self, me: int) -> Program:
        yield from ()

    def second_recoverer(self, me: int) -> Program:
        """Somebody else who has seen the same death; the daemon alone recovers slots, as it alone gives them out."""
        if self.no("one recovery for each death"):
            yield "sees the death", lambda s: None if s["dead"] & 1 else BLOCKED
            yield from self.recover(me, 0)

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), self.victim, me
            yield from self.recover(me, v)
            del v

    def victim(self, s: Memory, me: int) -> Any:
        v = await_victim(s, me, 3)
        again = self.scenario == "slots" and v == 0 and s["slots"][0] == "LIVE again"
        if self.scenario == "slots" and s["slots"][0] == "LIVE again" and (again or v is BLOCKED):
            return 0 if s["dead"] & 2 else next((p for p in range(2, me) if s["dead"] >> p & 1
                                                 and s["slots"][p] != "FREE"), BLOCKED)  # fmt: skip
        return BLOCKED if self.scenario == "slots" and v == 1 else v

    def recover(self, me: int, v: int) -> Program:
        yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
        if (yield at(R + "recover: == FRT_CLIENT_FREE"), get, "slots", v) != "FREE":
            if self.no("slot is freed last"):
                yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            else:
                yield at(R + "recover: FRT_CLIENT_DYING"), put, "slots", v, "DYING"
            yield from self.lock_pool(me)
            yield at(P + "pool_touch: _unlock"), unlock, "pool"
            fresh = yield at(R + "_scan_objects: frt_objects(x)"), load, "fresh"  # before the words: see _refill
            for i in range(fresh):
                word = yield at(R + "_scan_objects: word = a64_load_acq"), get, "word", i
                mine = word == ("RESERVED", v) or (self.no("a record is given back once") and word == EMPTY)
                if mine and not self.no("recovery gives stamped records back"):
                    yield from self.give_back(me, i)
            if not self.no("slot is freed last"):
                yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
        yield at(R + "recover: frt_lock_give"), unlock, "janitor"
