"""Actors: names, options of calls and methods, concurrency groups, handles in values, restarts."""

import asyncio
import os

import ray

ray.init(num_cpus=4, ignore_reinit_error=True)


@ray.remote(concurrency_groups={"io": 2}, max_restarts=1, max_pending_calls=-1, allow_out_of_order_execution=False)
class Store:
    def __init__(self, start=0):
        self.value = start

    @ray.method(num_returns=2, max_task_retries=1)
    def pair(self):
        return self.value, self.value + 1

    @ray.method(concurrency_group="io")
    def read(self):
        return self.value

    def add(self, amount):
        self.value += amount
        return self.value

    def restarted(self):
        return ray.get_runtime_context().was_current_actor_reconstructed

    def pid(self):
        return os.getpid()


@ray.remote
def use(handles, amount):
    return ray.get(handles["store"].add.remote(amount))


store = Store.options(name="store", get_if_exists=True).remote(10)
print(ray.get(store.pair.remote()), ray.get(store.read.options(concurrency_group="io").remote()))
print(ray.get(store.add.options(name="an addition").remote(5)), ray.get(use.remote({"store": store}, 5)))
again = Store.options(name="store", get_if_exists=True).remote(99)
print(ray.get(again.read.remote()), again == ray.get_actor("store"), "store" in ray.util.list_named_actors())
pid = ray.get(store.pid.remote())
ray.kill(store, no_restart=False)
while True:
    try:
        now = ray.get(store.pid.remote())
    except ray.exceptions.RayActorError:
        continue
    if now != pid:
        break
print(ray.get(store.read.remote()), ray.get(store.restarted.remote()))
ray.kill(store)


@ray.remote
class Waiter:
    async def __init__(self, name):
        self.name = await asyncio.ensure_future(self.titled(name))

    async def titled(self, name):
        return name.title()

    async def named(self):
        return self.name

    async def wait_for(self, refs):
        return sum([await ref for ref in refs])


@ray.remote
def one():
    return 1


waiter = Waiter.remote(name="waiter")
print(ray.get(waiter.named.remote()))
print(ray.get(waiter.wait_for.remote([one.remote(), one.remote()])))
print(ray.get(waiter.__ray_call__.remote(lambda self: type(self).__name__)))
ray.kill(waiter)
# prints:
# [10, 11] 10
# 15 20
# 20 True True
# 10 True
# Waiter
# 2
# Waiter
