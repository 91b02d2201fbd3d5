"""An exhaustive state explorer: every interleaving of the atomic steps of a few processes, with deaths.

A process is a generator that yields steps `(where, operation, *arguments)`: `operation(s, *arguments)` changes the
shared words `s` (a dict) at one stroke, and what it returns is sent back. Between two yields a process is alone
with its locals. It may die before any step; a step that returns BLOCKED is not enabled yet (a lock, a sleep).

What keeps it fast: a process's next step depends on its frames only (code, position, locals), so each program is
an automaton that is discovered once; memories are numbered; a step is then looked up, not run again. Hence two
rules for programs: locals are hashable, and a `for` runs over something that is the same each time.

The search is breadth-first, so a counterexample is one of the shortest. `where` names a line of the core by its
text ("module.function: text"); a line that is not there any more is an error: the model is to be looked at again.
"""

import functools
import gc
import itertools
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

CORE = Path(__file__).resolve().parents[2] / "src" / "fastrt" / "_core"
STATES_MAX = 20_000_000  # some 3 GB
BLOCKED = object()
Memory = dict[str, Any]
Program = Generator[tuple[Any, ...], Any, Any]


@functools.cache
def at(where: str) -> str:
    """'objects.object_acquire: a64_or_sc(bits' -> 'object_acquire (objects.pyx:156)', from the core as it is now."""
    place, text = where.split(": ", 1)
    module, function = place.split(".")
    (path,) = CORE.rglob(f"{module}.pyx")
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        if re.match(rf"(cdef|cpdef|def)\b[^=]*\b{function}\(", line):
            for number in itertools.count(start):
                if number > start and lines[number : number + 1] and re.match(r"(cdef|cpdef|def|@|#)", lines[number]):
                    break
                if number >= len(lines):
                    break
                if text in lines[number]:
                    return f"{function} ({module}.pyx:{number + 1})"
    raise LookupError(f"{module}.pyx has no {text!r} in {function}(): the core has changed, look at the model again")


# ---- operations on shared words ----


def load(s: Memory, name: str) -> Any:
    return s[name]


def store(s: Memory, name: str, value: Any) -> None:
    s[name] = value


def add(s: Memory, name: str, by: int) -> int:
    s[name] += by
    return s[name] - by


def cas(s: Memory, name: str, want: Any, to: Any) -> bool:
    if s[name] != want:
        return False
    s[name] = to
    return True


def bit_on(s: Memory, name: str, bit: int) -> int:
    before = s[name]
    s[name] = before | 1 << bit
    return before >> bit & 1


def bit_off(s: Memory, name: str, bit: int) -> int:
    before = s[name]
    s[name] = before & ~(1 << bit)
    return before >> bit & 1


def put(s: Memory, name: str, index: int, value: Any) -> None:
    """Store into one element of an array of words."""
    s[name] = (*s[name][:index], value, *s[name][index + 1 :])


def get(s: Memory, name: str, index: int) -> Any:
    return s[name][index]


def lock(s: Memory, name: str, me: int) -> Any:
    """Take a robust lock: True when its last holder died inside."""
    if s[name] > 0:
        return BLOCKED
    orphaned = s[name] < 0
    s[name] = me + 1
    return orphaned


def unlock(s: Memory, name: str) -> None:
    s[name] = 0


def await_victim(s: Memory, me: int, first: int) -> Any:
    """The slot of a dead client. One janitor is at work at a time: the next begins when those before it are dead."""
    if any(not s["dead"] >> j & 1 for j in range(first, me)):
        return BLOCKED
    return next((v for v, word in enumerate(s["slots"]) if word != "FREE" and s["dead"] >> v & 1), BLOCKED)


