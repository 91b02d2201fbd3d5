"""Collective operations over NumPy arrays and other CPU buffers, among processes of one machine or of several.

`init_group` joins a group, `create_group` makes one of actors; see `docs/collective.md`.
"""

from fastrt.collective.actors import ActorGroup, create_group, get_group
from fastrt.collective.buffers import as_bfloat16
from fastrt.collective.group import Group
from fastrt.collective.handles import Handle
from fastrt.collective.start import init_group
from fastrt.errors import CollectiveMismatch, CollectiveTimeout, PeerDied
from fastrt.net.grpc.identity import new_token

__all__ = [
    "ActorGroup",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Group",
    "Handle",
    "PeerDied",
    "as_bfloat16",
    "create_group",
    "get_group",
    "init_group",
    "new_token",
]
