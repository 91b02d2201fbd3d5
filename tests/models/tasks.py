"""One task from its submission to its end: ready queue, claim, run, seal, cancel, deaths of all who take part.

`word` is the task word (state, client, gen); `ring` the cells from head to tail, each the generation that it means;
`pushing` the intents. The ghost `runs` counts entries into user code, `ends` how often the result was decided.
Scenario `retry`: worker1's user code raises the first time, and the submitter is a worker: its death does not end
the task.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import BLOCKED, Memory, Model, Program, add, at, await_victim, cas, load, lock, put, store, unlock

EMPTY, RESERVED, READY, CLAIMED, RUNNING, ENDING = (
    "EMPTY",
    "RESERVED",
    "READY",
    "CLAIMED",
    "RUNNING",
    "ENDING",
)
T, C, Q, R, OBJ, S = "tasks.", "records.", "queue.", "recovery.", "objects.", "submission."
RETRIES = 1
STRANGE, LATE = 8, 9


def push_cell(s: Memory, cell: int) -> None:
    s["ring"] = (*s["ring"], cell)


def pop_cell(s: Memory) -> None:
    s["ring"] = s["ring"][1:]


def read_gen(s: Memory) -> int:
    return s["word"][2]


def sleep_for_task(s: Memory) -> Any:
    """Waking is another model's business: here an idle worker looks whenever there is something to see."""
    if s["ring"]:
        return True
    return False if s["word"][0] == EMPTY and s["result"] != "none" else BLOCKED


def run(s: Memory) -> None:
    s["runs"] += 1
    if s["result"] != "PENDING":
        s["ends"] = LATE


def finish_record(s: Memory, me: int) -> None:
    if s["word"][1] != me and s["word"][0] != RESERVED:
        s["ends"] = STRANGE
    s["word"] = (EMPTY, -1, s["word"][2] + 1)


def seal(s: Memory, how: str) -> None:
    if s["result"] == "PENDING":
        s["result"] = how
        s["ends"] += 1