class Model:
    """One protocol. Subclasses say what is in memory, who runs, and what must hold."""

    MUTANTS: ClassVar[dict[str, str]] = {}  # rules that can be taken out: the scenario that needs each
    SCENARIOS: ClassVar[dict[str, int]] = {}  # name: how many deaths are tried when nobody asks for more
    LOCKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, without: str = "", scenario: str = "", crashes: int | None = None) -> None:
        assert without == "" or without in self.MUTANTS
        self.without, self.scenario = without, scenario or next(iter(self.SCENARIOS))
        self.crashes = self.SCENARIOS[self.scenario] if crashes is None else crashes

    def no(self, rule: str) -> bool:
        """Whether this rule has been taken out."""
        assert rule in self.MUTANTS, rule
        return self.without == rule

    def memory(self) -> Memory:
        raise NotImplementedError

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        raise NotImplementedError

    def crash(self, s: Memory, me: int) -> None:
        """What the kernel does when a process dies: its locks are orphaned. Its slot word still says LIVE."""
        for name in self.LOCKS:
            if s[name] == me + 1:
                s[name] = -1
        s["dead"] |= 1 << me

    def check(self, s: Memory) -> str | None:
        """What is wrong with this memory, whatever anybody is doing."""
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        """What is wrong with this memory when nobody can take a step; `asleep` are those who are not done."""
        return f"{asleep[0]} waits for ever" if asleep else None


@dataclass
class Result:
    states: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.violation} ({self.states} states)", *(f"  {line}" for line in self.trace)])


class Node:
    """A point in a program: its next step, and what was sent to come here."""

    __slots__ = ("after", "history", "number", "step")

    def __init__(self, number: int, step: tuple[Any, ...] | None, history: tuple[Any, ...]) -> None:
        self.number, self.step, self.history = number, step, history
        self.after: dict[Any, Node] = {}


class Automaton:
    """A program, discovered step by step. Points with equal frames are one."""

    def __init__(self, factory: Callable[[], Program]) -> None:
        self.factory = factory
        self.nodes: dict[Any, Node] = {}
        self.by_number: list[Node] = []
        self.root = self._node(())

    def _node(self, history: tuple[Any, ...]) -> Node:
        program = self.factory()
        try:
            step = next(program)
            for value in history:
                step = program.send(value)
            key: Any = tuple(_frames(program))
        except StopIteration:
            step, key = None, "done"
        program.close()
        if key not in self.nodes:
            self.nodes[key] = Node(len(self.by_number), step, history)
            self.by_number.append(self.nodes[key])
        return self.nodes[key]

    def after(self, node: Node, value: Any) -> Node:
        if value not in node.after:
            node.after[value] = self._node((*node.history, value))
        return node.after[value]


def _frames(program: Any) -> Iterator[Any]:
    while program is not None and getattr(program, "gi_frame", None) is not None:
        frame = program.gi_frame
        yield frame.f_code, frame.f_lasti, tuple(sorted((k, v) for k, v in frame.f_locals.items() if k != "self"))
        program = program.gi_yieldfrom


