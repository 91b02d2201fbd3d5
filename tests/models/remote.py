"""A copy of a value that another node keeps: dropped by the daemon while the uplink learns that the node is lost.

The uplink detaches the copy: it becomes an ordinary value. If the bytes are not here, the uplink makes them again. A
pinner reads the value, now or once the bytes are back. `remote` is the entry's flag.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Program, at, await_victim, bit_off, cas, load, store
from .spilling import OBJ, RESTORING, SEALED, SPILLED, SPILLING, Spilling, W, alloc, unpin

M = "remote."


def await_decision(s: Memory) -> Any:
    return BLOCKED if s["word"][0] == RESTORING else None


class Remote(Spilling):
    SCENARIOS: ClassVar = {"all": 1}
    MUTANTS: ClassVar = {
        "drop reads the flag after SPILLING": "all", "detach reads the state last": "all",
        "detach swaps SPILLING back": "all",
        "replaced value is SEALED after its bytes": "all", "pins are read after SPILLING": "all",
        "who pins puts SPILLING back": "all", "recovery takes spilled entries by swap": "all",
    }  # fmt: skip

    def memory(self) -> Memory:
        return {**super().memory(), "remote": 1}

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("daemon", self.daemon), ("uplink", self.uplink), ("pinner", self.pinner)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        state = s["word"][0]
        if s["name"] == 1 and state == SPILLED:
            return "a value whose source is lost has no bytes"
        return super().quiet(s, asleep)

    # ---- the core's functions ----

    def drop(self, me: int) -> Program:
        word = yield at(M + "drop_copy: word = a64_load_sc"), load, "word"
        spilling, restoring = (SPILLING, me, SEALED), (RESTORING, me, SEALED)
        if word[0] != SEALED or not (yield at(M + "drop_copy: not _is_copy"), load, "remote"):
            return
        if not (yield at(M + "drop_copy: not a64_cas_sc(state, word, spilling)"), cas, "word", word, spilling):
            return
        free = not self.no("pins are read after SPILLING") and (yield at(M + "drop_copy: FRT_PINS"), load, "pins")
        if not free and not self.no("drop reads the flag after SPILLING"):
            free = not (yield at(M + "drop_copy: or not _is_copy"), load, "remote")
        if free or not (yield at(M + "drop_copy: restoring):"), cas, "word", spilling, restoring):
            yield at(M + "drop_copy: a64_cas_sc(state, spilling, frt_word"), cas, "word", spilling, (SEALED, 0, SEALED)
            yield from self.maybe_delete(me)
            return
        yield from self.free_block(at(M + "drop_copy: rc = arena_free"))
        yield at(M + "drop_copy: a64_store_sc(state, dropped)"), store, "word", (SPILLED, me, SEALED)
        yield from self.maybe_delete(me)

    def detach(self, me: int) -> Program:
        while True:
            yield at(M + "detach: a8_and_sc"), store, "remote", 0
            if self.no("detach reads the state last"):
                return True
            word = yield at(M + "detach: word = a64_load_sc"), load, "word"
            is_undecided = word[0] == SPILLING and not self.no("detach swaps SPILLING back")
            if is_undecided and not (yield at(M + "detach: not a64_cas_sc"), cas, "word", word, (SEALED, 0, SEALED)):
                continue
            if word[0] not in (SPILLED, RESTORING):
                return True
            if word[0] == SPILLED:
                return False
            yield at(M + "detach: time.sleep"), await_decision

    def replace(self, me: int) -> Program:
        word = yield at(M + "_begin: word = a64_load_sc"), load, "word"
        to = (RESTORING, me, SEALED)
        if word[0] != SPILLED or not (yield at(M + "_begin: not a64_cas_sc"), cas, "word", word, to):
            return
        early = self.no("replaced value is SEALED after its bytes")
        if early:
            yield at(M + "_publish: FRT_OBJ_SEALED"), store, "word", (SEALED, 0, SEALED)
        yield at(M + "_begin: arena_alloc"), alloc
        yield at(M + "_publish: a8_and_sc"), store, "remote", 0
        if not early:
            yield at(M + "_publish: FRT_OBJ_SEALED"), store, "word", (SEALED, 0, SEALED)
        yield from self.maybe_delete(me)

    # ---- who does what ----

    def daemon(self, me: int) -> Program:
        yield from self.drop(me)

    def uplink(self, me: int) -> Program:
        yield from self.lose(me)
        yield at(OBJ + "object_release: a64_and_sc("), bit_off, "refs", me
        yield from self.maybe_delete(me)

    def lose(self, me: int) -> Program:
        while not (yield from self.detach(me)):
            yield from self.replace(me)

    def pinner(self, me: int) -> Program:
        while not (yield from self.pin(me)):
            yield at(W + "wait_resident: rc = wait_nap"), self.await_bytes_again
        yield at(OBJ + "object_release: a64_and_sc("), unpin, me
        yield at(OBJ + "object_release: a64_and_sc("), bit_off, "refs", me
        yield from self.maybe_delete(me)

    def await_bytes_again(self, s: Memory) -> Any:
        return BLOCKED if s["word"][0] in (SPILLED, RESTORING) else None

    def next_job(self, s: Memory, me: int) -> Any:
        """The successor of a dead uplink loses the value too."""
        v = await_victim(s, me, 3)
        orphan = s["dead"] & 2 and not any(not s["dead"] >> j & 1 for j in range(3, me))
        return -1 if v is BLOCKED and orphan and s["word"][0] == SPILLED and s["name"] == 1 else v

    def restore(self, me: int) -> Program:
        yield from self.lose(me)
