"""Labels of nodes, and selectors of tasks, actors and bundles that say which labels a node must have.

A node has labels, as {"zone": "north"}. A selector names labels with their wanted values, as {"zone": "!south"}. In a
demand a selector is a resource with a name of its own: a node has that resource without end if its labels match, and
does not have it at all otherwise. So the code that places work by resources places it by labels, too.

Source:
    The semantics of `labels=` and `label_selector=` of Ray.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fastrt.config import LABEL_NAME_MAX, LABELS_MAX
from fastrt.foreign_text import ForeignTextError, read_object

SELECTOR = "?"  # the first character of the name of a selector's resource
ENDLESS = 1 << 40  # parts of a selector's resource that a matching node has
NODE_ID = "ray.io/node-id"  # a label that every node has
_WANTED = re.compile(r"(!?)(?:in\(([^()]*)\)|([^!,()]+))")
_KNOWN_SELECTORS = 4096


def labels_of(node: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return all labels of a node.

    Args:
        node: its id.
        labels: those that it was started with.
    """
    return {**labels, NODE_ID: node}


def resource_of(option: str, selector: Any) -> str:
    """Return the resource that stands for a selector.

    Args:
        option: its name, for messages.
        selector: wanted values by label: "a" (this value), "!a" (not this value), "in(a, b)", "!in(a, b)". A node
            without the label has no value: it matches "!a" and "!in(a, b)" only.
    Raises:
        TypeError: the selector is no mapping of texts.
        ValueError: it names nothing or too much, or a value has another form.
    """
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
    return SELECTOR + json.dumps(dict(selector), sort_keys=True)


def is_selector(resource: str) -> bool:
    """Whether a resource stands for a selector."""
    return resource.startswith(SELECTOR)


def matches(resource: str, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels has a selector's resource. A resource that no selector has is nowhere."""
    rules = _rules(resource)
    return rules is not None and all((labels.get(label) in values) != unwanted for label, unwanted, values in rules)


def selector_of(resource: str) -> dict[str, str]:
    """Return the selector that a resource stands for: wanted values by label.

    Raises:
        ForeignTextError: it stands for none.
    """
    return {label: str(wanted) for label, wanted in read_object(resource[1:], "a selector").items()}


def in_words(resource: str) -> str:
    """Return a selector's resource as text for messages: "zone=north, disk=!slow"."""
    try:
        selector = read_object(resource[1:], "a selector")
    except ForeignTextError:
        return resource
    return ", ".join(f"{label}={wanted}" for label, wanted in selector.items())


@lru_cache(_KNOWN_SELECTORS)
def _rules(resource: str) -> tuple[tuple[str, bool, frozenset[str]], ...] | None:
    """For each label of a selector: the values that it must have, or (True) must not have."""
    try:
        selector = read_object(resource[1:], "a selector")  # from another node, perhaps
    except ForeignTextError:
        return None
    found = []
    for label, wanted in selector.items():
        given = _WANTED.fullmatch(wanted) if isinstance(wanted, str) else None
        if given is None:
            return None
        unwanted, several, one = given.groups()
        values = [one] if several is None else several.split(",")
        found.append((label, bool(unwanted), frozenset(value.strip() for value in values)))
    return tuple(found)
