"""Faults by hand-made calls, on jaxlib 0.10.2's own service and on fastrt's: code, words and payloads must agree.

jaxlib's service hands its calls to several threads, so two that are under way may be handled in either order, also
when one was sent much earlier. A scenario in which the order matters therefore goes on only once the service has shown
that the first call is there: see `there`.

Where fastrt means to do better than upstream, the case is in `test_better_than_upstream` and not here.
"""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastrt.net.grpc.channel import open_channel
from fastrt.net.grpc.descriptors import message_set

SERVICE = "xla.coordination.CoordinationService"
XLA = message_set("coordination_xla")
METHODS = XLA.methods(SERVICE)
PAYLOADS = message_set("coordination").message("fastrt.coordination.StatusPayloads")
VERSION = "0.10.2"
# What is answered as soon as the machine gets to it may take so long, and no call is ever given up.
ENOUGH_S = 60
ENOUGH_MS = 30_000


class Caller:
    """Calls to one service, and what they came to."""

    def __init__(self, port: int) -> None:
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.service = 0

    def call(self, method: str, **fields: Any) -> Any:
        request, response = METHODS[method]
        if "incarnations" in request.DESCRIPTOR.fields_by_name and "incarnations" not in fields:
            fields["incarnations"] = {"service_incarnation": self.service}
        stub = self.channel.unary_unary(f"/{SERVICE}/{method}", request.SerializeToString, response.FromString)
        return stub.future(request(**fields), timeout=ENOUGH_S)

    def register(self) -> None:
        calls = [self.call("RegisterTask", incarnation=11 + n, source_task_id=n) for n in (0, 1)]
        self.service = [call.result().service_incarnation for call in calls][0]  # noqa: RUF015

    def came_to(self, future: Any) -> Any:
        """The outcome of a call, without what is random: the incarnation, the order of payloads and members."""
        error = future.exception(timeout=ENOUGH_S)
        if error is None:
            answer = future.result()
            if answer.DESCRIPTOR.name == "WatchTasksResponse":
                tasks = sorted(answer.task_state, key=lambda info: info.task_id)
                # The version only tells one state from another; upstream counts some changes twice.
                return [self.tidied(str(info)) for info in tasks]
            return self.tidied(str(answer))
        found = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
        payloads = {url: self.payload(url, data) for url, data in PAYLOADS.FromString(found).payloads.items()}
        return [error.code().name, self.tidied(error.details()), payloads]

    def payload(self, url: str, data: bytes) -> str:
        message = XLA.message("xla.coordination." + url.rpartition(".")[2]).FromString(data)
        if getattr(message, "service_incarnation", None) == self.service:
            message.service_incarnation = 1
        if hasattr(message, "barrier_id"):
            message.barrier_id = self.tidied(message.barrier_id)
        return repr(message.SerializeToString(deterministic=True))

    def tidied(self, text: str) -> str:
        text = text.replace(str(self.service), "SERVICE")
        # The length byte before a text with the incarnation, which has any number of digits up to 20.
        text = re.sub(r"\\+x[01][0-9a-f]Shutdown", "Shutdown", text)
        quoted = re.findall(r" \[type[^ ]*\]", text)
        return re.sub(r" \[type[^ ]*\]", "", text) + "".join(sorted(quoted))

    def twice(self, method: str, **fields: Any) -> tuple[Any, Any]:
        """Make a call twice, of a kind where a task's second call takes the place of its first, which is answered.

        Returns the call that was answered and the one that waits, whichever of them arrived first.
        """
        answered = threading.Event()
        both = [self.call(method, **fields) for _ in range(2)]
        for call in both:
            call.add_done_callback(lambda _: answered.set())
        assert answered.wait(ENOUGH_S), f"neither of two calls of {method} was answered"
        waiting, done = sorted(both, key=lambda call: call.done())
        assert not waiting.done(), f"{method}: {self.came_to(waiting)} and {self.came_to(done)}"
        return done, waiting

    def there(self, method: str, **fields: Any) -> Any:
        """A call that is known to wait in the service."""
        return self.twice(method, **fields)[1]


def barrier(name: str, source: int = 0, timeout: int = ENOUGH_MS, **more: Any) -> dict[str, Any]:
    return {"barrier_id": name, "barrier_timeout_in_ms": timeout, "source_task_id": source, **more}


