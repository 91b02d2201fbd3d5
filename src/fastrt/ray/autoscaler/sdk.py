"""`request_resources`, as it is on a cluster without an autoscaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastrt.ray import refusals

__all__ = ["request_resources"]


def request_resources(
    num_cpus: int | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    bundle_label_selectors: Sequence[Mapping[str, str]] | None = None,
) -> None:
    """Ask for more machines: without effect, as nothing starts machines here.

    Nodes join by `fastrt start`.

    Args:
        num_cpus: processors that the cluster should have.
        bundles: resources that the cluster should have.
        bundle_label_selectors: labels of the nodes of each bundle.
    Source:
        The semantics of `ray.autoscaler.sdk.request_resources` on a cluster of a fixed size.
    """


def __getattr__(name: str) -> Any:
    raise refusals.missing(__name__, name)
