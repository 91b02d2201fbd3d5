"""The switch of recording: a word that says whether any client has a recording, derived from a count in each slot.

Two processes record twice each, and may die. The repairer of a dead one makes its count 0. In the end the word agrees.
"""

from collections.abc import Callable
from typing import ClassVar

from .explorer import Memory, Model, Program, at, await_victim, get, put, store

T, R = "trace.", "recovery."


class Recording(Model):
    SCENARIOS: ClassVar = {"all": 1}
    MUTANTS: ClassVar = {"looks again after the store": "all", "recovery settles always": "all"}

    def memory(self) -> Memory:
        return {"counts": (0, 0), "on": False, "slots": ("LIVE", "LIVE"), "dead": 0}

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        return [("one", self.recorder), ("two", self.recorder), ("janitor0", self.janitor), ("janitor1", self.janitor)]

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        lost = [v for v, word in enumerate(s["slots"]) if word != "FREE" and s["dead"] >> v & 1]
        if not lost and s["on"] != any(s["counts"]):
            return f"recording is {s['on']} with {s['counts']}"
        return None

    def wanted(self, me: int) -> Program:
        for c in range(2):
            if (yield at(T + "trace_wanted: a32_load_sc(&x.clients[c].recordings)"), get, "counts", c):
                return True
        return False

    def settle(self, me: int) -> Program:
        wanted = yield from self.wanted(me)
        while True:
            yield at(T + "trace_settle: a32_store_sc(&x.sb.trace_on"), store, "on", wanted
            if self.no("looks again after the store") or (yield from self.wanted(me)) == wanted:
                return
            wanted = not wanted

    def recorder(self, me: int) -> Program:
        for k in range(4):
            yield at(T + "switch: a32_add_sc(&slot.recordings"), put, "counts", me, 1 - k % 2
            yield from self.settle(me)

    def janitor(self, me: int) -> Program:
        v = yield "waits for a death", await_victim, me, 2
        yield at(R + "recover: a32_store_sc(&slot.recordings, 0)"), put, "counts", v, 0
        yield from self.repair(me, v)
        yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"

    def repair(self, me: int, v: int) -> Program:
        if not self.no("recovery settles always"):
            yield from self.settle(me)
