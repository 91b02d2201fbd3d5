"""Options of remote functions, remote classes and methods: one table says which there are and which values each takes.

`read` checks the options of a function or a method and returns them as `Settings`. The part of them that a worker must
know and the core need not is a `Policy`: an object of its own in the store, one for each different policy, which the
records of the tasks name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from fastrt._core.objects import functions
from fastrt._core.tasks import submission as core_submission
from fastrt._core.tasks.submission import PRIORITY_MAX
from fastrt.errors import ArgumentError, ConfigError, ObjectStoreFullError, UnsupportedError
from fastrt.store import job_folders
from fastrt.store.client import Store
from fastrt.store.ref import ObjectRef
from fastrt.store.serialize import PICKLE, deserialize, serialize
from fastrt.tasks import namespaces, resources, runtime_env
from fastrt.tasks.runtime_env import OPTION as ENVIRONMENT
from fastrt.tasks.runtime_env import Environment

FUNCTIONS, CLASSES, METHODS = "remote functions", "remote classes", "methods"
STREAMING = "streaming"
DYNAMIC = "dynamic"
RETRIES_FOREVER = 255  # in a task's record
CONCURRENCY_MAX = 100_000
NO_PRIORITY = (
    "an actor's calls have no priority: those of one caller run in the order in which they are made; give priority to "
    "remote functions, or make several actors"
)
_RETRIES_MAX = 250  # attempts are counted in one byte of the task's record
_LIMITS = ("generator_backpressure", "_generator_backpressure_num_objects")  # fastrt's name, and Ray's
_DELAYS = ("retry_delay", "retry_backoff", "retry_delay_max")
_SECONDS_MAX = 1e9
_LIMIT_MAX = (1 << 31) - 1
_CALLS_MAX = _RESTARTS_MAX = 1 << 30
_CARRIED_KEPT = 256  # policies that were packed with a namespace last
_TYPES: dict[str, tuple[type, ...]] = {
    "a whole number": (int,),
    "a number": (int, float),
    "text": (str,),
    "True or False": (bool,),
}


@dataclass(frozen=True)
class Option:
    """The values that one option takes.

    Attributes:
        type: one of `_TYPES`; empty: any.
        low, high: the range of a number.
        range: the range in words, where "from low to high" does not say enough.
        words: texts that it may be instead.
        number: a number outside the range that it may be, too.
        check: called with the name and the value, raises an error for what the other fields do not say.
        default: the value where the option is not given.
        required: whether None is an error, and not the same as leaving the option out.
    """

    type: str = ""
    low: float = 0
    high: float = 0
    range: str = ""
    words: tuple[str, ...] = ()
    number: int | None = None
    check: Callable[[str, Any], object] | None = None
    default: Any = None
    required: bool = False

    def validate(self, name: str, value: Any) -> None:
        """Check a value.

        Args:
            name: of the option, for messages.
            value: as the program gave it.
        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range.
        """
        if self.words and (isinstance(value, str) or not self.type):
            if value not in self.words:
                words = " or ".join(map(repr, self.words))
                raise ValueError(f"{name} is {value!r}; it must be {'a number, ' if self.type else ''}{words}")
            return
        if self.type:
            classes = _TYPES[self.type]
            if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
                raise TypeError(f"{name} is {value!r}; it must be {self.type}")
            if (
                self.high
                and isinstance(value, (int, float))
                and value != self.number
                and not (self.low <= value <= self.high)
            ):
                allowed = self.range or f"from {self.low:{_spec(self.low)}} to {self.high:{_spec(self.high)}}"
                raise ValueError(f"{name} is {value}; it must be {allowed}")
        if self.check is not None:
            self.check(name, value)


def _spec(number: float) -> str:
    return "d" if isinstance(number, int) else "g"


def _exceptions(name: str, value: Any) -> None:
    classes = value if isinstance(value, (list, tuple)) else ()
    named = bool(classes) and all(isinstance(one, type) and issubclass(one, Exception) for one in classes)
    if not isinstance(value, bool) and not named:
        raise TypeError(f"{name} is {value!r}; it must be True, False or a list of exception classes")


def _timeout(name: str, value: float) -> None:
    if not value:
        raise ValueError(f"{name} is 0; it must be a number of seconds above 0")


def _actor_name(name: str, value: Any) -> None:
    namespaces.stored(value, "")


def _groups(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(group, str) and group for group in value):
        raise ConfigError(f"{name} is {value!r}; it must be like {{'io': 2}}")
    for group, count in value.items():
        _CONCURRENCY.validate(f"{name}[{group!r}]", count)


_CONCURRENCY = Option("a whole number", 1, CONCURRENCY_MAX)
_RETRIES = Option("a whole number", -1, _RETRIES_MAX, default=0)
_LIMIT = Option("a whole number", 1, _LIMIT_MAX, f"from 1 to {_LIMIT_MAX}, or -1 for no limit", number=-1)
_OF_CALLS = {
    "num_returns": Option("a whole number", 0, 10_000, words=(STREAMING, DYNAMIC), default=1),
    "retry_exceptions": Option(check=_exceptions, default=False),
    **dict.fromkeys(_LIMITS, _LIMIT),
    "retry_delay": Option("a number", 0.0, _SECONDS_MAX, default=0.0),
    "retry_backoff": Option("a number", 1.0, _SECONDS_MAX, default=2.0),
    "retry_delay_max": Option("a number", 0.0, _SECONDS_MAX, default=60.0),
    "timeout": Option("a number", 0.0, _SECONDS_MAX, default=0.0, check=_timeout),
}
_OF_PROCESSES = {
    **dict.fromkeys(resources.OPTIONS, Option()),  # `resources.demand_of` reads them together
    ENVIRONMENT: Option(),  # `runtime_env.environment_of` reads it
}
OPTIONS: dict[str, dict[str, Option]] = {
    FUNCTIONS: {
        **_OF_CALLS,
        "num_returns": replace(_OF_CALLS["num_returns"], required=True),
        "max_retries": replace(_RETRIES, default=3, required=True),
        "name": Option("text"),
        "priority": Option("a whole number", -PRIORITY_MAX, PRIORITY_MAX, default=0),
        "max_calls": Option("a whole number", 0, _CALLS_MAX, f"from 0 (any number) to {_CALLS_MAX}", default=0),
        **_OF_PROCESSES,
    },
    METHODS: {
        **_OF_CALLS,
        "concurrency_group": Option("text"),
        "max_task_retries": _RETRIES,
        "name": Option("text"),
        "enable_task_events": Option("True or False"),
    },
    CLASSES: {
        "name": Option(check=_actor_name),
        "namespace": Option(check=namespaces.checked),
        "get_if_exists": Option("True or False", default=False),
        "lifetime": Option(words=("detached", "non_detached")),
        "max_restarts": Option("a whole number", -1, _RESTARTS_MAX, default=0),
        "max_task_retries": _RETRIES,
        "max_concurrency": _CONCURRENCY,
        "concurrency_groups": Option(check=_groups),
        "max_pending_calls": Option(
            "a whole number", 1, _CALLS_MAX, f"from 1 to {_CALLS_MAX}, or -1 for no limit", number=-1, default=-1
        ),
        **_OF_PROCESSES,
    },
}


# Options of Ray that fastrt takes in another form, or takes because they change nothing here; by their default.
OF_RAY: dict[str, dict[str, Any]] = {
    FUNCTIONS: {
        "enable_task_events": True,
        "_labels": None,
        "_metadata": None,
        "object_store_memory": None,
        "accelerator_type": None,
        "placement_group": "default",
        "placement_group_bundle_index": -1,
        "placement_group_capture_child_tasks": None,
        "_num_objects_per_yield": 1,
    },
}
OF_RAY[CLASSES] = {
    **{name: default for name, default in OF_RAY[FUNCTIONS].items() if name != "_num_objects_per_yield"},
    "allow_out_of_order_execution": None,
    "enable_tensor_transport": None,
    "_actor_generator_backpressure_num_objects": None,
}
WITHOUT_MEANING = ("allow_out_of_order_execution", "enable_task_events", "_labels", "_metadata")
# Those that only their default is taken of, and why.
REFUSED = {
    "object_store_memory": "the store is not divided among tasks",
    "enable_tensor_transport": "fastrt has no transport between GPUs",
    "_num_objects_per_yield": "it is not public in Ray",
    "_actor_generator_backpressure_num_objects": "it is not public in Ray; each generator has a limit of its own",
}
_ACCELERATOR_PART = 0.001  # of the resource "accelerator_type:<name>", which a node has once


def from_ray(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options that only Ray has, and leave out those that change nothing here.

    Args:
        kind: FUNCTIONS or CLASSES.
        options: by name.
    Raises:
        UnsupportedError: an option of Ray that fastrt has not.
        TypeError: a placement group is none.
        ArgumentError: a placement group and another strategy are given.
    """
    found = {name: value for name, value in options.items() if name not in OF_RAY[kind]}
    if len(found) == len(options):
        return found
    given = {name: value for name, value in options.items() if name in OF_RAY[kind] and value is not None}
    for name, value in given.items():
        if name.startswith("placement_group") or name in WITHOUT_MEANING or value == OF_RAY[kind][name]:
            continue
        if name != "accelerator_type":
            raise UnsupportedError(
                f"fastrt has no option {name!r} of {kind}: {REFUSED[name]}. Leave it out, or run the program on Ray, "
                'as fastrt.init(engine="ray") does'
            )
        found["resources"] = {**(found.get("resources") or {}), f"{name}:{value}": _ACCELERATOR_PART}
    if options.get("placement_group", "default") is None:
        found.setdefault("scheduling_strategy", "DEFAULT")  # in none, also where groups are captured
    group = given.get("placement_group", "default")
    index = given.get("placement_group_bundle_index", -1)
    if group == "default" and index != -1:
        raise ValueError(f"placement group bundle index must be -1 without a placement_group, not {index}")
    if group != "default":
        if not isinstance(group, resources.Group):
            raise TypeError(f"placement_group is {group!r}; it must be made by placement_group()")
        if found.get("scheduling_strategy", "DEFAULT") not in (None, "DEFAULT"):
            raise ArgumentError("give placement_group or a scheduling_strategy, not both")
        inside = given.get("placement_group_capture_child_tasks", False)
        found["scheduling_strategy"] = group.as_strategy(index, inside)
    return found