def quick(caller: Caller) -> Iterator[tuple[str, Any]]:
    """Calls that are answered at once."""
    for number, (method, fields) in enumerate(
        [
            ("RegisterTask", {"incarnation": 11, "source_task_id": 7}),
            ("RegisterTask", {"incarnation": 11, "source_task_id": 0}),
            ("Heartbeat", {"incarnations": {"service_incarnation": 5}, "incarnation": 11}),
            ("Heartbeat", {"incarnation": 11, "source_task_id": 9}),
            ("Heartbeat", {"incarnation": 11, "source_task_id": 0}),
            ("InsertKeyValue", {"kv": {"key": "/a//b/", "value": b"1"}}),
            ("InsertKeyValue", {"kv": {"key": "a/b", "value": b"2"}}),
            ("InsertKeyValue", {"kv": {"key": "", "value": b"empty"}}),
            ("TryGetKeyValue", {"key": "/a//b"}),
            ("TryGetKeyValue", {"key": "/zz//b"}),
            ("GetKeyValue", {"key": "//a//b"}),
            ("IncrementKeyValue", {"key": "n", "increment": 5}),
            ("IncrementKeyValue", {"key": "n", "increment": -7}),
            ("InsertKeyValue", {"kv": {"key": "t", "value": b"text"}}),
            ("IncrementKeyValue", {"key": "/t", "increment": 1}),
            ("GetKeyValueDir", {"directory_key": ""}),
            ("GetKeyValueDir", {"directory_key": "/a/"}),
            ("GetKeyValueDir", {"directory_key": "none"}),
            ("DeleteKeyValue", {"key": "none"}),
            ("DeleteKeyValue", {"key": "/a/", "is_directory": True}),
            ("TryGetKeyValue", {"key": "a/b"}),
            ("WatchTasks", {"version_number": -1}),
            ("WatchTasks", {"version_number": 0}),
            ("Barrier", barrier("alone", task_ids=[0])),
            ("CancelBarrier", {"barrier_id": "alone", "source_task_id": 0}),
            ("CancelBarrier", {"barrier_id": "alone", "source_task_id": 0, "counter": 3}),
            ("CancelBarrier", {"barrier_id": "nobody's", "source_task_id": 0}),
            ("Barrier", barrier("others", task_ids=[1])),
            ("Barrier", barrier("strangers", task_ids=[0, 9])),
            ("Barrier", barrier("short", timeout=-100)),
            ("GetAliveTasks", {"requesting_task_id": 0, "task_ids": [1]}),
            ("GetAliveTasks", {"requesting_task_id": 0, "task_ids": [0]}),
            ("PollForError", {"source_task_id": 9}),
        ]
    ):
        yield f"{number} {method} {fields}", caller.came_to(caller.call(method, **fields))


def waiting(caller: Caller) -> Iterator[tuple[str, Any]]:
    """Callers that wait at barriers, and what the next caller does to them."""

    def pair(first: dict[str, Any], method: str, second: dict[str, Any]) -> list[Any]:
        waits = caller.there("Barrier", **first)
        after = caller.call(method, **second)
        return [caller.came_to(waits), caller.came_to(after)]

    def together(*requests: dict[str, Any]) -> list[Any]:
        return [caller.came_to(call) for call in [caller.call("Barrier", **request) for request in requests]]

    yield "timeout", caller.came_to(caller.call("Barrier", **barrier("late", timeout=1200)))
    yield "after the timeout", caller.came_to(caller.call("Barrier", **barrier("late", 1)))
    yield "another round", caller.came_to(caller.call("Barrier", **barrier("late", counter=4)))
    yield "cancelled", pair(barrier("c"), "CancelBarrier", {"barrier_id": "c", "source_task_id": 1})
    yield "other members", pair(barrier("o"), "Barrier", barrier("o", 1, task_ids=[1]))
    yield "the same caller again", sorted(together(*[barrier("s", timeout=1200)] * 2), key=repr)
    yield "both", together(barrier("b"), barrier("b", 1))
    yield "next round", together(barrier("b", counter=1), barrier("b", 1, counter=1))
    yield "a round too early", pair(barrier("b", counter=2), "Barrier", barrier("b", 1, counter=3))


