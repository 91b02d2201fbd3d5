"""Sleeping and waking: a sleeper with something to do and nobody who will wake it is a violation.

A futex sleeps in two steps, as the kernel has it: it compares the word, then sleeps until somebody calls wake,
however the word changes. Scenario `idle`: tasks come while workers spin, sleep and die. `leaving`: one of the
workers gives up and leaves. `nap`: as `idle`, but nobody sleeps longer than 50 ms while there is work: with it, no
lost wake-up does more harm than that. `parked`: the daemon parks one of the workers; `unparked`: it lets it go on.
`sealed`: one waits for one result, one for two, without the nap.
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
    get,
    load,
    lock,
    put,
    store,
    unlock,
)

W, Q, C, R, OBJ = "wait.", "queue.", "clients.", "recovery.", "objects."


def take(s: Memory, me: int) -> bool:
    """Pop a task, if there is one, and this worker is not parked; the queue has a model of its own."""
    if not s["queue"] or s["parked"] >> me & 1:
        return False
    s["queue"] -= 1
    return True


def count(s: Memory, name: str, c: int, by: int) -> int:
    put(s, name, c, s[name][c] + by)
    return s[name][c]


def fall_asleep(s: Memory, me: int, seen: int) -> bool:
    """The kernel's half of a futex wait: False when the word has changed already."""
    if s["wake"][me] != seen:
        return False
    s["asleep"] |= 1 << me
    return True


def doze(s: Memory, me: int, nap: bool, leaves: bool) -> Any:
    """Woken: True. A nap ends by itself when there is work; one who leaves, at any time (False)."""
    if s["asleep"] >> me & 1 and not leaves and not (nap and s["queue"]):
        return BLOCKED
    woken = not s["asleep"] >> me & 1
    s["asleep"] &= ~(1 << me)
    return woken or nap


