"""A model beside the real thing: arena and object table against a dict, under every order of operations.

Two clients of one process put values of many sizes and kinds, contain references, pin, pass references on by
name, drop references and views in any order, begin values and abandon them, fill the store, and die. After every
step the arena must be whole, and exactly the objects that the model says are alive must be there.
"""

import dataclasses
import os
import sys

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastrt._core.memory import clients
from fastrt._core.memory.clients import Client
from fastrt._core.memory.segment import Segment
from fastrt._core.objects import handles
from fastrt._core.repair import fsck, recovery
from fastrt.errors import ObjectStoreFullError, StaleReferenceError

STORE_BYTES = 1 << 20
OBJECTS_MAX = 400
SLAB_PAGES_KEPT = 6
KIND = 16

ANY = st.integers(0, 1 << 30)  # picks an element of a list that the strategy cannot know
CLIENT = st.integers(0, 1)
SIZE = st.one_of(
    st.sampled_from([0, 1, 71, 72, 73, 255, 256, 257, 1024, 8191, 8192, 8193, 16384, 16385]),
    st.integers(0, 2000),
    st.integers(0, 200_000),
    st.sampled_from([300_000, 500_000, STORE_BYTES, STORE_BYTES + 1]),
)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 63) - 1), st.text(max_size=200), st.binary())


@dataclasses.dataclass
class Value:
    """What the model knows of an object."""

    name: tuple[int, int]
    data: object
    children: list["Value"]