def refuse_two_places(before: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a placement group where a strategy was given before, and a strategy where a group was, as Ray does.

    Args:
        before: the options of the function or class, as they are kept.
        options: further ones, as they were given.
    Raises:
        ArgumentError: they name two places.
    """
    earlier = before.get("scheduling_strategy") or before.get("scheduling") or "DEFAULT"
    if earlier == "DEFAULT":
        return
    group = options.get("placement_group") or "default"
    strategy = options.get("scheduling_strategy") or options.get("scheduling") or "DEFAULT"
    if strategy != "DEFAULT" if getattr(earlier, "by_option", False) else group != "default":
        raise ArgumentError("give placement_group or a scheduling_strategy, not both: one was given before")


def check_names(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse options that there are not.

    Args:
        kind: FUNCTIONS, METHODS or CLASSES.
        options: by name.
    Raises:
        TypeError: one is unknown.
    """
    for name in options:
        if name == "priority" and kind != FUNCTIONS:
            raise TypeError(NO_PRIORITY)
        if name not in OPTIONS[kind]:
            raise ArgumentError(f"{name!r} is not an option of {kind}; there are: {', '.join(OPTIONS[kind])}")


def check(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse unknown options, and values that an option does not take.

    Args:
        kind, options: as for `check_names`; None means "not given".
    Raises:
        TypeError: an option is unknown, or its value is of another type.
        ValueError: a value is out of range.
    """
    check_names(kind, options)
    for name, value in options.items():
        option = OPTIONS[kind][name]
        if value is not None or option.required:
            option.validate(name, value)


def retries_of(value: int) -> int:
    """Return a number of retries as a task's record has it; -1 means any number."""
    return RETRIES_FOREVER if value == -1 else value


def task_retries_of(value: Any) -> int:
    """Check `max_task_retries`, and return it as the record of a call has it.

    Raises:
        TypeError, ValueError: it is no number of retries.
    """
    _RETRIES.validate("max_task_retries", value)
    return retries_of(value)


@dataclass(frozen=True)
class Policy:
    """How a task is run.

    Attributes:
        dynamic: whether it is a generator whose result is a list of references to its items.
        retry_on: exceptions after which it runs again; `Exception`: all but fastrt's own; empty: the record's flags
            decide.
        delay_s: seconds that the first further attempt waits.
        backoff: each further attempt waits this many times as long as the one before it.
        delay_max_s: seconds that an attempt waits at most.
        timeout_s: seconds that an attempt may run; 0: no limit.
        environment: in which it runs; None: its worker's.
        max_calls: how many tasks of this function a worker runs before it leaves; 0: any number.
        name: of the call of a method; empty: that of the class and the method.
    """

    dynamic: bool = False
    retry_on: tuple[type[BaseException], ...] = ()
    delay_s: float = 0.0
    backoff: float = 2.0
    delay_max_s: float = 60.0
    timeout_s: float = 0.0
    environment: Environment | None = None
    max_calls: int = 0
    name: str = ""

    def delay(self, attempts: int) -> float:
        """Return how many seconds the next attempt waits after that many attempts."""
        if not self.delay_s:
            return 0.0
        return min(self.delay_max_s, self.delay_s * self.backoff ** min(attempts - 1, 64))


def retries_left(info: dict[str, Any]) -> int:
    """Return how many attempts a task may have beyond those that its record counts.

    Args:
        info: the record, as `core.info` gives it.
    """
    if info["retries"] == RETRIES_FOREVER:
        return RETRIES_FOREVER
    return max(0, int(info["retries"]) - int(info["attempts"]) + 1)


@dataclass(frozen=True)
class Settings:
    """The checked options of a remote function or of a method, as far as they concern single tasks and calls.

    Attributes:
        count: `num_returns`; of a generator STREAMING where it was not given.
        limit: unread items from which on a streaming generator waits; 0: it never waits.
        retry_errors: whether a task runs again after exceptions of its own.
        policy: how a worker runs it; None: like any other.
        priority: of a function's tasks: of the ready ones the task with the highest runs first.
        given: all options that were given, in the form that `read` takes again.
    """

    count: int | str = 1
    limit: int = 0
    retry_errors: bool = False
    policy: Policy | None = None
    priority: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def returns(self) -> int:
        """The number of results that the core knows: a generator has one, its end or its list."""
        return 1 if isinstance(self.count, str) else self.count

    @property
    def streaming(self) -> bool:
        """Whether each call gives an `ObjectRefGenerator`."""
        return self.count == STREAMING


def read(kind: str, options: Mapping[str, Any], function: Any = None) -> Settings:
    """Check the options of a function or a method.

    Args:
        kind: FUNCTIONS or METHODS.
        options: by name; None means "not given".
        function: a generator function's items come one by one unless the options say another number of results.
    Raises:
        TypeError, ValueError: an option is unknown or wrong, or does not fit the others.
    """
    given = dict(options)
    if given.get("num_returns") is None and is_generator(function):
        given["num_returns"] = STREAMING
    check(kind, given)
    given = {name: value for name, value in given.items() if value is not None}
    around = runtime_env.environment_of(given.pop(ENVIRONMENT, None))
    around = runtime_env.grouped(around, resources.group_strategy(given))
    if around is not None:
        given[ENVIRONMENT] = around
    wanted = given.get("retry_exceptions", False)
    if wanted is True and kind == METHODS:
        wanted = (Exception,)  # in words that its policy can carry
    if not isinstance(wanted, bool):
        given["retry_exceptions"] = tuple(wanted)
    policy = Policy(
        dynamic=given.get("num_returns") == DYNAMIC,
        retry_on=() if isinstance(wanted, bool) else tuple(wanted),
        delay_s=_seconds(given, "retry_delay"),
        backoff=_seconds(given, "retry_backoff"),
        delay_max_s=_seconds(given, "retry_delay_max"),
        timeout_s=_seconds(given, "timeout"),
        environment=around,
        max_calls=given.get("max_calls", 0),
        name=given.get("name", "") if kind == METHODS else "",
    )
    if not policy.delay_s and any(name in given for name in _DELAYS[1:]):
        raise ValueError(f"{' and '.join(_DELAYS[1:])} say how retry_delay grows: give that, too")
    count = given.get("num_returns", 1)
    limit = _limit_of(given, count)
    return Settings(count, limit, bool(wanted), None if policy == Policy() else policy, given.get("priority", 0), given)


def _seconds(given: Mapping[str, Any], name: str) -> float:
    return float(given.get(name, _OF_CALLS[name].default))


def _limit_of(given: Mapping[str, Any], count: int | str) -> int:
    names = [name for name in _LIMITS if name in given]
    if len(names) > 1:
        raise TypeError(f"{names[0]} and {names[1]} are two names for one option: give one of them")
    limit = max(0, given[names[0]]) if names else 0
    if limit and count != STREAMING:
        raise ValueError(
            f"a limit of unread items ({_LIMITS[0]}) is for generators with num_returns={STREAMING!r}, "
            f"this one has num_returns={count!r}"
        )
    return limit


def is_generator(function: Any) -> bool:
    """Return whether a function is a generator function, asynchronous or not."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def export(store: Store, policy: Policy | None) -> ObjectRef | None:
    """Return the object of a policy. There is one for each different policy; it is kept like a function's object."""
    if policy is None:
        return None
    import hashlib  # here: it loads OpenSSL, which most processes never need

    if policy.environment is not None and policy.environment.paths():
        from fastrt.tasks import packages  # here: few programs have files for their tasks

        policy = replace(policy, environment=packages.packed(store, policy.environment))
    hook = policy.environment is not None and policy.environment.worker_process_setup_hook is not None
    parts = serialize(job_folders.carrying(policy) if policy.retry_on or hook else policy)
    if policy.environment is not None and policy.environment.strategy is not None:
        return store.put_serialized(parts)  # not kept, like the demand: there may be very many groups
    digest = hashlib.blake2b(parts.to_bytes(), digest_size=16, person=b"policy").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        made = store.put_serialized(parts)
        try:
            found = functions.add_function(store.client, digest, made, "a policy")
        except ObjectStoreFullError:  # too many different ones are kept: this one lives with its tasks
            found = made
    return found


def carried(store: Store, task: int, job: int) -> bytes:
    """Return the policy of a task as bytes for another node, which does not know its job's namespace.

    Args:
        store: of the process that has claimed the task.
        task: its index.
        job: its job; 0 for a call: the actor knows its namespace.
    Returns:
        The bytes; empty for a task without policy and namespace.
    """
    ref = core_submission.policy_of(store.client, task)
    data = b"" if ref is None else bytes(store.read(ref)[2])  # as it is: its types may be unknown here
    namespace = namespaces.of_job(store, job) if job else ""
    return _with_namespace(data, namespace) if namespace else data


def received(store: Store, data: bytes) -> ObjectRef:
    """Return the object of a policy that another node has sent as bytes. Tasks with equal ones share it.

    A program in a namespace sends one with each task; workers load each object once, and keep what they have loaded.
    """
    import hashlib  # here: it loads OpenSSL, which most processes never need

    digest = hashlib.blake2b(data, digest_size=16, person=b"policy").digest()
    found: ObjectRef | None = functions.find_function(store.client, digest)
    if found is None:
        writer = store.create(len(data), PICKLE, 0)
        writer.copy(0, data)
        made: ObjectRef = writer.seal(())
        try:
            found = functions.add_function(store.client, digest, made, "a policy", lasting=False)
        except ObjectStoreFullError:  # too many different ones are kept: this one lives with its tasks
            found = made
    return found


@lru_cache(_CARRIED_KEPT)
def _with_namespace(data: bytes, namespace: str) -> bytes:
    return serialize(_Carried(data, namespace)).to_bytes()


@dataclass(frozen=True)
class _Carried:
    """A pickled policy and the namespace that it gets when it is unpickled."""

    data: bytes
    namespace: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_carried, (self.data, self.namespace)


def _read_carried(data: bytes, namespace: str) -> Policy:
    policy: Policy = deserialize(PICKLE, data, []) if data else Policy()
    return replace(policy, environment=namespaces.inside(namespace, policy.environment))
