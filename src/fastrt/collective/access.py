"""The secret of a group whose ranks meet at a coordinator, and how connections between its ranks prove it.

A coordinator takes keys from every process that reaches it, so nothing that it says is trusted: what rank 0 publishes
there carries an HMAC under the group's secret. A connection beyond this machine is TLS with certificates on both sides.
On loopback, and with `insecure`, both ends prove the secret and the bytes that follow are in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from typing import Any, NamedTuple

from fastrt.errors import ConfigError
from fastrt.foreign_text import ForeignTextError, read_object
from fastrt.net.address import is_loopback_host
from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.identity import Identity

TOKEN_FILE = "FASTRT_TOKEN_FILE"
_INVITATION = {"host": str, "port": int, "nonce": str, "size": int, "tls": bool, "mac": str}


class Access:
    """One rank's secret.

    Args:
        identity: derived from the group's token.
        insecure: whether connections between machines are authenticated only, and not encrypted.
    """

    def __init__(self, identity: Identity, insecure: bool = False) -> None:
        self.identity = identity
        self.key = identity.key("collective")
        self.insecure = insecure

    def __repr__(self) -> str:
        return f"Access({self.identity!r}, insecure={self.insecure})"

    def uses_tls(self, host: str) -> bool:
        """Whether connections to a listener at this IP address are encrypted."""
        return not self.insecure and not is_loopback_host(host)


class Invitation(NamedTuple):
    """Where rank 0 waits for the others. Published in the coordinator."""

    host: str
    port: int
    nonce: str  # of this incarnation of rank 0
    size: int  # of the group
    tls: bool

    def pack(self, name: str, access: Access) -> str:
        """Write it for a group, with the proof that a rank with the group's token wrote it."""
        return json.dumps({**self._asdict(), "mac": self._mac(name, access)})

    @classmethod
    def read(cls, text: bytes | str, name: str, access: Access) -> Invitation:
        """Read what the coordinator has under the group's key.

        Raises:
            ForeignTextError: it is no invitation to this group by a rank with the same token.
        """
        what = f"the coordinator's key of group {name!r}"
        found = read_object(text, what, _INVITATION, bytes_max=4096)
        invitation = cls(*(found[field] for field in cls._fields))
        if not hmac.compare_digest(found["mac"].encode(), invitation._mac(name, access).encode()):
            raise ForeignTextError(f"{what} was not written by a rank with this token")
        return invitation

    def _mac(self, name: str, access: Access) -> str:
        said = json.dumps(["fastrt collective invitation 1", name, 0, *self]).encode()
        return hmac.new(access.key, said, hashlib.sha256).hexdigest()


def find_access(group: str, token: str | None, insecure: bool) -> Access:
    """Find the secret of a group.

    Args:
        group: its name, for the message.
        token: as `new_token` makes it; None: from the file that FASTRT_TOKEN_FILE names.
        insecure: see `Access`.
    Returns:
        The secret.
    Raises:
        ConfigError: there is none, or it is no token.
        TokenFileError: the file cannot be used.
    """
    if token is None and os.environ.get(TOKEN_FILE):
        token = read_token(os.environ[TOKEN_FILE])
    if token is None:
        raise ConfigError(
            f"group {group!r} meets at a coordinator, which any process that reaches it can read and write, and this "
            "rank has no secret that keeps strangers out. Give all ranks the same token: token=..., made once by "
            f"fastrt.collective.new_token(), or {TOKEN_FILE} with the path of a token file, such as the cluster's"
        )
    return Access(Identity.from_token(token), insecure)


def check_types(values: Any, what: str, *kinds: type) -> list[Any]:
    """Check a list of a peer: as many values as types, each of its type.

    Raises:
        ForeignTextError: it is another list, or none.
    """
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise ForeignTextError(f"{what} must be a list of {', '.join(kind.__name__ for kind in kinds)}")
    return values