def failing(caller: Caller) -> Iterator[tuple[str, Any]]:
    """A task comes back as another incarnation, and all that follows from it."""
    answered, poll = caller.twice("PollForError", source_task_id=0)
    yield "a poll that is made twice", caller.came_to(answered)
    waits = caller.there("Barrier", **barrier("w"))
    version = caller.call("WatchTasks", version_number=-1).result().version_number
    watch = caller.call("WatchTasks", version_number=version)
    yield "another incarnation", caller.came_to(caller.call("RegisterTask", incarnation=99, source_task_id=1))
    yield "who waits", caller.came_to(waits)
    yield "who polls", caller.came_to(poll)
    while not any(info.error_code for info in watch.result().task_state):
        # Upstream counts the registration of the last task twice, and the second time may come after our look.
        watch = caller.call("WatchTasks", version_number=watch.result().version_number)
    yield "who watches", caller.came_to(watch)
    for method, fields in [
        ("PollForError", {"source_task_id": 0}),
        ("PollForError", {"source_task_id": 1}),
        ("Heartbeat", {"incarnation": 12, "source_task_id": 1}),
        ("RegisterTask", {"incarnation": 99, "source_task_id": 1}),
        ("Barrier", barrier("afterwards")),
        ("GetAliveTasks", {"requesting_task_id": 0, "task_ids": [0, 1]}),
        ("ShutdownTask", {"source_task_id": 0}),
        ("Heartbeat", {"incarnation": 11, "source_task_id": 0}),
        ("WatchTasks", {"version_number": -1}),
        ("InsertKeyValue", {"kv": {"key": "still", "value": b"works"}}),
    ]:
        yield f"{method} {fields}", caller.came_to(caller.call(method, **fields))


def leaving(caller: Caller) -> Iterator[tuple[str, Any]]:
    """One task shuts down and the other does not, or both do."""
    calls = [caller.call("ShutdownTask", source_task_id=n) for n in (0, 1)]
    yield "both", [caller.came_to(call) for call in calls]
    for method, fields in [
        ("ShutdownTask", {"source_task_id": 0}),
        ("Heartbeat", {"incarnation": 11, "source_task_id": 0}),
        ("WatchTasks", {"version_number": -1}),
        ("RegisterTask", {"incarnation": 77, "source_task_id": 0}),
        ("ShutdownTask", {"source_task_id": 0}),
    ]:
        yield f"{method} {fields}", caller.came_to(caller.call(method, **fields))


def alone(caller: Caller) -> Iterator[tuple[str, Any]]:
    """One task shuts down, and the other never does."""
    poll = caller.there("PollForError", source_task_id=1)
    yield "shutdown", caller.came_to(caller.call("ShutdownTask", source_task_id=0))
    yield "poll", caller.came_to(poll)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("scenario", [quick, waiting, failing, leaving, alone], ids=lambda value: value.__name__)
def test_faults_are_answered_as_by_jaxlibs_own_service(services: Any, scenario: Any) -> None:
    options = {"shutdown_timeout": 2 if scenario is alone else ENOUGH_S}
    callers = [Caller(port) for port in services(VERSION, 2, options)]
    for caller in callers:
        caller.register()
    for (name, expected), (_, got) in zip(*(scenario(caller) for caller in callers), strict=True):
        assert got == expected, name
    for caller in callers:
        caller.channel.close()


@pytest.mark.timeout(240)
def test_task_that_never_comes_fails_registration_alike(services: Any) -> None:
    outcomes = []
    for port in services(VERSION, 2, {"register_timeout": 2}):
        caller = Caller(port)
        outcomes.append(caller.came_to(caller.call("RegisterTask", incarnation=1, source_task_id=0)))
        outcomes[-1] = [outcomes[-1], caller.came_to(caller.call("RegisterTask", incarnation=1, source_task_id=0))]
        caller.channel.close()
    assert outcomes[0] == outcomes[1]


def test_better_than_upstream(services: Any) -> None:
    """A barrier first called in a later round is named; one cancelled before its first call stays cancelled.

    jaxlib's service forgets the id in both cases: `Barrier (::4) ...`, `::0: No tasks were specified ...`.
    """
    caller = Caller(services(VERSION, 2, {})[1])
    caller.register()
    assert "(b::4)" in caller.came_to(caller.call("Barrier", **barrier("b", counter=4)))[1]
    caller.call("CancelBarrier", barrier_id="c", source_task_id=0).result()
    assert caller.came_to(caller.call("Barrier", **barrier("c", 1)))[0] == "CANCELLED"
    caller.channel.close()
