"""The secret of a parameter-server cluster in the forms that its connections use.

TCP connections use TLS with certificates on both sides, others a key for a mutual proof. The secret is never sent.
"""

from __future__ import annotations

import functools
import ssl
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrt.net.grpc.identity import Identity

_PURPOSE = "parameter server"


class Trust:
    """A cluster's secret in this process. Keys and contexts are derived at their first use, and kept.

    Args:
        token: the cluster's.
        insecure: connections for tables go in the clear beyond loopback too, after both ends have proved the secret.
        key: the attribute `key`, if another process has derived it already.
    """

    def __init__(self, token: str, insecure: bool = False, key: bytes | None = None) -> None:
        self.token = token
        self.insecure = insecure
        self._key = key

    def __repr__(self) -> str:
        return "Trust()"

    @cached_property
    def identity(self) -> Identity:
        """The cluster's identity.

        Raises:
            ConfigError: the token is damaged, or none.
        """
        from fastrt.net.grpc.identity import Identity  # here: a server that replaces a dead one serves without it

        return Identity.from_token(self.token)

    @property
    def key(self) -> bytes:
        """The key for proofs over sockets without TLS."""
        if self._key is None:
            self._key = self.identity.key(_PURPOSE)
        return self._key

    @property
    def name(self) -> str:
        """The name in every certificate of the cluster."""
        return self.identity.name

    @cached_property
    def server(self) -> ssl.SSLContext:
        """The context of accepted connections."""
        return self.identity.server_context()

    @cached_property
    def client(self) -> ssl.SSLContext:
        """The context of connections to others; they must have `name`."""
        return self.identity.client_context()


@functools.lru_cache(maxsize=8)
def trust_of(token: str, insecure: bool = False) -> Trust:
    """Return the trust of a token, the same object each time.

    Args:
        token, insecure: see `Trust`.
    Raises:
        ConfigError: the token is damaged, or none.
    """
    made = Trust(token, insecure)
    assert made.name
    return made
