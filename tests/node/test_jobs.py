"""The jobs of other nodes whose tasks run here: their names, the tags of an uplink's tasks, and invalid names."""

import pytest

from fastrt._core.memory.clients import JOB_BITS
from fastrt._core.tasks import tasks as core
from fastrt.cluster import jobs
from fastrt.cluster.references import PeerError
from support.sides import in_loop, pair

ELSEWHERE = bytes(range(16))


def named(job, node=ELSEWHERE):
    return node + job.to_bytes(8, "big")


@in_loop
async def test_job_keeps_its_name_from_node_to_node_and_in_what_its_tasks_submit():
    async with pair() as (here, there):
        here.client.adopt_job(0x10002)
        result = here.forward()
        there.exchange.on_frame(await here.frames(lambda frame: frame.task))
        assert there.client.working_job == there.client.job  # what the uplink submits next is of no job
        task = core.next_task(there.client, 0.0, 0.0)
        number = core.info(there.client, task)["job"]
        assert number & ((1 << JOB_BITS) - 1) == there.client.job  # the tasks of a dead uplink are found by it
        name = there.exchange.jobs.name(number)
        assert (jobs.node_of(name), name[16:]) == (here.client.segment.session, (0x10002).to_bytes(8, "big"))
        assert (here.exchange.jobs.here(name), there.exchange.jobs.here(name)) == (0x10002, None)
        nested = there.submit()
        assert core.finish_scalar(there.client, task, None)
        task = core.next_task(there.client, 0.0, 0.0)
        assert core.info(there.client, task)["job"] == number
        assert core.finish_scalar(there.client, task, None)
        del result, nested


@in_loop
async def test_unknown_jobs_have_no_name():
    async with pair() as (here, there):
        table = here.exchange.jobs
        assert table.name(0) == b""
        assert table.name(here.client.job) == b""  # of tasks that came without a name
        assert table.name(5 << JOB_BITS | here.client.job) == b""
        other = jobs.Jobs(there.client).number(named(1))
        assert table.name(other) == b""  # the tag of an earlier uplink process
        assert (table.number(b""), table.here(b"")) == (here.client.job, 0)


@in_loop
async def test_new_job_takes_the_tag_that_was_seen_the_longest_time_ago():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_TAGS", 4)
        async with pair() as (here, _):
            table = jobs.Jobs(here.client)
            numbers = [table.number(named(job)) for job in (1, 2, 3)]
            assert table.number(named(1)) == numbers[0]
            assert table.number(named(4)) == numbers[1]
            assert [table.name(number) for number in numbers] == [named(1), named(4), named(3)]
            assert len(set(numbers)) == 3


@in_loop
async def test_invalid_name_is_the_peers_fault():
    async with pair() as (here, there):
        result = here.forward()
        frame = await here.frames(lambda frame: frame.task)
        for name in (b"x", ELSEWHERE, named(1) + b"x"):
            frame.task[0].job = name
            with pytest.raises(PeerError, match="the name of a job has"):
                there.exchange.on_frame(frame)
            del frame.function[:]  # it has arrived
            with pytest.raises(PeerError, match="the name of a job has"):
                there.exchange.jobs.here(name)
        del result
