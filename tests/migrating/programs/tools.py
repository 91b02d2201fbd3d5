"""Queues, pools, placement groups, generators and environments."""

import gc
import io
import os
import threading

import ray
from ray.runtime_env import RuntimeEnv
from ray.util.actor_pool import ActorPool
from ray.util.multiprocessing import Pool
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

ray.init(num_cpus=4, ignore_reinit_error=True)

queue = Queue(maxsize=3)
queue.put_nowait_batch([1, 2])
print(queue.qsize(), queue.get(), queue.get_nowait(), queue.empty())
try:
    queue.get_nowait()
except Empty:
    print("empty")
queue.shutdown()


def square(x):
    return x * x


with Pool(2) as pool:
    print(pool.map(square, range(5)), pool.apply(square, (9,)), sorted(pool.imap_unordered(square, range(3))))


@ray.remote
class Worker:
    def work(self, x):
        return x + 100


actors = ActorPool([Worker.remote() for _ in range(2)])
print(list(actors.map(lambda actor, x: actor.work.remote(x), range(4))), actors.has_free())


@ray.remote(num_cpus=1)
def where():
    group = ray.util.get_current_placement_group()
    return group is not None, os.environ.get("COLOUR")


group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="PACK")
print(ray.get(group.ready()) is not None, group.bundle_count, group.wait(timeout_seconds=30))
inside = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
print(
    ray.get(where.options(scheduling_strategy=inside).remote()), ray.get(where.options(placement_group=group).remote())
)
remove_placement_group(group)
here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
print(ray.get(where.options(scheduling_strategy=here).remote()))
print(ray.get(where.options(runtime_env=RuntimeEnv(env_vars={"COLOUR": "blue"})).remote()))


@ray.remote
def count(n):
    for k in range(n):  # Ray's workers cannot take all of `yield from`
        yield k * 10


stream = count.remote(3)
print([ray.get(ref) for ref in stream], stream.is_finished())
print([ray.get(ref) for ref in ray.get(count.options(num_returns="dynamic").remote(2))])


class Locked:
    def __init__(self, value):
        self.value, self.lock = value, threading.Lock()


good, failures = ray.util.inspect_serializability(Locked(1), name="locked", print_file=io.StringIO())
print(good, len(failures))
ray.util.register_serializer(Locked, serializer=lambda one: one.value, deserializer=Locked)
print(ray.get(ray.put([Locked(3)]))[0].value)
ray.util.deregister_serializer(Locked)
print(ray.util.log_once("a key"), ray.util.log_once("a key"), ray.util.get_node_ip_address().count("."))
print(ray.LoggingConfig(encoding="JSON").to_dict()["encoding"], len(ray.get_gpu_ids()))
location = ray.experimental.get_object_locations([ray.put(bytes(200_000))])
print([len(about["node_ids"]) for about in location.values()])
kept = ray.put(list(range(1000)))
pickled = ray.cloudpickle.dumps({"kept": kept})
del kept
gc.collect()
print(sum(ray.get(ray.cloudpickle.loads(pickled)["kept"])))
# prints:
# 2 1 2 True
# empty
# [0, 1, 4, 9, 16] 81 [0, 1, 4]
# [100, 101, 102, 103] True
# True 2 True
# (True, None) (True, None)
# (False, None)
# (False, 'blue')
# [0, 10, 20] True
# [0, 10]
# False 1
# 3
# True False 3
# JSON 0
# [1]
# 499500