@dataclasses.dataclass
class Hold:
    """A reference, a view or a writer of one of the clients, and what it is of."""

    client: int
    thing: object
    value: Value | None = None


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment.create(STORE_BYTES, objects_max=OBJECTS_MAX, tasks_max=64)
        self.clients = [self.join(), self.join()]
        self.refs: list[Hold] = []
        self.pins: list[Hold] = []
        self.writers: list[Hold] = []
        self.dead: list[Value] = []
        self.counter = 0

    def join(self) -> Client:
        return Client(self.segment, *clients.admit(self.segment, os.getpid(), clients.KIND_TOOL))

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:  # its traceback holds whatever the failed step was about
            self.segment.unlink()
            return
        try:
            for holds in (self.writers, self.pins, self.refs):
                holds.clear()
            assert fsck.fsck(self.clients[0], quiet=True) == []
            assert fsck.usage(self.clients[0])["objects"] == 0
            assert fsck.usage(self.clients[0])["bytes_used"] <= SLAB_PAGES_KEPT << 14
            handles.create(self.clients[0], STORE_BYTES, KIND)  # what is empty is empty, in one piece
        finally:
            self.segment.unlink()

    # ---- the model ----

    def alive(self) -> dict[tuple[int, int], Value]:
        """Held by anybody, or contained in what is."""
        found: dict[tuple[int, int], Value] = {}
        todo = [hold.value for hold in (*self.refs, *self.pins)]
        while todo:
            value = todo.pop()
            if value.name not in found:
                found[value.name] = value
                todo += value.children
        return found

    def mine(self, c: int) -> list[Hold]:
        return [hold for hold in self.refs if hold.client == c]

    def drop(self, holds: list[Hold], k: int) -> None:
        before = self.alive()
        del holds[k % len(holds)]
        after = self.alive()
        self.dead += [value for name, value in before.items() if name not in after]

    def keep(self, c: int, ref: handles.Ref, data: object, children: list[Value]) -> None:
        self.refs.append(Hold(c, ref, Value((ref.objref, ref.index), data, children)))

    def bytes_of(self, nbytes: int) -> bytes:
        self.counter += 1
        return (self.counter.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]

    # ---- put ----

    @rule(c=CLIENT, value=SCALAR)
    def put_scalar(self, c: int, value: object) -> None:
        try:
            ref = handles.put_scalar(self.clients[c], value)
        except ObjectStoreFullError:
            return
        self.keep(c, ref, value, [])

    @rule(c=CLIENT, nbytes=SIZE, picks=st.lists(ANY, max_size=4))
    def put(self, c: int, nbytes: int, picks: list[int]) -> None:
        mine = self.mine(c)
        inside = [mine[k % len(mine)] for k in picks] if mine else []
        before = fsck.usage(self.clients[c])
        try:
            writer = handles.create(self.clients[c], nbytes, KIND, len(inside))
        except ObjectStoreFullError:
            after = fsck.usage(self.clients[c])
            assert after["objects"] == before["objects"]
            assert after["bytes_used"] <= before["bytes_used"]  # less where empty slab pages were given up for it
            return
        data = self.bytes_of(nbytes)
        writer.copy(0, data)
        ref = writer.seal([hold.thing for hold in inside])
        self.keep(c, ref, data, [hold.value for hold in inside])

    @rule(c=CLIENT, nbytes=SIZE, nrefs=st.integers(0, 3))
    def begin(self, c: int, nbytes: int, nrefs: int) -> None:
        try:
            writer = handles.create(self.clients[c], nbytes, KIND, nrefs)
        except ObjectStoreFullError:
            return
        writer.copy(0, b"\xff" * nbytes)
        self.writers.append(Hold(c, writer))

    @precondition(lambda self: self.writers)
    @rule(k=ANY)
    def abandon(self, k: int) -> None:
        del self.writers[k % len(self.writers)]

    @rule(c=CLIENT, nbytes=st.sampled_from([100, 3000, 16384, 50_000]))
    def fill(self, c: int, nbytes: int) -> None:
        """To the brim; and the room that comes back is good for the same again."""
        counts = []
        for _ in range(2):
            held = []
            try:
                while True:
                    held.append(handles.create(self.clients[c], nbytes, KIND))
            except ObjectStoreFullError:
                counts.append(len(held))
            assert fsck.fsck(self.clients[c], quiet=True) == []
        assert counts[0] <= counts[1]  # the first time, empty slab pages may have divided a run

    # ---- read, pass on ----

    @precondition(lambda self: self.refs)
    @rule(k=ANY, keep=st.booleans())
    def read(self, k: int, keep: bool) -> None:
        hold = self.refs[k % len(self.refs)]
        kind, error, data = handles.read(self.clients[hold.client], hold.thing)
        assert not error
        if kind == KIND:
            assert bytes(data) == hold.value.data
        else:
            assert data == hold.value.data
        if isinstance(data, handles.Pin) and keep:
            self.pins.append(Hold(hold.client, memoryview(data), hold.value))

    @precondition(lambda self: self.refs)
    @rule(k=ANY)
    def open_container(self, k: int) -> None:
        hold = self.refs[k % len(self.refs)]
        for ref, value in zip(
            handles.contained(self.clients[hold.client], hold.thing), hold.value.children, strict=True
        ):
            assert (ref.objref, ref.index) == value.name
            self.refs.append(Hold(hold.client, ref, value))

    @rule(c=CLIENT, k=ANY)
    def take_by_name(self, c: int, k: int) -> None:
        alive = list(self.alive().values())
        if alive:
            value = alive[k % len(alive)]
            self.refs.append(Hold(c, handles.acquire(self.clients[c], *value.name), value))

    @precondition(lambda self: self.dead)
    @rule(c=CLIENT, k=ANY)
    def take_what_is_gone(self, c: int, k: int) -> None:
        try:
            handles.acquire(self.clients[c], *self.dead[k % len(self.dead)].name)
        except StaleReferenceError:
            return
        raise AssertionError("a dead object was acquired")

    # ---- let go ----

    @precondition(lambda self: self.refs)
    @rule(k=ANY)
    def drop_reference(self, k: int) -> None:
        self.drop(self.refs, k)

    @precondition(lambda self: len(self.refs) > 5)
    @rule(k=ANY)
    def drop_many_references(self, k: int) -> None:
        for _ in range(len(self.refs) // 2):
            k = k * 6364136223846793005 + 1442695040888963407 & (1 << 62) - 1
            self.drop(self.refs, k >> 20)

    @precondition(lambda self: self.pins)
    @rule(k=ANY)
    def drop_view(self, k: int) -> None:
        self.drop(self.pins, k)

    @rule(c=CLIENT)
    def die(self, c: int) -> None:
        """The client vanishes with all that it holds; another one takes its place."""
        before = self.alive()
        self.clients[c].abandon()  # what Python still holds of it lets go without a trace
        for holds in (self.refs, self.pins, self.writers):
            holds[:] = [hold for hold in holds if hold.client != c]
        result = recovery.recover(self.clients[1 - c], self.clients[c].index)
        assert result == {"ending": [], "running": []}
        self.clients[c] = self.join()
        after = self.alive()
        self.dead += [value for name, value in before.items() if name not in after]

    # ---- what always holds ----

    @invariant()
    def arena_is_whole(self) -> None:
        assert fsck.fsck(self.clients[0], quiet=True) == []

    @invariant()
    def what_should_live_lives(self) -> None:
        assert fsck.usage(self.clients[1])["objects"] == len(self.alive())

    @invariant()
    def views_never_change(self) -> None:
        for hold in self.pins:
            assert hold.thing == hold.value.data

    @invariant()
    def holders_are_as_counted(self) -> None:
        for hold in self.refs[-3:]:
            row = handles.describe(self.clients[hold.client], hold.thing)
            for what, holds in (("refs", self.refs), ("pins", self.pins)):
                who = {h.client for h in holds if h.value.name == hold.value.name}
                assert row[what] == sorted(self.clients[c].index for c in who)


ArenaMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestArenaMachine = ArenaMachine.TestCase
