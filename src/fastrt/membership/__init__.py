"""The membership of a parameter-server cluster: MindSpore's protocol over a pure state machine.

`ClusterScheduler` serves one inside this process, `fastrt ps scheduler` from a shell; `ClusterMember` takes part in
one as a server or worker.
"""

from typing import TYPE_CHECKING

from fastrt.lazy import attach
from fastrt.membership.client import ClusterMember
from fastrt.membership.events import MemberView, Overview, Phase, Refused, Role
from fastrt.membership.options import ClusterTimeoutError, MemberEvent, MemberOptions, RegistrationRefusedError
from fastrt.membership.peers import MemberUnreachableError
from fastrt.membership.service import ClusterOptions, ClusterScheduler
from fastrt.membership.state import Settings

if TYPE_CHECKING:
    from fastrt.membership.collective import MemberGroup

__all__ = [
    "ClusterMember",
    "ClusterOptions",
    "ClusterScheduler",
    "ClusterTimeoutError",
    "MemberEvent",
    "MemberGroup",
    "MemberOptions",
    "MemberUnreachableError",
    "MemberView",
    "Overview",
    "Phase",
    "Refused",
    "RegistrationRefusedError",
    "Role",
    "Settings",
]

_HOMES = {"fastrt.membership.collective": "MemberGroup"}  # it brings NumPy, which a scheduler does not need

if not TYPE_CHECKING:
    __getattr__, __dir__ = attach(__name__, _HOMES)
