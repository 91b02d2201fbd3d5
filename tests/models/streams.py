"""A stream: a producer that may die and be followed by another one, two readers, and the list between them.

Two items, numbered from 0, in three entries. An entry is (state, who reserved it, number of its item); `head` is
(items taken, first entry + 1), `next`, `refs` and `counted` are per entry; `last` and `produced` are derived. The
ghost `got` lists the items that readers have taken, those who died with them among them. What `stream_push` and
`stream_pop` do under the lock is taken apart; the life of entries, which has a model of its own, is not.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Model, Program, at, await_victim, get, load, lock, put, store, unlock

T, L, G, R = "stream_items.", "references.", "generators.", "recovery."
ITEMS = 2
FREE = ("FREE", 0, 0)


def reserve(s: Memory, me: int, number: int) -> Any:
    if FREE not in s["entry"]:
        return BLOCKED
    i = s["entry"].index(FREE)
    put(s, "entry", i, ("RESERVED", me, number))
    return i


def seal(s: Memory, i: int) -> None:
    put(s, "entry", i, ("SEALED", 0, s["entry"][i][2]))


def change(s: Memory, name: str, i: int, by: int) -> None:
    put(s, name, i, s[name][i] + by)


def hold(s: Memory, i: int, me: int, number: int) -> bool:
    """Take a reference if it is still the object that was there at the last look."""
    if s["entry"][i] != ("SEALED", 0, number):
        return False
    put(s, "refs", i, s["refs"][i] | 1 << me)
    return True


def let_go(s: Memory, i: int, me: int) -> None:
    put(s, "refs", i, s["refs"][i] & ~(1 << me))
    delete(s, i)


def delete(s: Memory, i: int) -> None:
    if s["entry"][i][0] == "SEALED" and not s["refs"][i] and not s["counted"][i]:
        put(s, "entry", i, FREE)


def bury(s: Memory, i: int, v: int) -> None:
    if s["entry"][i][:2] == ("RESERVED", v):
        put(s, "entry", i, FREE)
    let_go(s, i, v)


def pop(s: Memory, head: tuple[int, int], after: int) -> None:
    s["head"] = (head[0] + 1, after)
    s["got"] = (*s["got"], s["entry"][head[1] - 1][2])


def look(s: Memory) -> Any:
    """The head; None at the end, which is looked at before."""
    return s["head"] if s["head"][1] else None if s["end"] else BLOCKED


def await_successor(s: Memory, first: int) -> Any:
    return 1 if s["slots"][first] == "FREE" and not s["end"] else BLOCKED


class Streams(Model):
    LOCKS = ("links", "janitor")
    SCENARIOS: ClassVar = {"readers": 1}
    MUTANTS: ClassVar = {
        "head is looked at under the lock": "readers", "held before it is taken": "readers",
        "sealed before it is listed": "readers", "rebuild finds the last": "readers",
        "rebuild finds what was produced": "readers", "rebuild counts the items": "readers",
        "counted before it is sealed": "readers", "next attempt leaves out what was produced": "readers",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "entry": (FREE,) * 3, "next": (0, 0, 0), "refs": (0, 0, 0), "counted": (0, 0, 0), "head": (0, 0), "last": 0,
            "produced": 0, "end": 0, "got": (), "links": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("producer", self.producer), ("reader1", self.reader), ("reader2", self.reader)]
        return [*actors, ("successor", self.successor), ("janitor", self.janitor)]

    def check(self, s: Memory) -> str | None:
        if s["got"] != tuple(range(len(s["got"]))):
            return f"the items are taken as {s['got']}"
        if s["links"]:
            return None
        listed, item = [], s["head"][1]
        while item:
            if len(listed) > 3:
                return "the list has no end"
            listed.append(item - 1)
            if s["entry"][item - 1][0] != "SEALED":
                return f"entry {item - 1} is listed and {s['entry'][item - 1][0]}"
            item = s["next"][item - 1]
        if s["counted"] != tuple(int(i in listed) for i in range(3)):
            return f"entries are counted {s['counted']}, the list has {listed}"
        if s["last"] != (listed[-1] + 1 if listed else 0) or s["produced"] != s["head"][0] + len(listed):
            return f"{s['produced']} items and the last {s['last']}, the list has {listed} after {s['head'][0]}"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        alive = [name for name in asleep if name not in ("janitor", "successor")]
        if alive:
            return f"{alive[0]} waits for ever"
        if s["dead"] & 6 != 6 and len(s["got"]) != ITEMS:
            return f"only {s['got']} were taken"
        kept = sum(state != "FREE" for state, _, _ in s["entry"])
        return f"{kept} entries are left" if kept and s["dead"] & 6 != 6 else None

    # ---- the core's functions ----

    def lock_links(self, me: int) -> Program:
        if not (yield at(L + "_lock: frt_lock_take"), lock, "links", me):
            return
        if not self.no("rebuild counts the items"):
            yield at(L + "_rebuild: a32_store_sc(&x.entries[i].counted, BIAS)"), store, "counted", (0, 0, 0)
        if not self.no("rebuild finds the last"):
            yield at(T + "stream_rebuild: stream.last = 0"), store, "last", 0
        head = yield at(T + "stream_rebuild: head = a64_load_acq"), load, "head"
        item, there = head[1], 0
        while item:
            there += 1
            if not self.no("rebuild counts the items"):
                yield at(T + "stream_rebuild: a32_add_sc"), change, "counted", item - 1, 1
            if not self.no("rebuild finds the last"):
                yield at(T + "stream_rebuild: stream.last = item"), store, "last", item
            item = yield at(T + "stream_rebuild: item = a32_load_rlx"), get, "next", item - 1
        if not self.no("rebuild finds what was produced"):
            yield at(T + "stream_rebuild: stream.produced +="), store, "produced", head[0] + there

    def push(self, me: int, i: int) -> Program:
        yield from self.lock_links(me)
        head = yield at(T + "stream_push: head = a64_load_rlx"), load, "head"
        last = yield at(T + "stream_push: last = stream.last"), load, "last"
        if not self.no("counted before it is sealed"):
            yield at(T + "stream_push: a32_add_sc"), change, "counted", i, 1
        yield at(T + "stream_push: .next, 0"), put, "next", i, 0
        late = self.no("sealed before it is listed")
        if not late:
            yield at(T + "stream_push: FRT_OBJ_SEALED"), seal, i
        if head[1]:
            yield at(T + "stream_push: a32_store_rel"), put, "next", last - 1, i + 1
        else:
            yield at(T + "stream_push: a64_store_sc"), store, "head", (head[0], i + 1)
        if late:
            yield at(T + "stream_push: FRT_OBJ_SEALED"), seal, i
        yield at(T + "stream_push: stream.last = i + 1"), store, "last", i + 1
        produced = yield at(T + "stream_push: stream.produced += 1"), load, "produced"
        yield at(T + "stream_push: stream.produced += 1"), store, "produced", produced + 1
        yield at(L + "links_add_item: _unlock"), unlock, "links"

    def take(self, me: int, head: tuple[int, int]) -> Program:
        """Take the first item; whether that was it."""
        i = head[1] - 1
        number = (yield at(G + "_take: a64_load_rlx(&x.entries[i].objref)"), get, "entry", i)[2]
        early = not self.no("held before it is taken")
        if early and not (yield at(G + "_take: object_acquire"), hold, i, me, number):
            return False
        yield from self.lock_links(me)
        there = yield at(T + "stream_pop: != head"), load, "head"
        if there != head and not self.no("head is looked at under the lock"):
            yield at(L + "links_take_item: _unlock"), unlock, "links"
            yield at(G + "_take: object_release"), let_go, i, me
            return False
        after = yield at(T + "stream_pop: after = a32_load_rlx"), get, "next", i
        yield at(T + "stream_pop: a64_store_sc"), pop, head, after
        if after == 0:
            yield at(T + "stream_pop: stream.last = 0"), store, "last", 0
        yield at(T + "stream_pop: a32_sub_sc"), change, "counted", i, -1
        yield at(L + "links_take_item: _unlock"), unlock, "links"
        if not early and not (yield at(G + "_take: object_acquire"), hold, i, me, number):
            yield "ghost: the item is gone", store, "got", ("lost",)
        yield "the reader drops it", let_go, i, me
        return True

    # ---- who does what ----

    def produce(self, me: int) -> Program:
        skip = 0
        if not self.no("next attempt leaves out what was produced"):
            skip = yield "Producer: skip is what was produced", load, "produced"
        for number in range(ITEMS):
            if number >= skip:
                i = yield at(G + "_add: object_new"), reserve, me, number
                yield from self.push(me, i)
                del i
        yield "the task's result is sealed", store, "end", 1

    def producer(self, me: int) -> Program:
        yield from self.produce(me)

    def successor(self, me: int) -> Program:
        """Whoever runs the task again."""
        yield "the task is queued again", await_successor, 0
        yield from self.produce(me)

    def reader(self, me: int) -> Program:
        while True:
            head = yield at(G + "_take: head = a64_load_sc"), look
            if head is None:
                return
            yield from self.take(me, head)
            del head

    def janitor(self, me: int) -> Program:
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, 4
            yield from self.lock_links(me)
            yield at(L + "links_touch: _unlock"), unlock, "links"
            for i in range(3):
                yield at(R + "_scan_objects: object_maybe_delete"), bury, i, v
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            del v, i
