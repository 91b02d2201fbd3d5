"""A model beside the table of reference counts: plain dicts, under every order of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastrt._core.refcounts.audit import check_invariants, dump, load
from fastrt._core.refcounts.refcount import FREED, UNKNOWN, RefTable
from fastrt.errors import ReferenceCountError

REF = st.integers(0, 7)  # one more than there may be
REFS = st.lists(REF, max_size=6)


class Model:
    """The rules, written for reading: dicts by reference, everything looked up anew each time."""

    def __init__(self) -> None:
        self.counts: list[int | None] = []  # None: deallocated
        self.holds: dict[int, int] = {}
        self.pending: set[int] = set()
        self.targets: dict[int, int] = {}
        self.contents: dict[int, list[int]] = {}

    def alive(self, ref: int) -> bool:
        return ref < len(self.counts) and self.counts[ref] is not None

    def end(self, ref: int) -> int:
        while self.targets.get(ref, ref) != ref:
            ref = self.targets[ref]
        return ref

    def members(self, ref: int) -> set[int]:
        return {other for other in range(len(self.counts)) if self.end(other) == self.end(ref)}

    def sweep(self) -> set[int]:
        """Deallocate, one class at a time, until nothing more dies."""
        dead: set[int] = set()
        again = True
        while again:
            again = False
            for ref in range(len(self.counts)):
                names = self.members(ref)
                held = any(self.counts[m] or self.holds.get(m) or m in self.pending for m in names)
                if self.counts[ref] is None or held:
                    continue
                again = True
                dead |= names
                for m in names:
                    self.counts[m] = None
                for inner in [i for m in names for i in self.contents.pop(m, [])]:
                    if self.counts[inner]:
                        self.counts[inner] -= 1
        return dead


class TableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.model = RefTable(), Model()

    def attempt(self, allowed: bool, function, *args) -> bool:
        """Do it in the table; whether it was done must be what the model says."""
        before = dump(self.table)
        try:
            freed = function(*args)
        except ReferenceCountError:
            assert not allowed
            assert dump(self.table) == before
            return False
        assert allowed
        self.freed = freed
        return True

    def settle(self) -> None:
        freed = self.freed or []
        assert len(freed) == len(set(freed))
        assert set(freed) == self.model.sweep()

    @precondition(lambda self: len(self.model.counts) < 5)
    @rule(n=st.integers(1, 3), count=st.integers(0, 2), pending=st.booleans())
    def add(self, n: int, count: int, pending: bool) -> None:
        count = count or int(not pending)
        first = self.table.add(n, count, pending)
        assert first == len(self.model.counts)
        self.model.counts += [count] * n
        self.model.pending |= set(range(first, first + n)) if pending else set()

    @rule(refs=REFS)
    def increment(self, refs: list[int]) -> None:
        if self.attempt(all(map(self.model.alive, refs)), self.table.increment, refs):
            for ref in refs:
                self.model.counts[ref] += 1

    @rule(refs=REFS)
    def decrement(self, refs: list[int]) -> None:
        counts = self.model.counts
        allowed = all(self.model.alive(r) and refs.count(r) <= counts[r] for r in refs)
        if self.attempt(allowed, self.table.decrement, refs):
            for ref in refs:
                counts[ref] -= 1
            self.settle()

    @rule(ref=REF)
    def hold(self, ref: int) -> None:
        if self.attempt(self.model.alive(ref), self.table.hold, ref):
            self.model.holds[ref] = self.model.holds.get(ref, 0) + 1

    @rule(ref=REF)
    def release(self, ref: int) -> None:
        held = self.model.holds.get(ref, 0)
        if self.attempt(self.model.alive(ref) and held > 0, self.table.release, ref):
            self.model.holds[ref] = held - 1
            self.settle()

    @rule(ref=REF)
    def ready(self, ref: int) -> None:
        allowed = self.model.alive(ref) and self.model.targets.get(ref, ref) == ref
        if self.attempt(allowed, self.table.ready, ref):
            self.model.targets[ref] = ref
            self.model.pending.discard(ref)
            self.settle()

    @rule(ref=REF)
    def abandon(self, ref: int) -> None:
        if self.attempt(self.model.alive(ref), self.table.abandon, ref):
            self.model.pending.discard(ref)
            self.settle()

    @rule(pair=st.tuples(REF, REF))
    def alias(self, pair: tuple[int, int]) -> None:
        model, (alias, target) = self.model, pair
        allowed = model.alive(alias) and model.alive(target) and alias not in model.targets
        allowed = allowed and model.end(target) != alias
        if self.attempt(allowed, self.table.alias, alias, target):
            model.targets[alias] = target
            model.pending.discard(alias)
            assert model.sweep() == set()

    @rule(ref=REF, refs=REFS)
    def contain(self, ref: int, refs: list[int]) -> None:
        model = self.model
        allowed = model.alive(ref) and ref not in model.contents
        allowed = allowed and all(model.alive(r) and model.counts[r] for r in refs)
        if self.attempt(allowed, self.table.contain, ref, refs) and refs:
            model.contents[ref] = refs

    @rule()
    def save_and_load(self) -> None:
        self.table = load(dump(self.table))

    @invariant()
    def same_as_the_model(self) -> None:
        model, table = self.model, self.table
        check_invariants(table)
        assert list(table.counts()) == [FREED if c is None else c for c in model.counts]
        assert list(table.targets()) == [model.targets.get(r, UNKNOWN) for r in range(len(model.counts))]
        for ref in range(len(model.counts)):
            assert table.contained(ref) == model.contents.get(ref, [])
            if model.alive(ref):
                end = model.end(ref)
                assert table.canonical(ref) == (end if end in model.targets else None)
                assert table.end(ref) == end
                assert set(table.members(ref)) == model.members(ref)
                assert table.is_pending(ref) == (ref in model.pending)


TestTable = pytest.mark.timeout(300)(TableMachine.TestCase)  # a failure takes its time to be made small
TestTable.settings = settings(max_examples=75, stateful_step_count=60, deadline=None)
