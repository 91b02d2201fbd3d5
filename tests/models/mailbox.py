"""Calls of one actor: made, pushed, taken, run, cancelled; deaths of callers and of the actor's process.

A record's word is (state, generation, call), ENDING with the number of who ends it; `link` what it is linked to,
`head` the mailbox: a cell is (record, generation). Calls 1 and 2 are one caller's, in this order. The ghost `ran` lists
what has been run, `ended` whose result is decided, `made` which calls were committed.
Scenario `restart`: the actor's process dies and another one goes on. `cancel`: call 3, of another caller, is cancelled
while it is in the mailbox, and its record is used again. `end`: the actor stays dead.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Model, Program, at, await_victim, cas, get, load, lock, put, store, unlock

FREE, MAKING, READY, RUNNING, ENDING = "FREE", "MAKING", "READY", "RUNNING", "ENDING"
C, M, IN, R, A, K, S = "calls.", "mailbox.", "inbox.", "recovery.", "actors.", "records.", "submission."
Cell = Any


def take_record(s: Memory, call: int) -> Any:
    """A free record for a call: the one that was used last, which is in the magazine's warm end."""
    for record, (state, gen, _) in enumerate(s["word"]):
        if state == FREE:
            put(s, "word", record, (MAKING, gen, call))
            return record, gen
    return BLOCKED


def commit(s: Memory, record: int, gen: int, call: int) -> None:
    put(s, "word", record, (READY, gen, call))
    s["made"] = tuple(sorted({*s["made"], call}))


def give_back(s: Memory, record: int) -> None:
    put(s, "word", record, (FREE, s["word"][record][1] + 1, 0))


def swap_word(s: Memory, record: int, want: Any, state: str) -> bool:
    if s["word"][record] != want:
        return False
    put(s, "word", record, (state, *want[1:]))
    return True


def run(s: Memory, call: int) -> None:
    s["ran"] = (*s["ran"], call)


def finish(s: Memory, record: int) -> None:
    s["ended"] = tuple(sorted({*s["ended"], s["word"][record][2]}))
    give_back(s, record)


def take_all(s: Memory) -> Cell:
    head, s["head"] = s["head"], None
    return head


def note_wake(s: Memory) -> None:
    """Read the wake word; it differs from that once somebody has bumped it."""
    s["wake"] = 0


def nap(s: Memory) -> Any:
    return None if s["wake"] else BLOCKED


def await_place(s: Memory) -> Any:
    return None if s["actor"] == "WANTED" else BLOCKED


def await_made(s: Memory) -> Any:
    """The record of call 3, once that is there; 0 when there is nothing left to cancel."""
    found = [record for record, word in enumerate(s["word"]) if word[2] == 3 and word[0] != MAKING]
    return found[0] if found else 0 if 3 in s["ended"] or s["dead"] else BLOCKED


