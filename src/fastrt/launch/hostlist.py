"""Slurm's notation for lists of hosts: `n[1-3,7],login` is n1, n2, n3, n7 and login."""

from __future__ import annotations

import itertools
import re

from fastrt.errors import ConfigError

HOSTS_MAX = 65_536
_PART = re.compile(r"\[([0-9,\-]+)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


def expand(text: str) -> tuple[str, ...]:
    """List the hosts of a Slurm host list, in its order.

    Args:
        text: such as `n[1-3,7],rack[0-1]n[08-10]`; numbers keep their leading zeros.
    Raises:
        ConfigError: it is no such list, or names more than 65,536 hosts.
    Source:
        "Hostlist expressions" of Slurm's `scontrol show hostnames`.
    """
    found: list[str] = []
    for word in _words(text):
        parts: list[list[str]] = []
        at = 0
        while at < len(word):
            match = _PART.match(word, at)
            if match is None:
                raise _refuse(text)
            parts.append([match[2]] if match[1] is None else _numbers(match[1], text))
            at = match.end()
        count = 1
        for part in parts:
            count *= len(part)
        if len(found) + count > HOSTS_MAX:
            raise ConfigError(f"the host list {text[:80]!r} names more than {HOSTS_MAX} hosts")
        found += map("".join, itertools.product(*parts))
    return tuple(found)


def counts(text: str) -> tuple[int, ...]:
    """List the tasks of each host: `2(x3),1` is 2, 2, 2, 1.

    Raises:
        ConfigError: it is no such list.
    Source:
        SLURM_STEP_TASKS_PER_NODE in the manual of `srun`.
    """
    found: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word.strip())
        if match is None or len(found) + int(match[2] or 1) > HOSTS_MAX:
            raise ConfigError(f"{text[:80]!r} does not list the tasks of each host, such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _words(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    words, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            words.append(text[start:at])
            start = at + 1
    words.append(text[start:])
    if depth or not all(words):
        raise _refuse(text)
    return words


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for one in text.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise _refuse(whole)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + HOSTS_MAX or len(found) > HOSTS_MAX:
            raise _refuse(whole)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _refuse(text: str) -> ConfigError:
    return ConfigError(f"{text[:80]!r} is no list of hosts; it must be like n1,n2 or n[1-2]")
