"""`NodeLabelSchedulingStrategy`: labels that a node must have or should have, as Ray writes them in objects.

A strategy becomes a selector of labels and its fallback, see `tasks.labels`: first what it must and should have
together, then what it must have.

Source:
    The semantics of `ray.util.scheduling_strategies.NodeLabelSchedulingStrategy`, whose objects are accepted, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrt.config import LABEL_NAME_MAX, is_label
from fastrt.errors import UnsupportedError
from fastrt.tasks import labels

_Rule = tuple[bool, frozenset[str]]  # whether the values are unwanted; the values, "" for a node without the label


class _Operator:
    """A condition for one label."""

    values: list[str]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.values))})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values == getattr(other, "values", None)

    def __hash__(self) -> int:
        return hash((type(self), *self.values))


class In(_Operator):
    """The label has one of some values.

    Args:
        *values: the values, texts.
    Raises:
        ValueError: there are none, or one is no text.
    """

    def __init__(self, *values: str) -> None:
        self.values = _checked("In", values)


class NotIn(_Operator):
    """The label has none of some values; also where a node does not have the label.

    Args:
        *values: the values, texts.
    Raises:
        ValueError: there are none, or one is no text.
    """

    def __init__(self, *values: str) -> None:
        self.values = _checked("NotIn", values)


class Exists(_Operator):
    """The node has the label, with any value."""

    def __init__(self) -> None:
        self.values = []


class DoesNotExist(_Operator):
    """The node does not have the label."""

    def __init__(self) -> None:
        self.values = []


class NodeLabelSchedulingStrategy:
    """The nodes that may run a task or an actor, by their labels, for `scheduling_strategy=`.

    Args:
        hard: what a node must have: `In`, `NotIn`, `Exists` or `DoesNotExist` by label.
        soft: what it should have as well; other nodes are taken where none that has it has room.

    Attributes:
        hard, soft: as given.

    Raises:
        ValueError: both are empty, or one is something else.
    """

    def __init__(self, hard: Mapping[str, Any] | None, *, soft: Mapping[str, Any] | None = None) -> None:
        self.hard, self.soft = _wanted("hard", hard), _wanted("soft", soft)
        if not self.hard and not self.soft:
            raise ValueError("The `hard` and `soft` parameter of NodeLabelSchedulingStrategy cannot both be empty.")

    def __repr__(self) -> str:
        return f"NodeLabelSchedulingStrategy({self.hard!r}, soft={self.soft!r})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, NodeLabelSchedulingStrategy)
        return same and (self.hard, self.soft) == (other.hard, other.soft)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((frozenset(self.hard.items()), frozenset(self.soft.items())))


def is_strategy(value: Any) -> bool:
    """Whether a value is such a strategy, of fastrt or of Ray."""
    return type(value).__name__ == NodeLabelSchedulingStrategy.__name__ and hasattr(value, "hard")


def resource_of(option: str, strategy: Any) -> str:
    """Return the resource that stands for the nodes of a strategy, as `labels.resource_of` does.

    Args:
        option: its name, for messages.
        strategy: of fastrt or of Ray.
    Raises:
        UnsupportedError: it names a value that no node of fastrt can have.
        ValueError: it names too many labels, or texts that are too long.
    """
    hard, soft = _rules_of(strategy.hard), _rules_of(strategy.soft)
    both = dict(hard)
    for label, rule in soft.items():
        both[label] = _both(both[label], rule) if label in both else rule
    if both == hard or (False, frozenset()) in both.values():  # soft adds nothing, or excludes all nodes
        return labels.resource_of(option, _selector(hard) or _selector(soft))
    return labels.resource_of(option, _selector(both), [_selector(hard)])


def _checked(operator: str, values: tuple[Any, ...]) -> list[str]:
    if not values:
        raise ValueError(
            f"The variadic parameter of the {operator} operator must be a non-empty tuple: "
            f'e.g. {operator}("value1", "value2").'
        )
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(
                f"Type of value in position {place} for the {operator} operator must be str, not {value!r}"
            )
    return list(values)


def _wanted(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f'The {name} parameter must be a map (e.g. {{"key1": In("value1")}}), not {given!r}')
    for label, operator in given.items():
        if not isinstance(label, str):
            raise ValueError(f"The map key of the {name} parameter must be of type str, not {label!r}")
        if not isinstance(operator, _Operator):
            raise ValueError(
                f"The map value for key {label} of the {name} parameter must be one of the `In`, `NotIn`, `Exists` "
                f"or `DoesNotExist` operator, not {operator!r}"
            )
    return dict(given)


def _rules_of(expressions: Any) -> dict[str, _Rule]:
    """The rules of `hard` or of `soft`; Ray has a list of expressions in the place of a mapping."""
    if isinstance(expressions, Mapping):
        return {label: _rule(operator) for label, operator in expressions.items()}
    return {one.key: _rule(one.operator) for one in expressions}


def _rule(operator: Any) -> _Rule:
    kind = type(operator).__name__
    if kind in (Exists.__name__, DoesNotExist.__name__):
        return kind == Exists.__name__, frozenset([""])
    for value in operator.values:
        if not is_label(value) or value != value.strip():
            raise UnsupportedError(
                f"{kind} names the value {value!r}; values of labels are texts of 1 to {LABEL_NAME_MAX} characters, "
                "none of them among !,() and no blanks at their ends"
            )
    return kind == NotIn.__name__, frozenset(operator.values)


def _both(one: _Rule, other: _Rule) -> _Rule:
    """The rule of what matches two rules of a label."""
    if one[0] and other[0]:
        return True, one[1] | other[1]
    wanted, rest = (other, one) if one[0] else (one, other)
    return False, wanted[1] - rest[1] if rest[0] else wanted[1] & rest[1]


def _selector(rules: Mapping[str, _Rule]) -> dict[str, str]:
    return {label: labels.wanting(unwanted, values) for label, (unwanted, values) in rules.items()}