class Wakes(Model):
    LOCKS = ("janitor",)
    SCENARIOS: ClassVar = {"idle": 1, "leaving": 1, "nap": 0, "parked": 1, "unparked": 1, "sealed": 1}
    MUTANTS: ClassVar = {
        "idle bit before the last look": "idle", "spinner passes the word on": "idle",
        "who was woken passes the word on": "idle", "who leaves passes the word on": "leaving",
        "wake word is read before the last look": "idle", "sleepers are counted before sleep": "idle",
        "word is bumped before sleepers are read": "idle", "sealed before telling": "sealed",
        "wait bit before the look": "sealed", "everybody is woken after a death": "idle",
        "a dead spinner is replaced": "idle",
        "who is parked is woken": "unparked", "who was woken and found nothing passes the word on": "parked",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "queue": 0, "spinner": 0, "idle": 0, "wake": (0,) * n, "sleepers": (0,) * n, "asleep": 0, "sealed": (0, 0),
            "waits": (0, 0), "parked": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("submitter", self.submitter), ("worker1", self.worker), ("worker2", self.worker)]
        if self.scenario == "leaving":
            actors[1] = ("leaver", lambda me: self.worker(me, leaves=True))
        if self.scenario in ("parked", "unparked"):
            actors[0] = ("submitter", self.submitter_and_daemon)
        if self.scenario == "sealed":
            actors = [("sealer", self.sealer), ("waiter1", self.wait_sealed), ("waiter2", self.wait_both)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(2))]

    def crash(self, s: Memory, me: int) -> None:
        super().crash(s, me)
        s["asleep"] &= ~(1 << me)

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if s["queue"] and any(name == f"worker{c}" and not s["parked"] >> c & 1 for name in asleep for c in (1, 2)):
            return "a worker sleeps while there is work"
        if self.scenario == "sealed" and s["sealed"] == (1, 1) and any(name.startswith("waiter") for name in asleep):
            return "a client sleeps though its result is there"
        return None

    # ---- the core's functions ----

    def client_wake(self, c: int) -> Program:
        bump = at(C + "client_wake: a32_add_sc(&slot.wake"), count, "wake", c, 1
        if not self.no("word is bumped before sleepers are read"):
            yield bump
        sleepers = yield at(C + "client_wake: if a32_load_sc(&slot.sleepers)"), get, "sleepers", c
        if self.no("word is bumped before sleepers are read"):
            yield bump
        if sleepers:
            yield at(C + "client_wake: frt_futex_wake"), bit_off, "asleep", c

    def wake_idle(self) -> Program:
        if (yield at(Q + "queue_wake_idle: sb.spinner"), load, "spinner"):
            return
        while bits := (yield at(Q + "queue_wake_idle: bits = a64_load_sc(&x.sb.idle"), load, "idle"):
            c = (bits & -bits).bit_length() - 1
            if (yield at(Q + "queue_wake_idle: if a64_and_sc"), bit_off, "idle", c):
                yield from self.client_wake(c)
                return

    def nap(self, me: int, seen: int, leaves: bool = False) -> Program:
        early = not self.no("sleepers are counted before sleep")
        if early:
            yield at(W + "wait_nap: a32_add_sc(&me.sleepers"), count, "sleepers", me, 1
        woken = True
        if (yield at(W + "wait_nap: frt_futex_wait"), fall_asleep, me, seen):
            if not early:
                yield at(W + "wait_nap: a32_add_sc(&me.sleepers"), count, "sleepers", me, 1
            woken = yield at(W + "wait_nap: frt_futex_wait"), doze, me, self.scenario == "nap", leaves
        elif not early:
            return True
        yield at(W + "wait_nap: a32_sub_sc(&me.sleepers"), count, "sleepers", me, -1
        return woken

    def pass_on(self) -> Program:
        if (yield at(W + "wait_task: if queue_length"), load, "queue"):
            yield from self.wake_idle()

    def wait_task(self, me: int, leaves: bool) -> Program:
        """Whether it has got a task; False when it leaves."""
        spin = True
        while True:
            seen = -1
            if not self.no("wake word is read before the last look"):
                seen = yield at(W + "wait_task: seen = a32_load_sc"), get, "wake", me
            if (yield at(W + "wait_task: if a32_load_sc(&x.clients[x.me].parked)"), load, "parked") >> me & 1:
                yield from self.nap(me, seen)
                continue
            if (yield at(W + "wait_task: t = queue_pop"), take, me):
                return True
            if spin and (yield at(W + "wait_task: a32_cas_sc(&x.sb.spinner"), cas, "spinner", 0, me + 1):
                got = yield at(W + "_spin_for_task: t = queue_pop"), take, me
                yield at(W + "wait_task: a32_store_sc(&x.sb.spinner, 0)"), store, "spinner", 0
                if got:
                    if not self.no("spinner passes the word on"):
                        yield from self.pass_on()
                    return True
                del got
            early = not self.no("idle bit before the last look")
            if early:
                yield at(W + "wait_task: a64_or_sc(&x.sb.idle"), bit_on, "idle", me
            got = yield at(W + "wait_task: t = queue_pop"), take, me
            if not early:
                yield at(W + "wait_task: a64_or_sc(&x.sb.idle"), bit_on, "idle", me
            woken = True
            if not got:
                if seen < 0:
                    seen = yield at(W + "wait_task: seen = a32_load_sc"), get, "wake", me
                woken = yield from self.nap(me, seen, leaves)
                got = yield at(W + "wait_task: t = queue_pop"), take, me
            yield at(W + "wait_task: a64_and_sc(&x.sb.idle"), bit_off, "idle", me
            if got:
                if not self.no("who was woken passes the word on"):
                    yield from self.pass_on()
                return True
            rule = "who was woken and found nothing passes the word on" if woken else "who leaves passes the word on"
            if not self.no(rule):
                yield from self.pass_on()
            if not woken:
                return False
            spin = False
            del seen, early, woken, got, rule

    # ---- who does what ----

    def submitter(self, me: int) -> Program:
        for _k in range(2 if self.scenario != "leaving" else 1):
            yield at(Q + "queue_push: a64_store_sc(&sb.ring_tail"), add, "queue", 1
            yield from self.wake_idle()

    def submitter_and_daemon(self, me: int) -> Program:
        """The daemon's part is in this program, so that there are no more states: its tasks come at any moment, too."""
        yield from self.park(True)
        yield at(Q + "queue_push: a64_store_sc(&sb.ring_tail"), add, "queue", 1
        yield from self.wake_idle()
        if self.scenario == "unparked":
            yield from self.park(False)

    def park(self, parked: bool) -> Program:
        yield at(C + "park: a32_store_sc(&slot.parked"), bit_on if parked else bit_off, "parked", 1
        if not self.no("who is parked is woken"):
            yield from self.client_wake(1)

    def worker(self, me: int, leaves: bool = False) -> Program:
        """One task keeps a worker busy for good: nobody else's may depend on its coming back."""
        yield from self.wait_task(me, leaves)

    def sealer(self, me: int) -> Program:
        for i in (0, 1):
            seal = at(OBJ + "_seal_pending: a64_store_sc(state"), put, "sealed", i, 1
            if not self.no("sealed before telling"):
                yield seal
            yield from self.tell(i)
            if self.no("sealed before telling"):
                yield seal

    def tell(self, i: int) -> Program:
        if (yield at(OBJ + "object_tell: if a64_load_sc(waits)"), get, "waits", i):
            bits = yield at(OBJ + "object_tell: bits = a64_and_sc(waits, 0)"), self.take_bits, i
            for c in (1, 2):
                if bits >> c & 1:
                    yield from self.client_wake(c)

    def take_bits(self, s: Memory, i: int) -> int:
        bits = s["waits"][i]
        put(s, "waits", i, 0)
        return bits

    def mark(self, s: Memory, i: int, me: int) -> None:
        put(s, "waits", i, s["waits"][i] | 1 << me)

    def wait_sealed(self, me: int) -> Program:
        while True:
            seen = yield at(W + "wait_sealed: seen = a32_load_sc"), get, "wake", me
            mark = at(W + "wait_sealed: a64_or_sc(bits"), self.mark, 0, me
            if not self.no("wait bit before the look"):
                yield mark
            if (yield at(W + "wait_sealed: if _sealed"), get, "sealed", 0):
                return
            if self.no("wait bit before the look"):
                yield mark
            del mark
            yield from self.nap(me, seen)

    def wait_both(self, me: int) -> Program:
        while True:
            seen = yield at(W + "wait_any: seen = a32_load_sc"), get, "wake", me
            ready = 0
            for i in (0, 1):
                if (yield at(W + "_count_sealed: if _sealed"), get, "sealed", i):
                    ready += 1
                elif not (yield at(W + "_count_sealed: if not a64_load_sc"), get, "waits", i) >> me & 1:
                    yield at(W + "_count_sealed: a64_or_sc(bits"), self.mark, i, me
                    ready += yield at(W + "_count_sealed: if _sealed"), get, "sealed", i
            if ready == 2:
                return
            yield from self.nap(me, seen)

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, 3
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            if not self.no("a dead spinner is replaced"):
                yield at(R + "_intents: a32_cas_sc(&x.sb.spinner"), cas, "spinner", v + 1, 0
            yield at(R + "_intents: a64_and_sc(&x.sb.idle"), bit_off, "idle", v
            if v == 0 and self.scenario == "sealed":
                yield at(OBJ + "_seal_pending: a64_store_sc(state"), store, "sealed", (1, 1)
                yield from self.tell(0)
                yield from self.tell(1)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            for c in (1, 2):
                if not self.no("everybody is woken after a death"):
                    yield from self.client_wake(c)
            del v, c