class Tasks(Model):
    LOCKS = ("queue", "janitor")
    SCENARIOS: ClassVar = {"cancel": 2, "retry": 1}
    MUTANTS: ClassVar = {
        "submitter announces the push": "retry", "recoverer announces the push": "cancel",
        "retry announces the push": "retry", "recovery pushes what was announced": "cancel", "claim by swap": "cancel",
        "cancel by swap": "cancel", "head moves after the claim": "cancel", "recoverer stamps what it ends": "cancel",
        "attempts are counted": "retry", "sealed result means ended": "retry", "claim is stamped": "cancel",
        "slot is freed last": "cancel",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "word": (RESERVED, 0, 0), "result": "none", "ring": (), "pushing": (0,) * n, "attempts": 0, "cancelled": 0,
            "runs": 0, "ends": 0, "queue": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("driver", self.driver), ("worker1", self.worker), ("worker2", self.worker)]
        if self.scenario == "cancel":
            actors[2] = ("canceller", self.canceller)
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def check(self, s: Memory) -> str | None:
        if s["runs"] > 1 + RETRIES:
            return f"the task has run {s['runs']} times"
        if s["word"][0] in (CLAIMED, RUNNING, ENDING) and s["slots"][s["word"][1]] == "FREE":
            return f"the task is {s['word'][0]} by a client that is not there any more"
        if s["ends"] == LATE:
            return "user code runs although the result is there"
        return "a task is ended by a client that does not own it" if s["ends"] == STRANGE else None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        state = s["word"][0]
        workers = [1] if self.scenario == "cancel" else [1, 2]
        if state == READY and not s["ring"]:
            return "the task is READY and not queued"
        if any(s["dead"] >> v & 1 and word != "FREE" for v, word in enumerate(s["slots"])):
            return "a dead client is not recovered"
        if all(s["dead"] >> w & 1 for w in workers):
            return None  # nobody is left to run it
        if s["result"] == "PENDING" or state != EMPTY:
            return f"the task stays {state}, its result {s['result']}"
        return None

    # ---- the core's functions ----

    def lock_queue(self, me: int) -> Program:
        yield at(Q + "_lock: frt_lock_take"), lock, "queue", me  # nothing to repair

    def push(self, me: int) -> Program:
        cell = yield at(Q + "queue_push: a64_load_acq(x.task_words + t)"), read_gen
        yield from self.lock_queue(me)
        yield at(Q + "queue_push: a64_store_sc(&sb.ring_tail"), push_cell, cell
        yield at(Q + "queue_push: frt_lock_give"), unlock, "queue"

    def pop(self, me: int) -> Program:
        yield from self.lock_queue(me)
        claimed = False
        while not claimed:
            ring = yield at(Q + "queue_pop: sb.ring_head != sb.ring_tail"), load, "ring"
            if not ring:
                break
            word = yield at(Q + "queue_pop: word = a64_load_acq"), load, "word"
            if self.no("head moves after the claim"):
                yield at(Q + "queue_pop: a64_store_rel(&sb.ring_head"), pop_cell
            if word[0] == READY and word[2] == ring[0]:
                where, to = at(Q + "queue_pop: FRT_TASK_CLAIMED"), (CLAIMED, me, word[2])
                if self.no("claim is stamped"):
                    to = (CLAIMED, 0, word[2])
                if self.no("claim by swap"):
                    claimed = True
                    yield where, store, "word", to
                else:
                    claimed = yield where, cas, "word", word, to
            if not self.no("head moves after the claim"):
                yield at(Q + "queue_pop: a64_store_rel(&sb.ring_head"), pop_cell
        yield at(Q + "queue_pop: frt_lock_give"), unlock, "queue"
        return claimed

    def to_ready(self, me: int, gen: int, where: str, rule: str) -> Program:
        """Hand the task over to whoever pops it."""
        if not self.no(rule):
            yield where, put, "pushing", me, 1
        yield where, store, "word", (READY, me, gen)
        yield from self.push(me)
        yield where, put, "pushing", me, 0

    def end(self, me: int, how: str) -> Program:
        """Seal the result and give the record back."""
        yield at(OBJ + "_seal_pending: a64_store_sc(state"), seal, how
        yield at(C + "task_done: FRT_TASK_RESERVED"), finish_record, me

    # ---- who does what ----

    def driver(self, me: int) -> Program:
        yield at(C + "task_announce: FRT_OBJ_PENDING"), store, "result", "PENDING"
        commit = at(S + "_commit_task: a64_store_sc(x.task_words")
        yield from self.to_ready(me, 0, commit, "submitter announces the push")

    def worker(self, me: int) -> Program:
        while (yield at("wait.wait_task: rc = wait_nap"), sleep_for_task):
            if (yield from self.pop(me)):
                attempt = (yield at(T + "task_start: attempts += 1"), add, "attempts", 1) + 1
                yield at(T + "task_start: FRT_TASK_RUNNING"), store, "word", (RUNNING, me, 0)
                if self.scenario == "cancel" and (yield at(C + "task_is_cancelled: cancelled"), load, "cancelled"):
                    yield from self.end(me, "ERROR")
                    continue
                yield "user code", run
                if self.scenario == "retry" and attempt == me == 1:
                    where = at(T + "task_requeue: a64_store_sc(x.task_words")
                    yield from self.to_ready(me, 0, where, "retry announces the push")
                else:
                    yield from self.end(me, "SEALED")

    def canceller(self, me: int) -> Program:
        while True:
            if (yield at(T + "_cancel: object_is_sealed"), load, "result") not in ("PENDING", "none"):
                return
            word = yield at(T + "_cancel: word = a64_load_sc"), load, "word"
            if word[0] == READY:
                to = (ENDING, me, word[2])
                swapped = True
                if self.no("cancel by swap"):
                    yield at(T + "_cancel: FRT_TASK_ENDING"), store, "word", to
                else:
                    swapped = yield at(T + "_cancel: FRT_TASK_ENDING"), cas, "word", word, to
                if swapped:
                    yield from self.end(me, "ERROR")
                    return
            elif word[0] in (RUNNING, CLAIMED):
                yield at(C + "task_mark_cancelled: a64_cas_sc(&x.tasks[t].cancelled"), store, "cancelled", 1
                return
            else:
                return

    def janitor(self, me: int) -> Program:
        first = len(self.programs()) - 3
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, first
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield at(R + "recover: FRT_CLIENT_DYING"), put, "slots", v, "DYING"
            if self.no("slot is freed last"):
                yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield from self.lock_queue(me)
            yield at(Q + "queue_touch: frt_lock_give"), unlock, "queue"
            pushing = (yield at(R + "_intents: t = slot.pushing"), load, "pushing")[v]
            if pushing and not self.no("recovery pushes what was announced"):
                if (yield at(R + "_intents: state = frt_word_state"), load, "word")[0] == READY:
                    yield from self.push(me)
                yield at(R + "_intents: slot.pushing = 0"), put, "pushing", v, 0
            ending = yield from self.scan(me, v)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            if ending:
                yield from self.end(me, "ERROR")
            del v, pushing, ending

    def scan(self, me: int, v: int) -> Program:
        word = yield at(R + "_scan_tasks: word = a64_load_acq"), load, "word"
        generation = word[2]
        while word[0] == READY and word[2] == generation and v == 0 and self.scenario == "cancel":
            if (yield at(R + "_take_waiting: FRT_TASK_ENDING, x.me"), cas, "word", word, (ENDING, me, word[2])):
                return True
            word = yield at(R + "_take_waiting: word[0] = a64_load_acq"), load, "word"
        if word[0] in (CLAIMED, RUNNING) and v == 0 and self.scenario == "cancel":
            yield at(C + "task_mark_cancelled: a64_cas_sc(&x.tasks[t].cancelled"), store, "cancelled", 1
        if word[1] != v or word[0] in (EMPTY, READY):
            return False
        if word[0] == RESERVED:
            yield at(R + "_unsubmit: FRT_OBJ_RESERVED"), store, "result", "dropped"
            yield at(R + "_unsubmit: pool_return"), finish_record, me
            return False
        cancelled = yield at(R + "_task_of_dead: task_is_cancelled"), load, "cancelled"
        sealed = (yield at(R + "_task_of_dead: task_results_sealed"), load, "result") != "PENDING"
        if self.no("sealed result means ended"):
            sealed = False
        over = (yield at(R + "_task_of_dead: attempts > task.retries"), load, "attempts") > RETRIES
        if self.no("attempts are counted"):
            over = False
        if word[0] == ENDING or cancelled or (word[0] == RUNNING and (over or sealed)):
            if not self.no("recoverer stamps what it ends"):
                yield at(R + "_end_here: FRT_TASK_ENDING"), store, "word", (ENDING, me, word[2])
            if sealed:
                yield at(C + "task_done: FRT_TASK_RESERVED"), finish_record, me
            return not sealed
        where = at(R + "_requeue: a64_store_sc(x.task_words")
        yield from self.to_ready(me, word[2], where, "recoverer announces the push")
        return False
