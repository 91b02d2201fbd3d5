"""Graphs of calls: `.bind(...)` makes nodes, and `.execute(...)` of the last one submits all that it needs.

Each execution submits every node once, however many others name it, and makes its own actors.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fastrt.errors import UnsupportedError

_Ran = dict[int, Any]  # the results of an execution, by the identity of their nodes


class DAGNode:
    """A call that was described and not made.

    Args:
        args, kwargs: its arguments; nodes among them and inside lists, tuples and dicts are replaced by their results.
    """

    def __init__(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self._args = args
        self._kwargs = kwargs or {}

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Submit the call and those that it needs.

        Args:
            *args, **kwargs: the values of the `InputNode`.
        Returns:
            As the `.remote(...)` that it stands for; a list for a `MultiOutputNode`.
        """
        given = args[0] if len(args) == 1 and not kwargs else DAGInputData(args, kwargs)
        return self.run({}, given)

    def get_args(self) -> tuple[Any, ...]:
        """Return the positional arguments, nodes as nodes."""
        return self._args

    def get_kwargs(self) -> dict[str, Any]:
        """Return a copy of the arguments by name, nodes as nodes."""
        return dict(self._kwargs)

    def get_options(self) -> dict[str, Any]:
        """Return the options that were given for the call."""
        return {}

    def run(self, ran: _Ran, given: Any) -> Any:
        """Return the node's result in one execution; the first request submits it."""
        if id(self) not in ran:
            ran[id(self)] = self.submit(ran, given)
        return ran[id(self)]

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Submit the call.

        Raises:
            NotImplementedError: the class has none.
        """
        raise NotImplementedError

    def experimental_compile(self, *args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("fastrt does not compile graphs; .execute(...) runs them")

    def _arguments(self, ran: _Ran, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: tuple[Any, ...] = _resolved(self._args, ran, given)
        kwargs: dict[str, Any] = _resolved(self._kwargs, ran, given)
        return args, kwargs


def _resolved(value: Any, ran: _Ran, given: Any) -> Any:
    if isinstance(value, DAGNode):
        return value.run(ran, given)
    if type(value) in (list, tuple):
        return type(value)(_resolved(one, ran, given) for one in value)
    if type(value) is dict:
        return {key: _resolved(one, ran, given) for key, one in value.items()}
    return value


class FunctionNode(DAGNode):
    """A task. Made by `.bind(...)` of a remote function.

    Args:
        target: has a method `remote`, and `given_options`.
    """

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(args, kwargs)
        self._target = target

    def get_options(self) -> dict[str, Any]:
        """Return the options that were given for the function or the class."""
        return dict(self._target.given_options)

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Submit the task."""
        args, kwargs = self._arguments(ran, given)
        return self._target.remote(*args, **kwargs)


class ClassNode(FunctionNode):
    """An actor. Made by `.bind(...)` of a remote class; its methods have `.bind(...)`, too."""

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(target, args, kwargs)
        self._calls: list[ClassMethodNode] = []

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_") or name in ("bind", "remote"):
            raise AttributeError(f"a node of a graph has no {name!r}: it stands for an actor that .execute() makes")
        return _Method(self, name, {})

    def bound(self, call: ClassMethodNode) -> int:
        """Note a call of the actor; return how many were bound before it."""
        self._calls.append(call)
        return len(self._calls) - 1

    def first(self, count: int, ran: _Ran, given: Any) -> None:
        """Submit the calls that were bound first, in order."""
        for call in self._calls[:count]:
            call.run(ran, given)


class _Method:
    """A method of a `ClassNode`."""

    def __init__(self, actor: ClassNode, name: str, options: dict[str, Any]) -> None:
        self._actor = actor
        self._name = name
        self._options = options

    def options(self, **options: Any) -> _Method:
        return _Method(self._actor, self._name, {**self._options, **options})

    def bind(self, *args: Any, **kwargs: Any) -> ClassMethodNode:
        return ClassMethodNode(self._actor, self._name, self._options, args, kwargs)


class ClassMethodNode(DAGNode):
    """A call of an actor that the execution makes. It runs after all calls that were bound before it.

    Args:
        actor: the actor's node.
        name: of the method.
        options: of the call.
    """

    def __init__(
        self, actor: ClassNode, name: str, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(args, kwargs)
        self._actor, self._name, self._options = actor, name, options
        self._before = actor.bound(self)

    def get_options(self) -> dict[str, Any]:
        """Return the options that were given for the call."""
        return dict(self._options)

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Submit the call, after those that were bound before it."""
        self._actor.first(self._before, ran, given)
        method = getattr(self._actor.run(ran, given), self._name)
        args, kwargs = self._arguments(ran, given)
        return (method.options(**self._options) if self._options else method).remote(*args, **kwargs)


class DAGInputData:
    """The arguments of an execution that has several."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def __getitem__(self, key: int | str) -> Any:
        return self._args[key] if isinstance(key, int) else self._kwargs[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._kwargs:
            raise AttributeError(name)
        return self._kwargs[name]


class InputNode(DAGNode):
    """The argument of an execution: `with InputNode() as x: dag = f.bind(x)`. Parts: `x[0]`, `x.name`."""

    def __enter__(self) -> InputNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def __getitem__(self, key: Any) -> InputAttributeNode:
        return InputAttributeNode(self, key, True)

    def __getattr__(self, name: str) -> InputAttributeNode:
        if name.startswith("_"):
            raise AttributeError(name)
        return InputAttributeNode(self, name, False)

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Return the argument."""
        return given


class InputAttributeNode(DAGNode):
    """A part of the argument of an execution.

    Args:
        whole: the argument.
        key: names the part.
        by_item: whether as an item, and not as an attribute.
    """

    def __init__(self, whole: InputNode, key: Any, by_item: bool) -> None:
        super().__init__()
        self._whole, self._key, self._by_item = whole, key, by_item

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Return the part."""
        return given[self._key] if self._by_item else getattr(given, self._key)


class MultiOutputNode(DAGNode):
    """Several nodes whose results an execution returns as a list."""

    def __init__(self, args: list[DAGNode] | tuple[DAGNode, ...]) -> None:
        super().__init__(tuple(args))

    def submit(self, ran: _Ran, given: Any) -> Any:
        """Submit all of them."""
        return list(self._arguments(ran, given)[0])
