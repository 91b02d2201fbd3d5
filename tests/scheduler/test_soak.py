"""What a call leaves behind in the state machine once it is over: nothing but the number of its reference."""

import sys

from fastrt.scheduler import events as ev
from fastrt.scheduler.state import SchedulerState

LIVES = 40_000
# Of Python's allocator, far fewer than one for each life: interned numbers, free lists.
BLOCKS_MAX = LIVES // 20


def live(state: SchedulerState, lives: int) -> None:
    """Calls one after the other, each with the last result as its argument and its own sent to the other store."""
    before: int | None = None
    for _ in range(lives):
        args = [before] if before is not None else []
        state.handle(ev.IncrementRefs(0, args))
        answer, *orders = state.handle(ev.RemoteCall(0, "f", b"", args))
        (result,) = answer.value
        (run,) = orders
        state.handle(ev.InvokeTaken(run.worker, run.task))
        state.handle(ev.DecrementRefs(0, [*args, result]))
        state.handle(ev.ObjReady(0, result, run.worker, 100))
        state.handle(ev.WorkerReady(0, run.worker))
        _, sent = state.handle(ev.RequestObj(0, 1 - run.worker, result))
        state.handle(ev.ObjReady(0, result, sent.target))
        state.handle(ev.DecrementRefs(0, args))
        before = result
    state.handle(ev.DecrementRefs(0, [before]))


def test_memory_at_rest_is_what_it_was_before():
    state = SchedulerState()
    for number in range(2):
        state.handle(ev.RegisterObjStore(0, f"store{number}"))
        state.handle(ev.RegisterWorker(0, f"worker{number}", f"store{number}"))
        state.handle(ev.RegisterFunction(0, number, "f", 1))
    live(state, LIVES // 10)
    blocks = sys.getallocatedblocks()
    live(state, LIVES)
    assert sys.getallocatedblocks() - blocks < BLOCKS_MAX
    assert (state.task_count(), state.objects.refs.alive, list(state.objects.live())) == (0, 0, [])
    state.check_invariants()
