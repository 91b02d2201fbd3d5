"""`request_resources`: it enters the demand that programs which add nodes can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastrt.ray import refusals
from fastrt.runtime.driver import is_initialized
from fastrt.runtime.nodes import request_resources as _request
from fastrt.store import engine as engines

__all__ = ["request_resources"]


def request_resources(
    num_cpus: int | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    bundle_label_selectors: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Ask for machines: `fastrt.waiting_demand` and `fastrt status --demand` show it. Nothing starts machines here.

    Nodes join by `fastrt start`.

    Args:
        num_cpus: processors that the cluster should have.
        bundles: resources that the cluster should have.
        bundle_label_selectors: labels of the nodes of each bundle; they are not kept.
    Raises:
        ValueError: an amount is not a number of at least 0.
        AttachError: the daemon does not answer.
    Source:
        The semantics of `ray.autoscaler.sdk.request_resources` on a cluster of a fixed size.
    """
    if is_initialized() and engines.current() is None:
        cpus = [{"CPU": float(num_cpus)}] if num_cpus else []
        _request([*cpus, *(bundles or ())])


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