class Search:
    """Breadth-first search of a model.

    A state is one integer, memory's number above the point of each process above the count of deaths, so that a
    step is an addition and a set of states is fast.
    """

    POINT, DEATHS = 12, 3  # bits
    GONE = (1 << POINT) - 1  # the point of a dead process

    def __init__(self, model: Model) -> None:
        self.model = model
        self.fields = tuple(model.memory())
        self.names = [name for name, _ in model.programs()]
        self.automata = [Automaton(functools.partial(f, me)) for me, (_, f) in enumerate(model.programs())]
        self.shifts = [self.DEATHS + self.POINT * p for p in range(len(self.names))]
        self.top = self.DEATHS + self.POINT * len(self.names)
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.memories: list[tuple[Any, ...]] = []
        self.moves: list[dict[int, int]] = [{} for _ in self.names]
        self.deaths: list[dict[int, int]] = [{} for _ in self.names]
        self.complaints: dict[int, str] = {}
        start = self.number(model.memory()) << self.top
        self.start = start
        self.parents = {start: 0}  # the state before, above the number of the process that made the step (5 bits)

    def number(self, s: Memory) -> int:
        values = tuple(s.values())
        found = self.numbers.get(values)
        if found is None:
            found = self.numbers[values] = len(self.memories)
            self.memories.append(values)
            if complaint := self.model.check(s):
                self.complaints[found] = complaint
        return found

    def memory(self, number: int) -> Memory:
        return dict(zip(self.fields, self.memories[number], strict=True))

    def step(self, p: int, memory: int, point: int) -> int:
        """What process p's next step adds to the state; 0 when it cannot take it. Steps always go somewhere else."""
        node = self.automata[p].by_number[point]
        if node.step is None:
            return 0
        s = self.memory(memory)
        value = node.step[1](s, *node.step[2:])
        if value is BLOCKED:
            return 0
        after = self.automata[p].after(node, value).number
        assert after < self.GONE
        return (self.number(s) - memory << self.top) + (after - point << self.shifts[p])

    def death(self, p: int, memory: int) -> int:
        s = self.memory(memory)
        self.model.crash(s, p)
        return (self.number(s) - memory << self.top) + (self.GONE << self.shifts[p]) + 1

    def run(self) -> Result:
        parents, gone, top, most = self.parents, self.GONE, self.top, self.model.crashes
        begun = [not name.startswith("janitor") for name in self.names]  # one that has not begun is not worth killing
        nodes = [automaton.by_number for automaton in self.automata]
        processes = list(zip(range(len(begun)), self.shifts, self.moves, self.deaths, begun, nodes, strict=True))
        todo = list(parents)
        while todo:
            later = []
            for state in todo:
                memory, mortal, asleep = state >> top, (state & 7) < most, True
                if memory in self.complaints:
                    return self.report(state, self.complaints[memory])
                for p, shift, moves, deaths, always, nodes in processes:
                    point = state >> shift & gone
                    if point == gone:
                        continue
                    key = memory << 12 | point
                    move = moves.get(key)
                    if move is None:
                        move = moves[key] = self.step(p, memory, point)
                    if move:
                        asleep = False
                        after = state + move
                        if after not in parents:
                            parents[after] = state << 5 | p
                            later.append(after)
                    if mortal and (point or always) and nodes[point].step is not None:
                        move = deaths.get(memory)
                        if move is None:
                            move = deaths[memory] = self.death(p, memory)
                        after = state + move - (point << shift)
                        if after not in parents:
                            parents[after] = state << 5 | 16 | p
                            later.append(after)
                if asleep and (complaint := self.model.quiet(self.memory(memory), self.asleep(state))):
                    return self.report(state, complaint)
            if len(parents) > STATES_MAX:
                return Result(len(parents), f"more than {STATES_MAX} states")
            todo = later
        return Result(len(parents))

    def asleep(self, state: int) -> list[str]:
        points = [state >> shift & self.GONE for shift in self.shifts]
        alive = [p for p, point in enumerate(points) if point != self.GONE]
        return [self.names[p] for p in alive if self.automata[p].by_number[points[p]].step is not None]

    def report(self, state: int, complaint: str) -> Result:
        """The steps that lead to a state, in words, and what the memory is then."""
        lines = [f"{name} = {value}" for name, value in reversed(self.memory(state >> self.top).items())]
        while state != self.start:
            before, who = self.parents[state] >> 5, self.parents[state] & 15
            changes = self.changes(before >> self.top, state >> self.top)
            if self.parents[state] & 16:
                lines.append(f"{self.names[who]:10} dies{changes}")
            else:
                step = self.automata[who].by_number[before >> self.shifts[who] & self.GONE].step
                assert step is not None
                arguments = ", ".join(map(str, step[2:]))
                lines.append(f"{self.names[who]:10} {step[0]}: {step[1].__name__}({arguments}){changes}")
            state = before
        return Result(len(self.parents), complaint, lines[::-1])

    def changes(self, before: int, after: int) -> str:
        pairs = zip(self.fields, self.memories[before], self.memories[after], strict=True)
        text = ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)
        return f"   [{text}]" if text else ""


def explore(model: Model) -> Result:
    """Visit every state that the model can reach, up to the first that is wrong."""
    collects = gc.isenabled()
    gc.disable()  # millions of integers and not one cycle
    try:
        return Search(model).run()
    finally:
        if collects:
            gc.enable()
