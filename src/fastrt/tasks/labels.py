"""Labels of nodes, and selectors of tasks, actors and bundles that say which labels a node must have.

A node has labels, as {"zone": "north"}. A selector names labels with their wanted values, as {"zone": "!south"}. In a
demand a selector is a resource with a name of its own: a node has that resource without end if its labels match, and
does not have it at all otherwise. So the code that places work by resources places it by labels, too. A selector with
fallbacks is one resource as well, of all nodes that match any of them; `choices` gives their order.

Source:
    The semantics of `labels=`, `label_selector=` and `fallback_strategy=` of Ray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from fastrt.config import LABEL_NAME_MAX, LABELS_MAX
from fastrt.foreign_text import BYTES_MAX, ForeignTextError, read_json

SELECTOR = "?"  # the first character of the name of a selector's resource
ENDLESS = 1 << 40  # parts of a selector's resource that a matching node has
NODE_ID = "ray.io/node-id"  # a label that every node has
_WIDE_ID = re.compile(r"\b([0-9a-f]{32})0{24}\b")  # of a node, as `fastrt.ray` shows it
_WANTED = re.compile(r"(!?)(?:in\(([^()]*)\)|([^!,()]+))")
_KNOWN_SELECTORS = 4096
_FALLBACKS_MAX = 16
_Rules = tuple[tuple[str, bool, frozenset[str]], ...]  # label, whether its values are unwanted, values


def labels_of(node: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return all labels of a node.

    Args:
        node: its id.
        labels: those that it was started with.
    """
    return {**labels, NODE_ID: node}


def with_own_ids(text: str) -> str:
    """Return a text with fastrt's own ids of nodes in place of Ray's longer ones, which begin with them."""
    return _WIDE_ID.sub(r"\1", text)


def resource_of(option: str, selector: Any, fallbacks: Sequence[Any] = ()) -> str:
    """Return the resource that stands for a selector.

    Args:
        option: its name, for messages.
        selector: wanted values by label: "a" (this value), "!a" (not this value), "in(a, b)", "!in(a, b)". A node
            without the label has no value: it matches "!a" and "!in(a, b)" only. An empty value in a list stands for
            such a node: "in(,a)" matches it, too, and "!in(,)" the nodes that have the label.
        fallbacks: further selectors in order, for when no node that matches the ones before has room. An empty one
            matches every node.
    Raises:
        TypeError: a selector is no mapping of texts.
        ValueError: one names nothing or too much, a value has another form, there are too many fallbacks, or all
            together are too long.
    """
    if len(fallbacks) > _FALLBACKS_MAX:
        raise ValueError(f"{option} has {len(fallbacks)} fallbacks; at most {_FALLBACKS_MAX} are allowed")
    checked = [_checked(option, selector), *(_checked(option, one) if one else {} for one in fallbacks)]
    text = json.dumps(checked if fallbacks else checked[0], sort_keys=True)
    if len(text) > BYTES_MAX:
        raise ValueError(f"{option} has {len(text)} bytes; at most {BYTES_MAX} are allowed")
    return SELECTOR + text


def _checked(option: str, selector: Any) -> dict[str, str]:
    if not isinstance(selector, Mapping) or not all(
        isinstance(text, str) for pair in selector.items() for text in pair
    ):
        raise TypeError(f"{option} is {selector!r}; it must be wanted values by label, such as {{'zone': 'north'}}")
    if not 1 <= len(selector) <= LABELS_MAX:
        raise ValueError(f"{option} names {len(selector)} labels; it must name from 1 to {LABELS_MAX}")
    for label, wanted in selector.items():
        if not label or len(label) > LABEL_NAME_MAX or len(wanted) > LABEL_NAME_MAX * LABELS_MAX:
            raise ValueError(f"{option} has a label without a name, or a text that is too long: {label[:80]!r}")
        if _WANTED.fullmatch(wanted) is None:
            raise ValueError(f"{option}[{label!r}] is {wanted!r}; it must be like 'a', '!a', 'in(a, b)' or '!in(a, b)'")
    return {label: with_own_ids(wanted) if label == NODE_ID else wanted for label, wanted in selector.items()}


def wanting(unwanted: bool, values: Iterable[str]) -> str:
    """Return what a selector says of a label: one of these values, or none of them; "" stands for no label."""
    several = sorted(values)
    return f"{'!' * unwanted}in({',' * (several == [''])}{','.join(several)})"


def is_selector(resource: str) -> bool:
    """Whether a resource stands for a selector."""
    return resource.startswith(SELECTOR)


def matches(resource: str, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels has a selector's resource. A resource that no selector has is nowhere."""
    return any(
        all((labels.get(label, "") in values) != unwanted for label, unwanted, values in rules)
        for rules in _rules(resource)
    )


def mark(amounts: dict[str, int], labels: Mapping[str, str], selectors: Iterable[str]) -> None:
    """Add the resources of selectors to the amounts of a node whose labels match them.

    A node without any amounts runs nothing, and stays without.
    """
    for name in selectors if amounts else ():
        if matches(name, labels):
            amounts[name] = ENDLESS


def choices(resource: str) -> list[str]:
    """Return the resources of a selector and its fallbacks, each by itself, in order; a malformed one as it is."""
    try:
        return [SELECTOR + json.dumps(one, sort_keys=True) for one in selectors_of(resource)]
    except ForeignTextError:  # from another node, perhaps
        return [resource]


def selectors_of(resource: str) -> list[dict[str, str]]:
    """Return the selector that a resource stands for, wanted values by label, then its fallbacks.

    Raises:
        ForeignTextError: it stands for none.
    """
    found = read_json(resource[1:], "a selector")
    several = found if isinstance(found, list) else [found]
    if not 1 <= len(several) <= 1 + _FALLBACKS_MAX or not all(isinstance(one, dict) for one in several):
        raise ForeignTextError(f"a selector is {resource[1:81]!r}; it must be an object, or a short list of objects")
    return [{label: str(wanted) for label, wanted in one.items()} for one in several]


def in_words(resource: str) -> str:
    """Return a selector's resource as text for messages: "zone=north, disk=!slow, else zone=south"."""
    try:
        found = selectors_of(resource)
    except ForeignTextError:
        return resource
    each = (", ".join(f"{label}={wanted}" for label, wanted in one.items()) or "anywhere" for one in found)
    return ", else ".join(each)


@lru_cache(_KNOWN_SELECTORS)
def _rules(resource: str) -> tuple[_Rules, ...]:
    """The rules of a selector, and of each of its fallbacks; none if the resource is malformed."""
    try:
        return tuple(_rules_of(one) for one in selectors_of(resource))
    except ForeignTextError:  # from another node, perhaps
        return ()


def _rules_of(selector: Mapping[str, str]) -> _Rules:
    found = []
    for label, wanted in selector.items():
        given = _WANTED.fullmatch(wanted)
        if given is None:
            raise ForeignTextError(f"a selector wants {wanted[:80]!r} of label {label[:80]!r}")
        unwanted, several, one = given.groups()
        values = [one] if several is None else several.split(",") if several.strip() else []
        found.append((label, bool(unwanted), frozenset(value.strip() for value in values)))
    return tuple(found)
