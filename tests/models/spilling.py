"""A sealed value whose bytes go to a file and come back, against those who pin it and those who delete it.

The daemon spills the value and restores it when somebody asks. `home` says whether the entry names the one block,
`owner` whether the block is the entry's (1). A holder lets go; if that frees the entry it writes another value in
it, in the same block if that is free. A pinner reads the value once and lets go. `pinned` is a ghost: who reads.

`flag` is FRT_ENTRY_FILE, `file` the file of the first value: who frees the entry with its flag removes the file. The
spiller holds the value while it writes, so that the file is not made after that.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import (
    BLOCKED,
    Memory,
    Model,
    Program,
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

S, OBJ, R, A, W = "spill.", "objects.", "recovery.", "arena.", "wait."
SEALED, SPILLING, SPILLED, RESTORING = "SEALED", "SPILLING", "SPILLED", "RESTORING"
DELETING, FREEING, RESERVED, EMPTY = "DELETING", "FREEING", "RESERVED", "EMPTY"


def held(s: Memory) -> bool:
    return bool(s["refs"] or s["pins"])


def look(s: Memory, me: int) -> Any:
    if s["word"][0] == SEALED and s["name"] == 1:
        s["pinned"] |= 1 << me
    return s["word"]


def unpin(s: Memory, me: int) -> None:
    s["pins"] &= ~(1 << me)
    s["pinned"] &= ~(1 << me)


def unlink(s: Memory) -> None:
    if s["flag"] and s["name"] == 1:
        s["file"] = 0


def retire(s: Memory, me: int) -> None:
    s["name"], s["flag"], s["word"] = 0, 0, (RESERVED, me, SEALED)


def alloc(s: Memory) -> bool:
    if s["owner"]:
        return False  # another block; of no interest
    s["home"] = s["owner"] = 1
    return True


def await_bytes(s: Memory) -> Any:
    return BLOCKED if s["word"][0] in (SPILLED, RESTORING) else None


def await_order(s: Memory) -> Any:
    if s["wanted"] and s["word"][0] == SPILLED:
        return True
    return BLOCKED if s["name"] == 1 else False


class Spilling(Model):
    LOCKS = ("janitor",)
    SCENARIOS: ClassVar = {"all": 1}
    MUTANTS: ClassVar = {
        "spiller holds what it writes": "all", "recovery takes spilled entries by swap": "all",
        "pins are read after SPILLING": "all", "who pins puts SPILLING back": "all", "spiller commits by swap": "all",
        "spiller decides again": "all", "SEALED after the bytes": "all",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "word": (SEALED, 0, SEALED), "name": 1, "refs": 0b110, "pins": 0, "pinned": 0, "home": 1, "owner": 1,
            "flag": 0, "file": 0, "wanted": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("daemon", self.daemon), ("holder", self.holder), ("pinner", self.pinner)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def crash(self, s: Memory, me: int) -> None:
        super().crash(s, me)
        s["pinned"] &= ~(1 << me)

    def check(self, s: Memory) -> str | None:
        bytes_are_there = s["home"] and s["owner"]
        if s["pinned"] and not (bytes_are_there and s["word"][0] in (SEALED, SPILLING, DELETING)):
            return f"a value that is read is {s['word'][0]}"
        if s["word"][0] == SEALED and s["name"] and not bytes_are_there:
            return "a value is SEALED and its bytes are not there"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        state = s["word"][0]
        if state in (SEALED, SPILLED) and not held(s):
            return "an object that nobody holds stays"
        if state in (SPILLING, RESTORING, DELETING, FREEING):
            return f"the object stays {state}"
        if s["owner"] and state in (SPILLED, EMPTY):
            return f"the block of an object that is {state} leaks"
        if s["file"] and s["name"] != 1:
            return "the file of a value that is gone stays"
        return "the pinner waits for ever" if "pinner" in asleep else None

    # ---- the core's functions ----

    def maybe_delete(self, me: int) -> Program:
        while True:
            word = yield at(OBJ + "_condemn: word = a64_load_sc"), load, "word"
            if word[0] not in (SEALED, SPILLED) or (yield at(OBJ + "_condemn: or _held"), held):
                return
            deleting = (DELETING, me, word[0])
            if not (yield at(OBJ + "_condemn: (state, word, deleting)"), cas, "word", word, deleting):
                continue
            if (yield at(OBJ + "_condemn: if not _held"), held):
                yield at(OBJ + "_condemn: frt_word_undeleted"), cas, "word", deleting, (word[0], 0, SEALED)
            elif (yield at(OBJ + "_condemn: FRT_OBJ_FREEING"), cas, "word", deleting, (FREEING, me, SEALED)):
                yield from self.free(me)
                return

    def free(self, me: int) -> Program:
        yield from self.free_block(at(OBJ + "object_free: arena_free"))
        yield at(OBJ + "object_free: spill_remove"), unlink
        yield at(OBJ + "object_free: FRT_OBJ_RESERVED"), retire, me

    def free_block(self, where: str) -> Program:
        if (yield at(A + "arena_free: offset = home[0]"), load, "home"):
            yield where, store, "owner", 0
            yield at(A + "arena_free: a64_store_rel(home, 0)"), store, "home", 0

    def spill(self, me: int) -> Program:
        holds = self.no("spiller holds what it writes") or (yield from self.hold(me))
        if holds and (yield from self.write(me)):
            yield from self.free_block(at(S + "commit: arena_free"))
            yield at(S + "commit: FRT_OBJ_SPILLED"), store, "word", (SPILLED, me, SEALED)
        yield at(OBJ + "object_release: a64_and_sc("), bit_off, "refs", me
        if not self.no("spiller decides again"):
            yield from self.maybe_delete(me)

    def hold(self, me: int) -> Program:
        """Take a reference to the first value; False if it is gone."""
        yield at(OBJ + "object_acquire: a64_or_sc(bits, x.me_bit)"), bit_on, "refs", me
        word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), load, "word"
        while word[0] == DELETING:
            yield at(OBJ + "object_acquire: a64_cas_sc(state, word"), cas, "word", word, (word[2], 0, SEALED)
            word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), load, "word"
        return (yield at(OBJ + "object_acquire: objref) == objref"), load, "name") == 1 and word[0] == SEALED

    def write(self, me: int) -> Program:
        """Write the file of the first value; whether its block may be freed now."""
        word = yield at(S + "begin: word = a64_load_sc"), load, "word"
        spilling = (SPILLING, me, SEALED)
        if word[0] != SEALED or not (yield at(S + "begin: a64_cas_sc"), cas, "word", word, spilling):
            return False
        first = (yield "ghost: is it the first value", load, "name") == 1
        if not self.no("pins are read after SPILLING") and (yield at(S + "begin: FRT_PINS"), load, "pins"):
            yield at(S + "_unspill: a64_cas_sc"), cas, "word", spilling, (SEALED, 0, SEALED)
            return False
        yield at(S + "begin: FRT_ENTRY_FILE"), store, "flag", 1
        if first:
            yield "the file is made", store, "file", 1
        to = (RESTORING, me, SEALED)
        if self.no("spiller commits by swap"):
            yield at(S + "commit: a64_cas_sc"), store, "word", to
            return True
        return (yield at(S + "commit: a64_cas_sc"), cas, "word", spilling, to)

    def restore(self, me: int) -> Program:
        word = yield at(S + "begin_restore: word = a64_load_sc"), load, "word"
        to = (RESTORING, me, SEALED)
        if word[0] != SPILLED or not (yield at(S + "begin_restore: FRT_OBJ_RESTORING"), cas, "word", word, to):
            return
        early = self.no("SEALED after the bytes")
        if early:
            yield at(S + "finish_restore: FRT_OBJ_SEALED"), store, "word", (SEALED, 0, SEALED)
        yield at(S + "begin_restore: arena_alloc"), alloc
        if not early:
            yield at(S + "finish_restore: FRT_OBJ_SEALED"), store, "word", (SEALED, 0, SEALED)
        yield from self.maybe_delete(me)

    def pin(self, me: int) -> Program:
        yield at(OBJ + "object_acquire: a64_or_sc(bits, x.me_bit)"), bit_on, "pins", me
        word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), look, me
        undecided = (DELETING, SPILLING)
        if word[0] == SPILLING and self.no("who pins puts SPILLING back"):
            undecided = (DELETING,)
            yield "ghost: reads", bit_on, "pinned", me
        while word[0] in undecided:
            yield at(OBJ + "object_acquire: a64_cas_sc(state, word"), cas, "word", word, (word[2], 0, SEALED)
            word = yield at(OBJ + "object_acquire: word = a64_load_sc(state)"), look, me
        if word[0] == SEALED or word[0] not in (SPILLED, RESTORING):
            return True
        yield at(OBJ + "object_acquire: a64_and_sc(bits, ~x.me_bit)"), bit_off, "pins", me
        yield from self.maybe_delete(me)
        return False

    # ---- who does what ----

    def daemon(self, me: int) -> Program:
        yield from self.spill(me)
        while (yield "order to restore", await_order):
            yield from self.restore(me)

    def holder(self, me: int) -> Program:
        yield at(OBJ + "object_release: a64_and_sc("), bit_off, "refs", me
        yield from self.maybe_delete(me)
        if (yield "ghost: is it mine now", load, "word")[:2] != (RESERVED, me):
            return
        if (yield at(OBJ + "object_room: arena_alloc"), alloc):
            yield at(OBJ + "object_seal_new: object_hold_new"), bit_on, "refs", me
            yield at(OBJ + "object_seal_new: a64_store_rel"), self.seal_new

    def seal_new(self, s: Memory) -> None:
        s["word"], s["name"] = (SEALED, 0, SEALED), 2

    def pinner(self, me: int) -> Program:
        while not (yield from self.pin(me)):
            yield "ask the daemon", store, "wanted", 1
            yield at(W + "wait_resident: rc = wait_nap"), await_bytes
        yield at(OBJ + "object_release: a64_and_sc("), unpin, me
        yield at(OBJ + "object_release: a64_and_sc("), bit_off, "refs", me
        yield from self.maybe_delete(me)

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), self.next_job, me
            if v < 0:
                yield from self.restore(me)
                continue
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield from self.scan(me, v)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            del v

    def next_job(self, s: Memory, me: int) -> Any:
        """The daemon's successor buries the dead, and restores what somebody wants."""
        v = await_victim(s, me, 3)
        orphan = s["dead"] & 1 and not any(not s["dead"] >> j & 1 for j in range(3, me))
        return -1 if v is BLOCKED and orphan and s["wanted"] and s["word"][0] == SPILLED else v

    def scan(self, me: int, v: int) -> Program:
        word = yield at(R + "_scan_objects: word = a64_load_acq"), load, "word"
        if word[1] == v and word[0] == RESERVED:
            yield at(R + "_scan_objects: a64_and_sc(refs, ~bit)"), bit_off, "refs", v
            yield from self.free_block(at(R + "_scan_objects: object_empty"))
            yield at(R + "_scan_objects: pool_return"), store, "word", (EMPTY, 0, SEALED)
            return
        if word[1] == v and word[0] == FREEING:
            yield at(R + "_scan_objects: FRT_OBJ_FREEING, x.me"), store, "word", (FREEING, me, SEALED)
            yield from self.free(me)
            return
        if word[1] == v and word[0] in (SPILLED, RESTORING):
            taken = True
            if not self.no("recovery takes spilled entries by swap"):
                taken = yield (
                    at(R + "_scan_objects: FRT_OBJ_RESTORING, x.me"),
                    cas,
                    "word",
                    word,
                    (RESTORING, me, SEALED),
                )
            if taken:
                yield from self.free_block(at(R + "_scan_objects: arena_free"))
                yield at(R + "_scan_objects: FRT_OBJ_SPILLED, x.me"), store, "word", (SPILLED, me, SEALED)
        elif word[1] == v and word[0] in (SPILLING, DELETING):
            yield at(R + "_scan_objects: frt_word_undeleted"), cas, "word", word, (word[2], 0, SEALED)
        yield at(R + "_scan_objects: a64_and_sc(refs, ~bit)"), bit_off, "refs", v
        yield at(R + "_scan_objects: a64_and_sc(pins, ~bit)"), bit_off, "pins", v
        if not (yield at(R + "_scan_objects: if not frt_any"), load, "refs"):
            yield from self.maybe_delete(me)
