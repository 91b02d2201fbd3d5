"""What the processes of a kill test do with queues: numbers that each one puts in order, and that come in order.

What a process has put stays when it dies, what it has got goes with it. So of every process's numbers a part is left
that has no gap and, if it was put before anybody died, ends with the last one.
"""

import os
import struct
from typing import Any

import work
from work import Wrong

from fastrt._core.memory.clients import Client
from fastrt._core.objects import fifo, handles
from fastrt._core.objects.fifo import Fifo
from fastrt._core.objects.handles import Ref
from fastrt.errors import ObjectStoreFullError

FIRST = 30  # numbers of the survivor's
PUTS, GETS = 9, 4  # of each other process
ROOMS = (256, 320, 1024, 2048)  # of the segments, each the next one's when it is full; whoever comes next grows it
NUMBER = struct.Struct("<QQ")


def segment_of(client: Client, nbytes: int) -> Ref:
    room = handles.create(client, fifo.SEGMENT_BYTES + nbytes, work.KIND)
    fifo.write_segment(room)
    return room.seal()


def root_of(client: Client, segment: Ref, most: int = 0) -> Ref:
    room = handles.create(client, fifo.ROOT_BYTES, work.KIND)
    fifo.write_root(room, most, segment)
    return room.seal()


class Line:
    """One process's use of a queue; whoever made it holds what it consists of, also what it will grow by.

    Args:
        client: the process's attachment.
        root: the queue.
        segments: its memory, in order.
    """

    def __init__(self, client: Client, root: Ref, segments: list[Ref]) -> None:
        self.client = client
        self.segments = segments
        self.fifo = Fifo(client, handles.read(client, root, True)[2])

    def use(self, tail: bool) -> int:
        objref, index = self.fifo.place(tail)
        k = [segment.objref for segment in self.segments].index(objref)
        self.fifo.use(tail, objref, index, handles.read(self.client, self.segments[k], True)[2])
        return k

    def put(self, who: int, k: int) -> bool:
        """Put a process's next number, as a scalar or as bytes; False when there is no room and can be none."""
        while True:
            code = self.fifo.put(who << 20 | k) if k % 3 else self.fifo.put_bytes(work.KIND, NUMBER.pack(who, k))
            if code == fifo.OK:
                return True
            if code == fifo.GROW:
                after = self.use(True) + 1
                if after == len(self.segments):
                    return False
                self.fifo.grow(self.segments[after])
            elif code == fifo.MOVED:
                self.use(True)
            else:
                return False

    def get(self) -> tuple[int, int] | None:
        """Take the next number: whose, and which; None when there is none."""
        while (found := self.fifo.get()) == fifo.MOVED:
            self.use(False)
        if found is None:
            return None
        kind, value = found
        return NUMBER.unpack(value) if kind == work.KIND else (value >> 20, value & (1 << 20) - 1)


class Shared:
    """The survivor's queue, in which its own numbers are before anybody comes."""

    def __init__(self, client: Client) -> None:
        self.segments = [segment_of(client, nbytes) for nbytes in ROOMS]
        self.root = root_of(client, self.segments[0])
        line = Line(client, self.root, self.segments)
        for k in range(FIRST):
            if not line.put(0, k):
                raise Wrong("there is no room for the first numbers")
        self.checked = False

    def check(self, client: Client, victims: int) -> None:
        """Take all that is left, after so many processes have come by."""
        if self.checked:
            return
        self.checked = True
        line = Line(client, self.root, self.segments)
        count, _, _ = line.fifo.size()
        left: dict[int, list[int]] = {}
        for _ in range(count):
            found = line.get()
            if found is None:
                raise Wrong(f"lost: a queue that counts {count} values has {sum(map(len, left.values()))}")
            left.setdefault(found[0], []).append(found[1])
        if line.get() is not None:
            raise Wrong(f"a queue has more than the {count} values that it counts")
        for who, numbers in left.items():
            if numbers != list(range(numbers[0], numbers[-1] + 1)):
                raise Wrong(f"torn: of process {who} there are the numbers {numbers}")
        mine = left.get(0, [])
        if (mine and mine[-1] != FIRST - 1) or FIRST - len(mine) > victims * GETS:
            raise Wrong(f"lost: of {FIRST} numbers there are {mine}, and {victims} processes took {GETS} at most")
        if not line.put(0, FIRST) and count == 0:
            raise Wrong("an empty queue has no room")


def play(client: Client, shared: tuple[Ref, list[Ref]]) -> Any:
    """Everything that can be done with queues, once; what is to be kept."""
    line, me = Line(client, *shared), os.getpid()
    for k in range(PUTS):
        if not line.put(me, k):
            break
        if k % 2 and k // 2 < GETS:
            line.get()
    line.fifo.drained()
    line.fifo.room()
    try:
        segments = [segment_of(client, 256)]
        own = Line(client, root_of(client, segments[0], 2), segments)
    except ObjectStoreFullError:
        return line
    own.fifo.wait_item(0.0003)
    own.fifo.wait_get(0.0003)
    for k in range(3):
        own.put(me, k)  # the last one finds it full
    own.fifo.wait_room(0.0003)
    own.get()
    own.fifo.close()
    return own
