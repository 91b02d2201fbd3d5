"""Every move of the scheduler's transition tables happens, and an illegal one tells the story."""

import pytest

from fastrt.scheduler import events as ev
from fastrt.scheduler.objects import OBJECT
from fastrt.scheduler.records import CALL, WORKER
from fastrt.scheduler.state import SchedulerState, Settings
from fastrt.transitions import IllegalMoveError, Transitions


class Play:
    """A scheduler, two stores and a worker, and every move of the things that were ever seen."""

    def __init__(self) -> None:
        self.state = SchedulerState(Settings(max_retries=1))
        self.stores = [self.do(ev.RegisterObjStore(0, name)) for name in ("a", "b")]
        self.things: dict[int, tuple[Transitions, object]] = {}
        self.worker = self.new_worker("w", "a")

    def do(self, event: ev.Event) -> object:
        answers = [effect.value for effect in self.state.handle(event) if isinstance(effect, ev.Answer)]
        assert not answers or not isinstance(answers[0], ev.Failure), answers
        return answers[0] if answers else None

    def seen(self, table: Transitions, thing: object) -> None:
        self.things[id(thing)] = (table, thing)

    def new_worker(self, address: str, store: str) -> int:
        worker = self.do(ev.RegisterWorker(0, address, store))
        self.do(ev.RegisterFunction(0, worker, "f", 1))
        self.seen(WORKER, self.state.workers[worker])
        return worker

    def call(self, *args: int) -> int:
        """Submit a call; returns its number."""
        self.do(ev.IncrementRefs(0, args))
        self.do(ev.RemoteCall(0, "f", b"", args))
        number = self.state.next_task - 1
        task = self.state.tasks[number]
        self.seen(CALL, task)
        self.seen(OBJECT, self.state.objects.entry(task.first))
        return number

    def push(self) -> int:
        ref = self.do(ev.PushObj(0, self.worker))
        self.seen(OBJECT, self.state.objects.entry(ref))
        return ref

    def ready(self, worker: int | None = None) -> None:
        self.do(ev.WorkerReady(0, self.worker if worker is None else worker))

    def moves(self, wanted: Transitions) -> set[tuple[object, str]]:
        self.state.check_invariants()
        return {move for table, thing in self.things.values() if table is wanted for move in table.history(thing.moves)}


def every_move(table: Transitions) -> set[tuple[object, str]]:
    return {(state, event) for state, row in table.table.items() for event in row}


def test_every_move_of_a_worker_happens():
    play = Play()
    play.ready()
    taken = play.call()
    play.ready()
    refused = play.call()
    play.do(ev.InvokeRefused(play.worker, refused, "no room"))
    play.do(ev.WorkerLost(play.worker))
    other = play.worker = play.new_worker("x", "a")  # gets the refused call
    play.do(ev.InvokeRefused(other, refused, "no room"))
    play.ready()
    assert taken < refused
    play.do(ev.WorkerLost(other))
    busy = play.worker = play.new_worker("y", "a")
    play.call()
    play.do(ev.WorkerLost(busy))
    assert play.moves(WORKER) == every_move(WORKER)


def test_every_move_of_a_call_happens():
    play = Play()
    first, queued = play.call(), play.call()
    for _ in range(2):
        play.do(ev.InvokeTaken(play.worker, first))
    play.ready()  # ends a taken call; the queued one is sent
    play.ready()  # ends a sent one
    for confirmed in (False, True):
        for lost in (False, True):
            number = play.call()
            if confirmed:
                play.do(ev.InvokeTaken(play.worker, number))
            if lost:
                play.do(ev.WorkerLost(play.worker))
                play.worker = play.new_worker(f"after {number}", "a")
            else:
                play.do(ev.InvokeRefused(play.worker, number, "no room"))
            play.ready()
            play.ready()
    assert queued not in play.state.tasks
    lose_an_argument(play)
    assert play.moves(CALL) == every_move(CALL)


def lose_an_argument(play: Play) -> None:
    """The last copy of an argument is lost while its call waits for a worker, and for another argument."""
    seen, missing = play.push(), play.push()
    play.do(ev.ObjReady(0, seen, play.stores[1]))
    waiting = play.call(seen, missing)
    play.do(ev.ObjStoreLost(play.stores[1]))
    play.do(ev.ObjReady(0, missing, play.stores[0]))  # all arguments were resolved once: the call is placed, and fails
    assert waiting not in play.state.tasks
    store = play.do(ev.RegisterObjStore(0, "c"))
    only = play.push()
    play.do(ev.ObjReady(0, only, store))
    play.call()
    queued = play.call(only)
    play.do(ev.ObjStoreLost(store))
    play.ready()
    assert queued not in play.state.tasks


def test_every_move_of_an_object_happens():
    play = Play()
    twice, freed, alias, target = (play.push() for _ in range(4))
    for store in play.stores:
        play.do(ev.ObjReady(0, twice, store))
    play.do(ev.DecrementRefs(0, [freed]))
    play.do(ev.ObjReady(0, freed, play.stores[0]))
    play.do(ev.AliasObjRefs(0, alias, target))
    play.do(ev.ObjReady(0, target, play.stores[1]))
    play.do(ev.ObjStoreLost(play.stores[1]))
    play.do(ev.ObjReady(0, target, play.stores[0]))
    unmade, dropped = play.push(), play.push()
    play.do(ev.WorkerLost(play.worker))  # no worker is left to make the other objects
    play.do(ev.DecrementRefs(0, [dropped, alias, target]))
    play.do(ev.AliasObjRefs(0, unmade, twice))
    assert play.moves(OBJECT) == every_move(OBJECT)


def test_illegal_move_tells_the_story_of_the_call():
    play = Play()
    task = play.state.tasks[play.call()]
    play.ready()
    with pytest.raises(IllegalMoveError, match=r"call 0: 'take' is not possible .* WAITING -send-> SENT -end-> ENDED"):
        task.move(CALL.events.index("take"))


def test_illegal_move_tells_the_story_of_the_worker():
    worker = Play().state.workers[0]
    with pytest.raises(IllegalMoveError, match="worker 0: 'refuse' is not possible in the state IDLE"):
        worker.move(WORKER.events.index("refuse"))
