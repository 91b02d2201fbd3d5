"""What makes a task or a call more than the common one: its items come one by one, or it is run by a policy.

A policy is what whoever runs the task must know and the core need not: it travels as an object of its own, one for
each policy, which the task's record names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

from fastrt._core.objects import functions
from fastrt._core.tasks import submission as core_submission
from fastrt._core.tasks.submission import PRIORITY_MAX
from fastrt.errors import ObjectStoreFullError
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, deserialize, serialize
from fastrt.tasks import namespaces
from fastrt.tasks.runtime_env import OPTION as ENVIRONMENT
from fastrt.tasks.runtime_env import Environment, environment_of

STREAMING = "streaming"
DYNAMIC = "dynamic"
LIMIT_MAX = (1 << 31) - 1
RETRIES_FOREVER = 255  # in a task's record
_LIMITS = ("generator_backpressure", "_generator_backpressure_num_objects")  # ours, and as Ray spells it
_DELAYS = ("retry_delay", "retry_backoff", "retry_delay_max")
OPTIONS = (*_LIMITS, *_DELAYS, "timeout", "priority", "max_calls")
OF_FUNCTIONS = ("priority", "max_calls")  # not of methods
CALLS_MAX = 1 << 30
SECONDS_MAX = 1e9
NO_PRIORITY = (
    "an actor's calls have no priority: those of one caller run in the order in which they are made; give priority to "
    "remote functions, or make several actors"
)


@dataclass(frozen=True)
class Policy:
    """How a task is run.

    Attributes:
        dynamic: what it yields are its items, and a list of references to them is its result.
        retry_on: exceptions after which it runs again; `Exception`: all but fastrt's own; empty: what its record says.
        delay_s: how long the first further attempt waits.
        backoff: how many times as long each one waits as the one before it.
        delay_max_s: how long one waits at most.
        timeout_s: how long an attempt may run; 0: for ever.
        environment: what it finds around it; None: what its worker has.
        max_calls: how many tasks of this function a worker runs before it leaves; 0: any number.
    """

    dynamic: bool = False
    retry_on: tuple[type[BaseException], ...] = ()
    delay_s: float = 0.0
    backoff: float = 2.0
    delay_max_s: float = 60.0
    timeout_s: float = 0.0
    environment: Environment | None = None
    max_calls: int = 0

    def delay(self, attempts: int) -> float:
        """How many seconds the next attempt waits after so many."""
        if not self.delay_s:
            return 0.0
        return min(self.delay_max_s, self.delay_s * self.backoff ** min(attempts - 1, 64))


def retries_left(info: dict[str, Any]) -> int:
    """How many more attempts a task may have than the one that its record, as `core.info` says it, has counted."""
    if info["retries"] == RETRIES_FOREVER:
        return RETRIES_FOREVER
    return max(0, int(info["retries"]) - int(info["attempts"]) + 1)


@dataclass(frozen=True)
class Special:
    """What is special about the tasks of a function, or the calls of a method.

    Attributes:
        streaming: whether each call gives an `ObjectRefGenerator`.
        limit: unread items from which on the generator waits; 0: it never does.
        policy: how it is run; None: as any other.
        priority: of a function's tasks: the higher, the sooner each is run once it is ready.
        retries: whether it runs again after an exception, of a method (a function's settings say it themselves).
        given: the options that said so.
    """

    retries: bool = False
    streaming: bool = False
    limit: int = 0
    policy: Policy | None = None
    priority: int = 0
    given: tuple[tuple[str, Any], ...] = ()


def take(settings: dict[str, Any], function: Any, method: bool = False) -> Special | None:
    """Take what is special out of a function's settings; what is left is a common one's.

    Args:
        settings: options by name; changed.
        function: whose: a generator function's items come one by one unless it is said otherwise.
        method: whether they are an actor's method's.
    Returns:
        What is special; None when nothing is.
    Raises:
        TypeError, ValueError: an option is wrong, or does not fit the others.
    """
    given = {name: settings.pop(name) for name in OPTIONS if settings.get(name) is not None}
    for name in OPTIONS:
        settings.pop(name, None)
    if method and settings.get("retry_exceptions") is True:
        settings["retry_exceptions"] = (Exception,)  # in words that its policy can carry
    count = settings.get("num_returns")
    if count is None and is_generator(function):
        count = STREAMING
    if isinstance(count, str):
        check_count(count)
        given["num_returns"] = count
        settings["num_returns"] = 1
    limit = _limit_of(given)
    if limit and count != STREAMING:
        raise ValueError(
            f"a limit of unread items ({_LIMITS[0]}) is for generators with num_returns={STREAMING!r}, "
            f"this one has num_returns={1 if count is None else count!r}"
        )
    named = _retry_on(settings, given)
    retries = method and bool(settings.pop("retry_exceptions", False))
    surroundings = environment_of(settings.pop(ENVIRONMENT, None))
    if surroundings is not None:
        given[ENVIRONMENT] = surroundings
    calls = _calls_of(given)
    policy = Policy(count == DYNAMIC, named, *_delays_of(given), _timeout_of(given), surroundings, calls)
    special = Special(
        retries, count == STREAMING, limit, None if policy == Policy() else policy, _priority_of(given),
        tuple(given.items()),
    )  # fmt: skip
    return None if special == Special(retries, given=special.given) else special


def _retry_on(settings: dict[str, Any], given: dict[str, Any]) -> tuple[type[BaseException], ...]:
    """The exceptions that are named; what is left of the option says that there are some."""
    named = settings.get("retry_exceptions")
    if named is None or isinstance(named, bool):
        return ()
    classes = named if isinstance(named, (list, tuple)) else ()
    if not classes or not all(isinstance(one, type) and issubclass(one, Exception) for one in classes):
        raise TypeError(f"retry_exceptions is {named!r}; it must be True, False or a list of exception classes")
    given["retry_exceptions"] = tuple(classes)
    settings["retry_exceptions"] = True
    return tuple(classes)


def _delays_of(given: dict[str, Any]) -> tuple[float, float, float]:
    delay = _seconds(given, "retry_delay", 0.0, 0.0)
    if not delay and any(name in given for name in _DELAYS[1:]):
        raise ValueError(f"{' and '.join(_DELAYS[1:])} say how retry_delay grows: give that, too")
    return delay, _seconds(given, "retry_backoff", 2.0, 1.0), _seconds(given, "retry_delay_max", 60.0, 0.0)


def _timeout_of(given: dict[str, Any]) -> float:
    timeout = _seconds(given, "timeout", 0.0, 0.0)
    if "timeout" in given and not timeout:
        raise ValueError("timeout is 0; it must be a number of seconds above 0")
    return timeout


def _calls_of(given: dict[str, Any]) -> int:
    value = given.get("max_calls", 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_calls is {value!r}; it must be a whole number")
    if not 0 <= value <= CALLS_MAX:
        raise ValueError(f"max_calls is {value}; it must be from 0 (any number) to {CALLS_MAX}")
    return value


def _priority_of(given: dict[str, Any]) -> int:
    value = given.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"priority is {value!r}; it must be a whole number")
    if not -PRIORITY_MAX <= value <= PRIORITY_MAX:
        raise ValueError(f"priority is {value}; it must be from {-PRIORITY_MAX} to {PRIORITY_MAX}")
    return value


def _seconds(given: dict[str, Any], name: str, default: float, least: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not least <= value <= SECONDS_MAX:
        raise ValueError(f"{name} is {value}; it must be from {least:g} to {SECONDS_MAX:g}")
    return float(value)


def check_count(count: str) -> None:
    """Refuse what says no number of results.

    Raises:
        ValueError: it is neither "streaming" nor "dynamic".
    """
    if count not in (STREAMING, DYNAMIC):
        raise ValueError(f"num_returns is {count!r}; it must be a number, {STREAMING!r} or {DYNAMIC!r}")


def is_generator(function: Any) -> bool:
    """Whether calling it gives a generator, of the asynchronous kind or not."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def export(store: Store, policy: Policy | None) -> ObjectRef | None:
    """The object that says how a task is run: one for each policy, among the functions, and for as long as these."""
    if policy is None:
        return None
    import hashlib  # here: it loads OpenSSL, which most processes never need

    parts = serialize(policy)
    if policy.environment is not None and policy.environment.strategy is not None:
        return store.put_serialized(parts)  # as its demand: there may be very many groups
    digest = hashlib.blake2b(parts.to_bytes(), digest_size=16, person=b"policy").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        made = store.put_serialized(parts)
        try:
            found = functions.add_function(store.client, digest, made, "a policy")
        except ObjectStoreFullError:  # of different ones there are too many to keep: this one lives with its tasks
            found = made
    return found


def carried(store: Store, task: int, job: int) -> bytes:
    """What the policy of a task is, as bytes for another node, where its job's namespace is not known; empty: none.

    Args:
        store: of the process that has claimed it.
        task: its index.
        job: whose it is; 0: its actor knows where it is.
    """
    ref = core_submission.policy_of(store.client, task)
    data = b"" if ref is None else bytes(store.read(ref)[2])  # as it is: its types may be unknown here
    namespace = namespaces.of_job(store, job) if job else ""
    return serialize(_Carried(data, namespace)).to_bytes() if namespace else data


@dataclass(frozen=True)
class _Carried:
    """A policy, pickled, that is to have a namespace when it is read."""

    data: bytes
    namespace: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_carried, (self.data, self.namespace)


def _read_carried(data: bytes, namespace: str) -> Policy:
    policy: Policy = deserialize(PICKLE, data, []) if data else Policy()
    return replace(policy, environment=namespaces.inside(namespace, policy.environment))


def _limit_of(given: dict[str, Any]) -> int:
    names = [name for name in _LIMITS if name in given]
    if len(names) > 1:
        raise TypeError(f"{names[0]} and {names[1]} are two names for one option: give one of them")
    if not names:
        return 0
    value = given[names[0]]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{names[0]} is {value!r}; it must be a whole number")
    if value != -1 and not 1 <= value <= LIMIT_MAX:
        raise ValueError(f"{names[0]} is {value}; it must be from 1 to {LIMIT_MAX}, or -1 for no limit")
    return max(0, value)