class Mailbox(Model):
    SCENARIOS: ClassVar = {"restart": 1, "cancel": 0, "end": 2}
    LOCKS = ("janitor",)
    MUTANTS: ClassVar = {
        "pushed before it is READY": "cancel", "looks for DEAD after READY": "end",
        "DEAD before the look at calls": "end", "a dead caller's late call is ended": "end",
        "new process looks calls up": "restart",
        "broken list is looked up": "cancel", "those in the making are looked up": "cancel",
        "asleep before the last look": "restart", "recovery wakes everybody": "restart",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "word": ((FREE, 0, 0),) * 2, "link": (None,) * 2, "head": None, "actor": "LIVE", "asleep": 0, "wake": 0,
            "rescan": 0, "swept": 0, "ran": (), "ended": (), "made": (), "janitor": 0, "dead": 0,
            "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("caller", self.caller), ("actor", self.first_process)]
        if self.scenario == "restart":
            actors += [("again", self.next_process)]
        if self.scenario == "cancel":
            actors += [("canceller", self.canceller), ("other", self.other)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(2))]

    def check(self, s: Memory) -> str | None:
        if 2 in s["ran"] and 1 not in s["ran"] and any(w[0] in (READY, RUNNING) and w[2] == 1 for w in s["word"]):
            return "call 2 ran before call 1 of the same caller"
        if len(s["ran"]) > 3 + s["dead"].bit_count():
            return f"calls ran too often: {s['ran']}"
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if any(s["dead"] >> v & 1 and word != "FREE" for v, word in enumerate(s["slots"])):
            return "a dead client is not recovered"
        gone = s["actor"] == "WANTED"  # and no process comes any more
        lost = set(s["made"]) - set(s["ended"])
        return f"calls {sorted(lost)} are lost" if lost and not gone else None

    # ---- the caller's side ----

    def push(self, record: int, gen: int) -> Program:
        pushed = False
        while not pushed:
            before = yield at(M + "mailbox_push: before = a64_load_sc"), load, "head"
            yield at(M + "mailbox_push: waiter, <uint32_t>before"), put, "link", record, before
            pushed = yield at(M + "mailbox_push: a64_cas_sc"), cas, "head", before, (record, gen)

    def call(self, me: int, number: int) -> Program:
        record, gen = yield at(K + "task_fill: t = check(task_record"), take_record, number
        where = at(S + "_commit_call: a64_store_sc(x.task_words")
        if self.no("pushed before it is READY"):
            yield where, commit, record, gen, number
            yield from self.push(record, gen)
        else:
            yield from self.push(record, gen)
            yield where, commit, record, gen, number
        if not self.no("looks for DEAD after READY") and (
            (yield at(S + "_commit_call: FRT_ACTOR_DEAD"), load, "actor") == "DEAD"
        ):
            swap = at(S + "_commit_call: a64_cas_sc(x.task_words")
            if (yield swap, swap_word, record, (READY, gen, number), ENDING + str(me)):
                yield at(K + "task_done: FRT_TASK_RESERVED"), finish, record
            return
        if (yield at(M + "mailbox_wake: a32_load_sc(&actor.asleep)"), load, "asleep"):
            yield at("clients.client_wake: a32_add_sc(&slot.wake"), self.wake

    def wake(self, s: Memory) -> None:
        s["wake"] = 1

    def caller(self, me: int) -> Program:
        yield from self.call(me, 1)
        if self.scenario != "cancel":
            yield from self.call(me, 2)

    def other(self, me: int) -> Program:
        yield from self.call(me, 3)

    def canceller(self, me: int) -> Program:
        record = yield "it has a reference to the result of call 3", await_made
        word = yield at("tasks._cancel: word = a64_load_sc"), get, "word", record
        if (
            word[0] == READY
            and word[2] == 3
            and (yield at("tasks._cancel: FRT_TASK_ENDING"), swap_word, record, word, ENDING + str(me))
        ):
            yield at(K + "task_done: FRT_TASK_RESERVED"), finish, record

    # ---- the actor's side ----

    def first_process(self, me: int) -> Program:
        yield from self.serve(me)

    def next_process(self, me: int) -> Program:
        yield "the daemon starts it", await_place
        if not self.no("new process looks calls up"):
            yield at(A + "enter: a32_store_sc(&actor.rescan"), store, "rescan", 1
        yield at(A + "enter: a64_cas_sc(&actor.word"), store, "actor", "LIVE"
        yield from self.serve(me)

    def serve(self, me: int) -> Program:
        queue: tuple[Cell, ...] = ()
        held: tuple[Cell, ...] = ()
        while True:
            if not queue:
                queue, held = held, ()
                if not queue:
                    queue = yield from self.collect()
            while queue:
                cell, *rest = queue
                queue = tuple(rest)
                del rest
                if (held and (yield at(IN + "_look: self.blocked["), self.is_behind, cell, held)) or (
                    yield from self.look(cell)
                ):
                    held = (*held, cell)
                del cell
            if (yield from self.rest(held)):
                queue = yield from self.collect()

    def look(self, cell: Cell) -> Program:
        """Run a call if it can be; whether it is to be held back."""
        word = yield at(IN + "_look: word = a64_load_sc"), get, "word", cell[0]
        if word[1] != cell[1]:
            return False
        swap = at(IN + "_claim: a64_cas_sc(x.task_words")
        if word[0] == READY and (yield swap, swap_word, cell[0], word, RUNNING):
            yield "user code", run, word[2]
            yield at(K + "task_done: FRT_TASK_RESERVED"), finish, cell[0]
        return word[0] == MAKING

    def rest(self, held: tuple[Cell, ...]) -> Program:
        yield at(IN + "_wait: seen = a32_load_sc"), note_wake
        if not self.no("asleep before the last look"):
            yield at(IN + "_wait: a32_store_sc(&self.actor.asleep, 1)"), store, "asleep", 1
        news, more = yield at(IN + "_news: a64_load_sc(&self.actor.mailbox)"), self.news, held
        if self.no("asleep before the last look"):
            yield at(IN + "_wait: a32_store_sc(&self.actor.asleep, 1)"), store, "asleep", 1
        if not news:
            yield at("wait.wait_nap: frt_futex_wait"), nap
        yield at(IN + "_wait: a32_store_sc(&self.actor.asleep, 0)"), store, "asleep", 0
        return more

    def news(self, s: Memory, held: tuple[Cell, ...]) -> tuple[bool, bool]:
        more = s["head"] is not None or bool(s["rescan"])
        first = [cell for k, cell in enumerate(held) if not self.is_behind(s, cell, held[:k])]
        return more or any(s["word"][r][0] != MAKING or s["word"][r][1] != gen for r, gen in first), more

    @staticmethod
    def is_behind(s: Memory, cell: Cell, held: tuple[Cell, ...]) -> bool:
        """Whether an earlier call of the same caller is held back."""
        callers = {s["word"][record][2] == 3 for record, gen in held if s["word"][record][1] == gen}
        return (s["word"][cell[0]][2] == 3) in callers

    def collect(self) -> Program:
        whole, found = yield from self.take(())
        if whole and not (yield at(IN + "_collect: a32_load_sc(&self.actor.rescan)"), load, "rescan"):
            return found[::-1]
        if self.no("broken list is looked up") and not (yield "again", load, "rescan"):
            return found[::-1]
        whole = False
        while not whole:
            yield at(IN + "_collect: a32_store_sc(&self.actor.rescan, 0)"), store, "rescan", 0
            found = yield from self.look_up(found)
            whole, found = yield from self.take(found)
        calls = yield "the ids of the records", self.ids, found
        return tuple(cell for _, cell in sorted(set(zip(calls, found, strict=True))))

    def look_up(self, found: tuple[Cell, ...]) -> Program:
        for record in (0, 1):
            word = yield at(IN + "_collect: word = a64_load_sc"), get, "word", record
            if word[0] == READY or (word[0] == MAKING and not self.no("those in the making are looked up")):
                found = tuple(sorted({*found, (record, word[1])}))
        return found

    def ids(self, s: Memory, found: tuple[Cell, ...]) -> tuple[int, ...]:
        return tuple(s["word"][record][2] for record, _ in found)

    def take(self, found: tuple[Cell, ...]) -> Program:
        walked: tuple[Cell, ...] = ()
        cell = yield at(M + "mailbox_take: a64_and_sc(&actor.mailbox"), take_all
        while cell is not None:
            before = yield at(M + "mailbox_before: a32_load_acq(&x.tasks[t].dep)"), get, "link", cell[0]
            word = yield at(IN + "_take: a64_load_sc(x.task_words + t)"), get, "word", cell[0]
            if word[1] != cell[1] or word[0] == FREE:
                return False, found
            if cell in walked:
                return False, found  # a circle, which the count of steps ends
            walked = (*walked, cell)
            found = (*found, cell)
            cell = before
        return True, found

    # ---- recovery, and the daemon ----

    def janitor(self, me: int) -> Program:
        first = len(self.programs()) - 2
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, first
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield at(R + "recover: FRT_CLIENT_DYING"), put, "slots", v, "DYING"
            name = self.programs()[v][0]
            for record in (0, 1):
                word = yield at(R + "_scan_tasks: word = a64_load_acq"), get, "word", record
                if word[0] == MAKING and self.made_by(word[2]) == name:
                    yield at(R + "_unsubmit: FRT_TASK_RESERVED, x.me"), give_back, record
                elif (
                    word[0] == READY
                    and self.made_by(word[2]) == name
                    and not self.no("a dead caller's late call is ended")
                ):
                    if (yield at(R + "_task_of_dead: FRT_ACTOR_DEAD"), load, "actor") == "DEAD" and (
                        yield at(R + "_task_of_dead: FRT_TASK_ENDING"), swap_word, record, word, ENDING
                    ):
                        yield at(K + "task_done: FRT_TASK_RESERVED"), finish, record
                elif word[0] == RUNNING and name in ("actor", "again"):
                    yield at(R + "_requeue: x.tasks[t].actor"), put, "word", record, (READY, *word[1:])
                elif word[0] == ENDING + str(v):
                    yield at(K + "task_done: FRT_TASK_RESERVED"), finish, record
            if name in ("actor", "again"):
                yield at(A + "actors_of_dead: a32_store_sc(&actor.asleep"), store, "asleep", 0
                yield at(A + "actors_of_dead: FRT_ACTOR_DOWN"), store, "actor", "DOWN"
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            if not self.no("recovery wakes everybody"):
                yield at("clients.client_wake: a32_add_sc(&slot.wake"), self.wake
            actor = yield at(A + "attention: state = frt_word_state"), load, "actor"
            if actor == "DOWN" or (
                actor == "DEAD" and not (yield at(A + "attention: a32_load_sc(&actor.swept)"), load, "swept")
            ):
                yield from self.decide(me)
            del v, name, actor, word

    def decide(self, me: int) -> Program:
        if self.scenario == "restart":
            yield at(A + "start_again: FRT_ACTOR_WANTED"), store, "actor", "WANTED"
            return
        late = self.no("DEAD before the look at calls")
        if not late:
            yield at(A + "end: before the look at its calls"), store, "actor", "DEAD"
        for record in (0, 1):
            word = yield at(A + "end: word = a64_load_sc(x.task_words"), get, "word", record
            if word[0] == READY and (yield at(A + "end: FRT_TASK_ENDING"), swap_word, record, word, ENDING + str(me)):
                yield at(K + "task_done: FRT_TASK_RESERVED"), finish, record
        if late:
            yield at(A + "end: before the look at its calls"), store, "actor", "DEAD"
        yield at(A + "end: a32_store_sc(&actor.swept"), store, "swept", 1

    @staticmethod
    def made_by(call: int) -> str:
        return "other" if call == 3 else "caller"
