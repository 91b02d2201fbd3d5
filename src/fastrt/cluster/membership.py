"""Rules of a node's report to the head. The head and each reader check all reports by them."""

from __future__ import annotations

import re
from typing import Any

from fastrt.config import LABELS_MAX, is_label
from fastrt.net.address import is_address

JOIN = "/fastrt.node.Head/Join"
REPORT_BYTES_MAX = 8 << 20
_NODE = re.compile(r"[0-9a-f]{32}")
_NAME_MAX = 256
_WORKERS_MAX = 1 << 10
_QUEUED_MAX = 1 << 26  # tasks_max is at most this
_RESOURCES_MAX = 1 << 14  # placement groups add some for each bundle
_PARTS_MAX = 10**4 << 46  # 64 TiB of memory, in parts of 1/10000


def _addresses(report: Any) -> tuple[str, str, str]:
    return report.address, report.native, report.standby


def refused_report(report: Any, before: Any = None) -> str | None:
    """Return why a node's report is invalid; None when it is valid.

    Args:
        report: the report.
        before: a valid report of the same node: fields that equal its fields are not checked again.
    """
    if before is None or report.node != before.node:
        if _NODE.fullmatch(report.node) is None:
            return f"{report.node[:40]!r} is not a node id: expected 32 hexadecimal digits"
        before = None
    if before is None or _addresses(report) != _addresses(before) or report.name != before.name:
        if not is_address(report.address):
            return f"its address {report.address[:80]!r} is not HOST:PORT"
        if report.native and not is_address(report.native):
            return f"its address {report.native[:80]!r} for large values is not HOST:PORT"
        if report.standby and not is_address(report.standby):
            return f"its address {report.standby[:80]!r} of a standby head is not HOST:PORT"
        if len(report.name) > _NAME_MAX or not report.name.isprintable():
            return f"its name has more than {_NAME_MAX} characters, or some that cannot be printed"
    if before is None or dict(report.labels) != dict(before.labels):
        texts = [text for pair in report.labels.items() for text in pair]
        if len(report.labels) > LABELS_MAX + 1 or not all(map(is_label, texts)):
            return f"it has {len(report.labels)} labels, which are too many or have invalid characters"
    if max(report.workers, report.idle) > _WORKERS_MAX or report.queued > _QUEUED_MAX:
        return f"it says {report.workers} workers, {report.idle} idle, {report.queued} tasks queued: above the limits"
    for parts_of in (report.total, report.free):
        if len(parts_of) > _RESOURCES_MAX:
            return f"it names {len(parts_of)} resources; {_RESOURCES_MAX} are allowed"
        for name, parts in parts_of.items():
            if not 0 < len(name) <= _NAME_MAX or not name.isprintable() or parts > _PARTS_MAX:
                return f"its resource {name[:80]!r} with {parts} parts has an invalid name or amount"
    return None
