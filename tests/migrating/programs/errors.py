"""Errors: what `get` raises, its cause, and the classes that catch it."""

import threading

import ray
from ray import exceptions

ray.init(num_cpus=4, ignore_reinit_error=True)


class Refused(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code


@ray.remote(max_retries=0)
def fail(kind):
    if kind == "own":
        raise Refused(42)
    if kind == "slow":
        for _ in range(600):
            threading.Event().wait(0.1)
    return {}[kind]


@ray.remote
class Fragile:
    def work(self):
        raise ValueError("not today")

    def leave(self):
        ray.actor.exit_actor()


def caught(ref, **options):
    try:
        return ray.get(ref, **options)
    except exceptions.RayError as exc:
        return exc


error = caught(fail.remote("own"))
print(
    isinstance(error, Refused), isinstance(error, exceptions.RayTaskError), type(error.cause).__name__, error.cause.code
)
error = caught(fail.remote("gone"))
print(isinstance(error, KeyError), isinstance(error.as_instanceof_cause(), KeyError))
slow = fail.remote("slow")
error = caught(slow, timeout=0.1)
print(type(error).__name__, isinstance(error, TimeoutError))
ray.cancel(slow)
print(isinstance(caught(slow), exceptions.TaskCancelledError))

fragile = Fragile.remote()
print(isinstance(caught(fragile.work.remote()), ValueError))
print(isinstance(caught(fragile.leave.remote()), exceptions.RayActorError))
dead = caught(fragile.work.remote())
print(isinstance(dead, exceptions.ActorDiedError), isinstance(dead, exceptions.ActorUnavailableError))
try:
    ray.get_actor("no one")
except ValueError as exc:
    print("no actor:", type(exc).__name__ != "AssertionError")
taken = Fragile.options(name="taken").remote()
try:
    Fragile.options(name="taken").remote()
except ValueError:
    print("taken")
print(
    issubclass(exceptions.ObjectFreedError, exceptions.ObjectLostError),
    issubclass(exceptions.RayChannelTimeoutError, TimeoutError),
)
try:
    ray.init()
except RuntimeError:
    print("twice")
ray.kill(taken)
for refused in (lambda: ray.get(1), lambda: ray.kill("taken"), lambda: ray.get_actor(None)):
    try:
        refused()
    except ValueError:
        print("refused")
# prints:
# True True Refused 42
# True True
# GetTimeoutError True
# True
# True
# True
# True False
# no actor: True
# taken
# True True
# twice
# refused
# refused
# refused
