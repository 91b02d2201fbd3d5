"""The state API: lists with filters, single rows, and sums, as objects with attributes."""

import os
import threading
import time

import ray
from ray.util.state import (
    get_actor,
    get_node,
    get_objects,
    get_task,
    list_actors,
    list_jobs,
    list_nodes,
    list_objects,
    list_placement_groups,
    list_tasks,
    list_workers,
    summarize_actors,
    summarize_objects,
    summarize_tasks,
)  # fmt: skip

ray.init(num_cpus=4, ignore_reinit_error=True)


@ray.remote
def half(x):
    return x // 2 if x else 1 // x


@ray.remote
class Listed:
    def __init__(self):
        self.job = ray.get_runtime_context().get_job_id()

    def __repr__(self):
        return f"<of job {self.job}>"

    def pid(self):
        return os.getpid()

    def stay(self):
        threading.Event().wait(60)


def until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return condition()


listed = Listed.options(name="listed").remote()
pid = ray.get(listed.pid.remote())
(row,) = list_actors(filters=[("class_name", "=", "Listed"), ("state", "=", "ALIVE")])
print(row.class_name, row.name, row.pid == pid, row["state"], row.actor_id == listed._actor_id.hex())
print(row.job_id == list_jobs()[0].job_id, row.repr_name == f"<of job {row.job_id}>")
print(get_actor(row.actor_id).state, get_actor("ff" * 16) is None)
print(
    list_actors(filters=[("name", "=", "no one")]),
    "listed" in [one.name for one in list_actors(filters=[("name", "!=", "listed")])],
)

(node,) = list_nodes(filters=[("state", "=", "ALIVE")])
print(node.resources_total["CPU"], get_node(node.node_id).node_id == ray.nodes()[0]["NodeID"], node.is_head_node)
print(pid in [worker.pid for worker in list_workers(limit=1000)], [job.status for job in list_jobs()][:1])
(worker,) = list_workers(detail=True, filters=[("pid", "=", pid)])
print("age:", 0 < time.time() - worker["start_time_ms"] / 1000 < 60, worker["end_time_ms"])

call = listed.stay.remote()
running = [("state", "=", "RUNNING"), ("name", "=", "Listed.stay")]
print(until(lambda: len(list_tasks(filters=running)) == 1))
(task,) = list_tasks(filters=running, detail=True)
print(task.name, task.type, task.task_id == call.task_id().hex(), task.attempt_number)
named = listed.pid.options(name="asks").remote()
print([(task.func_or_class_name, task.job_id == row.job_id) for task in list_tasks(filters=[("name", "=", "asks")])])
counts = summarize_tasks()["cluster"]["summary"]["Listed.stay"]["state_counts"]
print(counts["RUNNING"], summarize_actors()["cluster"]["summary"]["Listed"]["state_counts"]["ALIVE"])

good, bad = half.remote(2), half.options(max_retries=0).remote(0)
print(until(lambda: len(ray.wait([good, bad], num_returns=2, timeout=0)[0]) == 2))
print(until(lambda: summarize_tasks()["cluster"]["summary"]["half"]["state_counts"] == {"FINISHED": 1, "FAILED": 1}))
print(until(lambda: get_task(good).state == "FINISHED"), get_task(bad).name, get_task(bad).state, get_task(ray.put(1)))
print([row.error_type for row in list_tasks(filters=[("name", "=", "half"), ("state", "!=", "FINISHED")])])
print(get_task(bad).job_id == list_jobs()[0].job_id, get_task(bad).task_id == bad.task_id().hex())

value = ray.put(b"x" * 200_000)
print(get_objects(value.hex())[0].object_size >= 200_000, len(list_objects(limit=2)) <= 2)
print(summarize_objects()["cluster"]["total_objects"] >= 1)
group = ray.util.placement_group([{"CPU": 1}], name="listed group")
print(group.wait(timeout_seconds=30), [one.state for one in list_placement_groups(filters=[("state", "=", "CREATED")])])
ray.util.remove_placement_group(group)
ray.kill(listed)
# prints:
# Listed listed True ALIVE True
# True True
# ALIVE True
# [] False
# 4.0 True True
# True ['RUNNING']
# age: True 0
# True
# Listed.stay ACTOR_TASK True 0
# [('Listed.pid', True)]
# 1 1
# True
# True
# True half FAILED None
# ['TASK_EXECUTION_EXCEPTION']
# True True
# True True
# True
# True ['CREATED']
