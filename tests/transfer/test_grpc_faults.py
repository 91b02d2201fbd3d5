"""StreamObj over a network that breaks, stalls or crawls: a typed error or the object, and nothing half done."""

import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from fastrt.objstore.push import Pusher
from support.sites import TOKEN, Proxy, Site

NBYTES = 6 << 20
Make = Callable[..., Any]


class Way:
    """From one store to another by gRPC, through a proxy."""

    def __init__(self, make_site: Make, closing: Make, timeout_s: float = 20.0, **proxy: Any) -> None:
        self.here: Site = make_site()
        self.there: Site = make_site()
        server = closing(self.there.serve())
        self.proxy: Proxy = closing(Proxy(server.address, upward=True, **proxy))
        self.pusher: Pusher = closing(Pusher(self.here.table, TOKEN, timeout_s=timeout_s))
        self.here.put(1, np.arange(NBYTES // 8))

    def deliver(self) -> None:
        self.pusher.deliver(self.proxy.address, 1)


@pytest.mark.parametrize("how", ["cut", "reset"])
@pytest.mark.parametrize("at", [0, 10, 500, 100_000, NBYTES // 2, NBYTES])
def test_broken_connection_is_a_typed_error_and_the_next_one_delivers(
    make_site: Make, closing: Make, wait_until: Make, how: str, at: int
) -> None:
    way = Way(make_site, closing, plans=[(how, at)])
    # Before the first call has gone out, gRPC may connect anew by itself.
    with contextlib.suppress(grpc.RpcError) if at < 500 else pytest.raises(grpc.RpcError) as caught:
        way.deliver()
    if caught is not None:
        assert caught.value.code().name in ("UNAVAILABLE", "CANCELLED"), caught.value
        assert way.there.table.listed() == []

    def delivered() -> bool:
        try:
            way.deliver()
        except grpc.RpcError:  # the channel waits a moment before it connects again
            return False
        return True

    wait_until(delivered, "the object is there", 20)
    np.testing.assert_array_equal(way.there.get(1), np.arange(NBYTES // 8))


def test_network_that_falls_silent_is_a_typed_error_in_time(make_site: Make, closing: Make, wait_until: Make) -> None:
    way = Way(make_site, closing, timeout_s=1.0, then=("stall", NBYTES // 2))
    with pytest.raises(grpc.RpcError) as caught:
        way.deliver()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    way.proxy.close()
    wait_until(lambda: way.there.table.coming() == 0, "the half of it is thrown away")
    assert way.there.table.listed() == []


def test_slow_network_delivers_all_the_same(make_site: Make, closing: Make) -> None:
    way = Way(make_site, closing, rate=20 << 20)
    way.deliver()
    np.testing.assert_array_equal(way.there.get(1), np.arange(NBYTES // 8))


def test_reordered_start_of_a_connection_is_a_typed_error_or_costs_another(make_site: Make, closing: Make) -> None:
    way = Way(make_site, closing, plans=[("swap", 0)])
    try:
        way.deliver()
    except grpc.RpcError:
        assert way.there.table.listed() == []
    else:  # the call had not gone out when the connection was refused, so gRPC made another
        assert way.proxy.connections >= 2
        np.testing.assert_array_equal(way.there.get(1), np.arange(NBYTES // 8))
