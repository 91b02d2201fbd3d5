"""Fixtures of the stores in sites.py. Every site ends with an fsck of a quiet arena in which nothing is left."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastrt.objstore.service import ObjStoreServer
from support.sites import Caller, Pair, Site


@pytest.fixture
def make_site(drop_arguments: None) -> Iterator[Callable[..., Site]]:
    """Make stores; each is checked at the end."""
    made: list[Site] = []

    def make(*args: Any, **kwargs: Any) -> Site:
        made.append(Site(*args, **kwargs))
        return made[-1]

    yield make
    with contextlib.ExitStack() as stack:
        while made:
            stack.callback(made.pop().close)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Close or stop something at the end, last first; before the sites are looked at."""
    with contextlib.ExitStack() as stack:

        def add(thing: Any) -> Any:
            stack.callback(thing.stop if hasattr(thing, "stop") else thing.close)
            return thing

        yield add


@pytest.fixture
def pair(make_site: Callable[..., Site], closing: Callable[[Any], Any]) -> Pair:
    return Pair(make_site(), make_site(), closing)


@pytest.fixture
def sealed(make_site: Callable[..., Site], closing: Callable[[Any], Any]) -> Pair:
    """A pair whose stream is sealed, as between machines."""
    return Pair(make_site(), make_site(), closing, tls=True)


@pytest.fixture(params=["clear", "sealed"])
def either(make_site: Callable[..., Site], closing: Callable[[Any], Any], request: pytest.FixtureRequest) -> Pair:
    return Pair(make_site(), make_site(), closing, tls=request.param == "sealed")


@pytest.fixture
def caller(closing: Callable[[Any], Any]) -> Callable[..., Caller]:
    def make(*args: Any, **kwargs: Any) -> Caller:
        made: Caller = closing(Caller(*args, **kwargs))
        return made

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()


@pytest.fixture
def server(site: Site, closing: Callable[[Any], Any]) -> ObjStoreServer:
    served: ObjStoreServer = closing(site.serve())
    return served


@pytest.fixture
def call(server: ObjStoreServer, caller: Callable[..., Caller]) -> Caller:
    return caller(server.address)


# grpc opens now what it keeps open for good.
_site = Site(16 << 20)
_server = _site.serve()
_caller = Caller(_server.address)
_caller("ObjStoreInfo")
_caller.close()
_server.stop()
_site.close()
del _site, _server, _caller
