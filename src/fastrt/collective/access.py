"""The secret of a group whose ranks meet at a coordinator, and its proof on connections between ranks.

A coordinator accepts keys from every process that reaches it, so nothing in it is trusted: the invitation that rank 0
publishes there carries an HMAC under the group's secret. A connection between machines is TLS with certificates on both
sides. On loopback, and with `insecure`, both ends prove the secret, and the bytes that follow are in the clear.
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
    """The secret of a group, held by one rank.

    Args:
        identity: derived from the group's token.
        insecure: whether connections between machines are only authenticated, not encrypted.
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
    """Address at which rank 0 accepts the other ranks. Published in the coordinator."""

    host: str
    port: int
    nonce: str  # differs for each process that is rank 0
    size: int  # of the group
    tls: bool

    def pack(self, name: str, access: Access) -> str:
        """Serialise it for a group, with the proof that a rank with the group's token wrote it."""
        return json.dumps({**self._asdict(), "mac": self._mac(name, access)})

    @classmethod
    def read(cls, text: bytes | str, name: str, access: Access) -> Invitation:
        """Read and verify the coordinator's entry for the group.

        Raises:
            ForeignTextError: it is no invitation to this group from a rank with the same token.
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
        token: made by `new_token`; None: read it from the file that FASTRT_TOKEN_FILE names.
        insecure: see `Access`.
    Returns:
        The secret.
    Raises:
        ConfigError: there is no token, or it is invalid.
        TokenFileError: the file cannot be used.
    """
    if token is None and os.environ.get(TOKEN_FILE):
        token = read_token(os.environ[TOKEN_FILE])
    if token is None:
        raise ConfigError(
            f"group {group!r} meets at a coordinator, which any process that reaches it can read and write, but this "
            "rank has no secret that keeps strangers out. Give all ranks the same token: token=..., made once by "
            f"fastrt.collective.new_token(), or {TOKEN_FILE} with the path of a token file, such as the cluster's"
        )
    return Access(Identity.from_token(token), insecure)


def check_types(values: Any, what: str, *kinds: type) -> list[Any]:
    """Check that a peer's list has the expected number of values, each of the expected type.

    Raises:
        ForeignTextError: it does not, or it is no list.
    """
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise ForeignTextError(f"{what} must be a list of {', '.join(kind.__name__ for kind in kinds)}")
    return values
