"""Ids of references, tasks, actors and nodes agree wherever a program reads them."""

import threading

import ray

ray.init(num_cpus=4, ignore_reinit_error=True)


@ray.remote
def who():
    context = ray.get_runtime_context()
    return context.get_task_id(), context.get_node_id(), context.get_actor_id(), context.get_task_name()


@ray.remote
class Member:
    def who(self):
        context = ray.get_runtime_context()
        return context.get_actor_id(), context.get_task_id(), context.get_actor_name(), context.current_actor

    def grow(self):
        return 7


ref = who.remote()
task, node, actor, name = ray.get(ref)
print("task:", task == ref.task_id().hex(), "name:", name, "actor:", actor)
print("node:", node in [one["NodeID"] for one in ray.nodes()])
print("bytes:", ref.binary().hex() == ref.hex(), ref.size() == len(ref.binary()), ref.is_nil())

member = Member.options(name="the member").remote()
own, call, called, handle = ray.get(member.who.remote())
print("actor:", own == member._actor_id.hex(), called)
print("itself:", ray.get(handle.grow.remote()), call is not None)

for kind in (ray.ActorID, ray.NodeID, ray.JobID, ray.WorkerID, ray.PlacementGroupID):
    nil = kind.nil()
    print(kind.__name__, nil.is_nil(), kind.from_hex(nil.hex()) == nil, kind(nil.binary()) == nil)
print("driver:", ray.get_runtime_context().get_task_name(), ray.get_runtime_context().get_actor_id())
print("lengths:", len(task), len(node), len(own), len(ray.get_runtime_context().get_job_id()), ref.task_id().size())
print("handle:", repr(member) == f"Actor(Member, {own})", ref.job_id() == ray.get_runtime_context().job_id)


@ray.remote
def jobs():
    found = [ray.put(1).job_id().hex()]
    thread = threading.Thread(target=lambda: found.append(ray.get_runtime_context().get_job_id()))
    thread.start()
    thread.join()
    return found


print("job:", set(ray.get(jobs.remote())) == {ray.get_runtime_context().get_job_id()})
affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
there = who.options(scheduling_strategy=affinity), who.options(label_selector={"ray.io/node-id": node})
print("placed:", [ray.get(one.remote())[1] == node for one in there], ray.ObjectRef.nil().is_nil())


@ray.remote
class Named:
    def names(self):
        context = ray.get_runtime_context()
        return context.get_task_name(), context.get_task_function_name().rpartition("ids.")[2].removeprefix("__main__.")


def made():
    def inside():
        context = ray.get_runtime_context()
        return context.get_task_name(), context.get_task_function_name().rpartition(".")[2]

    return ray.remote(inside)


named = Named.remote()
print("names:", ray.get([named.names.remote(), named.names.options(name="a call").remote()]))
print("names:", ray.get([made().remote(), made().options(name="a task").remote()]))
print("methods:", [name for name in dir(named) if not name.startswith("_")])
group = ray.util.placement_group([{"CPU": 1}], name="the group")
ray.get(group.ready())
table = ray.util.placement_group_table(group)
print("group:", len(group.id.hex()), table["placement_group_id"] == group.id.hex(), group.bundle_specs)
print("bundle:", table["bundles_to_node_id"] == {0: node}, group.is_empty, table["name"])
stats = table["stats"]
print("stats:", *[name.removesuffix("_ms") for name in sorted(stats)])
print("placed:", stats["scheduling_state"], stats["scheduling_attempt"], stats["end_to_end_creation_latency_ms"] > 0)
print("of all:", ray.util.placement_group_table()[group.id.hex()]["name"])
ray.util.remove_placement_group(group)
ray.kill(member)
# prints:
# task: True name: who actor: None
# node: True
# bytes: True True False
# actor: True the member
# itself: 7 True
# ActorID True True True
# NodeID True True True
# JobID True True True
# WorkerID True True True
# PlacementGroupID True True True
# driver: None None
# lengths: 48 56 32 8 24
# handle: True True
# job: True
# placed: [True, True] True
# names: [('Named.names', 'Named.names'), ('a call', 'Named.names')]
# names: [('inside', 'inside'), ('a task', 'inside')]
# methods: ['names']
# group: 36 True [{'CPU': 1.0}]
# bundle: True False the group
# stats: end_to_end_creation_latency highest_retry_delay scheduling_attempt scheduling_latency scheduling_state
# placed: FINISHED 1 True
# of all: the group
