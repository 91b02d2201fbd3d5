"""What the processes of a kill test do with generators: streams whose right items follow from the seed.

Whoever claims a stream's task produces, all over again from the beginning where another one has died, and everybody
may read; so items must be neither lost nor doubled nor out of order for a stream that one process alone reads.
"""

import struct
from collections.abc import Iterator

import work
from work import Wrong

from fastrt._core.memory.clients import Client
from fastrt._core.objects import handles
from fastrt._core.objects.handles import Ref
from fastrt._core.tasks import generator_relay, generators, submission, tasks
from fastrt._core.tasks.generators import Producer

ITEMS = 7
Stream = tuple[Ref, Ref, int]  # the stream, its end, its seed


def submit(client: Client, function: Ref, seed: int, limit: int = 0, big: int = 0) -> Stream:
    """Submit a task that yields ITEMS items; with `big` its arguments are serialized bytes, and it has a policy."""
    stream = generators.create(client, limit)
    if big:
        args = struct.pack("<QQ", work.YIELD, seed) + bytes(big)
        end = submission.submit(
            client,
            submission.TaskOptions(function, 1, work.RETRIES, policy=function),
            submission.PackedArgs(work.KIND, args, [function], 0),
            stream,
        )
    else:
        end = submission.submit(client, submission.TaskOptions(function, 1, work.RETRIES), (work.YIELD, seed), stream)
    return stream, end, seed


def items(client: Client, seed: int) -> Iterator[int | Ref]:
    """Scalars, and values of several sizes."""
    for k in range(ITEMS):
        yield work.put(client, seed + k, (300, 20000)[k % 2]) if k % 3 == 2 else work.answer(seed + k)


def produce(client: Client, task: int, seed: int) -> None:
    """Run a stream's task to its end."""
    producer = Producer(client, task)
    if seed % 2:
        producer.run(items(client, seed), producer.add_ref, lambda: producer.wait(0.0003, 0.0001))
    else:
        for item in items(client, seed):
            if producer.wanted == generators.NOTHING:
                break
            if not producer.skips() and not producer.add(item):
                producer.add_ref(item)
            if producer.full:
                producer.wait(0.0, 0.0)
    if not tasks.finish_scalar(client, task, None):
        raise Wrong(f"task {task} has its result already, but its word says it runs here")


def read(client: Client, stream: Stream, most: int = ITEMS) -> list[int]:
    """Take items without waiting for long, and say which they are."""
    found = []
    while len(found) < most:
        item = generators.take(client, *stream[:2], 0.0003, 0.0001)
        if item is False or item is None or item is stream[1]:
            break
        value = work.value_of(client, item)
        for k in range(ITEMS):
            if value == (stream[2] + k if k % 3 == 2 else work.answer(stream[2] + k)):
                found.append(k)
                break
        else:
            raise Wrong(f"an item of stream {stream[2]} is {value}")
    return found


def check(client: Client, stream: Stream, alone: bool) -> None:
    """Read a stream to its end; whether all is there if nobody else reads it, and no item comes twice."""
    found = read(client, stream)
    if alone and found != list(range(ITEMS)):
        raise Wrong(f"lost: of stream {stream[2]} there are the items {found}")
    if sorted(set(found)) != found:
        raise Wrong(f"torn: the items of stream {stream[2]} come as {found}")
    if generators.take(client, *stream[:2], 0, 0.0) is not None:
        raise Wrong(f"stream {stream[2]} does not end: {generators.info(client, stream[0])}")


def play(client: Client, function: Ref, shared: Stream) -> list[Stream]:
    """Everything that can be done with streams, once; what is to be kept."""
    mine = [submit(client, function, 10_000 + k, k % 3, 200 * (k % 2)) for k in range(6)]
    generators.take(client, *mine[0][:2], 0.0003, 0.0)  # sleeps: nobody has begun
    generators.wait_some(client, [stream[:2] for stream in mine], 1, 0.0003, 0.0)
    generators.wait_some(client, [mine[0][:2], function, mine[1][:2]], 2, 0.0003, 0.0)  # two are not ready
    dropped = submit(client, function, 10_100)
    del dropped  # before it begins
    work.run_all(client, function, 9)
    read(client, mine[0])
    read(client, mine[1], 3)
    read(client, shared, 2)
    task = _begin(client, submit(client, function, 10_200, 1))
    if task is not None:
        work.perform(client, function, task)
    for stream in mine[3:5]:
        generators.is_ready(client, *stream[:2])
    ready = generators.wait_some(client, [function, *(stream[:2] for stream in (mine[0], *mine[3:]))], 2, 0.0003, 0.0)
    if not ready or ready[0] != 0:
        raise Wrong(f"of what is there and streams that others run, ready are {ready}")
    pass_on(client, function, submit(client, function, 10_400, 2))
    box = work.put(client, 10_300, 100, list(mine[2][:2]))  # whoever reads it can read the stream
    del mine[2:4]
    handles.contained(client, box)
    return mine


def pass_on(client: Client, function: Ref, stream: Stream) -> None:
    """Take items for readers elsewhere, who read one of them and then want nothing, as between two nodes."""
    again = generators.create(client, 2, 3)  # where three items were produced elsewhere
    end = submission.submit(client, submission.TaskOptions(function, 1, work.RETRIES), (work.YIELD, stream[2]), again)
    task = _begin(client, stream)
    if task is not None:
        if work.seed_of(client, task) == stream[2]:
            generator_relay.arm_produced(client, Producer(client, task), 0)
        generator_relay.pass_on(client, *stream[:2])
        generator_relay.pass_on(client, *stream[:2])
        generator_relay.note_readers(client, stream[0], 1, generators.ITEMS)
        generator_relay.arm_items(client, *stream[:2])
        generator_relay.note_readers(client, stream[0], 0, generators.NOTHING)
        work.perform(client, function, task)
    del end
    fill(client)


def fill(client: Client) -> None:
    """Fill a stream with items of another node's, which somebody here has waited for."""
    stream = generators.create(client, generators.ELSEWHERE)
    for _ in range(10):
        if generators.take(client, stream, stream, 0, 0.0) is not False:
            raise Wrong("a stream without items has some")
        if generator_relay.is_awaited(client, stream):
            break  # else a late wake-up for the entry's former object has ended the wait: a reader looks again
    else:
        raise Wrong("a reader found no item ten times, and the stream does not say that a reader waits")
    generator_relay.arm_taken(client, stream, 0)
    generator_relay.add_to(client, stream, handles.put_scalar(client, 5))
    generators.take(client, stream, stream, 0, 0.0003)
    generator_relay.close(client, stream)
    if generators.take(client, stream, stream, 0, 0.0) is not None:
        raise Wrong("a stream that is over has items")


def _begin(client: Client, stream: Stream) -> int | None:
    """Claim a stream's task, produce one item, and have the last reader leave."""
    task = tasks.next_task(client, 0.0, 0.0)
    if task == tasks.NO_TASK:
        return None
    if work.seed_of(client, task) == stream[2]:
        producer = Producer(client, task)
        producer.skips()
        producer.add(work.answer(stream[2]))
    return task
