"""One parser of host:port, one rule for loopback, and one for the addresses that a service may bind."""

import pytest

from fastrt.errors import ConfigError
from fastrt.net.address import (
    AddressError,
    InsecureBindError,
    check_bind,
    is_address,
    is_loopback,
    is_loopback_host,
    is_same,
    join_address,
    own_host_toward,
    reachable,
    split_address,
    with_port,
)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("host.example:65535", ("host.example", 65535)),
        ("[::1]:6464", ("::1", 6464)),
        ("[fe80::1%eth0]:6464", ("fe80::1%eth0", 6464)),
    ],
)
def test_address_is_split_and_joined_again(address, parts):
    assert split_address(address) == parts
    assert join_address(*parts) == address
    assert is_address(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "no host"), (":5", "no host"), ("127.0.0.1", "no host"), ("host", "no host"), ("host:", "no whole number"),
        ("host:0", "must be between 1 and 65535"), ("host:65536", "must be between"), ("host:²", "no whole number"),
        ("host:-1", "must be between"), ("::1:80", "in brackets"), ("[::1:80", "in brackets"),
        ("a b:5", "no name"), ("a/b:5", "no name"), ("a\n:5", "no name"), ("x" * 254 + ":5", "no name"),
        ("unix:/tmp/socket", "no whole number"),
    ],
)  # fmt: skip
def test_malformed_address_is_refused_with_the_fault(address, words):
    with pytest.raises(AddressError, match=words):
        split_address(address)
    assert not is_address(address)


def test_port_0_is_for_servers_that_take_any():
    assert split_address("127.0.0.1:0", 0) == ("127.0.0.1", 0)
    assert with_port("[::1]:0", 77) == "[::1]:77"
    assert with_port("unix:/tmp/socket", 0) == "unix:/tmp/socket"
    assert issubclass(AddressError, ConfigError)


def test_brackets_are_given_once():
    assert join_address("[::1]", 5) == join_address("::1", 5) == "[::1]:5"


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/tmp/x", True),
        ("[::ffff:127.0.0.1]:1", True), ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False),
        ("host.example:1", False), (":1", False),
    ],
)  # fmt: skip
def test_loopback_is_recognised(address, inside):
    assert is_loopback(address) is inside
    assert address.startswith("unix:") or is_loopback_host(address.rpartition(":")[0]) is inside


def test_bind_beyond_loopback_needs_authentication_and_encryption():
    check_bind("127.0.0.1:1", authenticated=False, encrypted=False)
    check_bind("0.0.0.0:1", authenticated=True, encrypted=True)
    with pytest.raises(InsecureBindError, match=r"without authentication .* or turn the key"):
        check_bind("0.0.0.0:1", authenticated=False, encrypted=True, remedy="turn the key")
    with pytest.raises(InsecureBindError, match="in the clear"):
        check_bind("[::]:1", authenticated=True, encrypted=False)


def test_server_on_all_addresses_is_reached_by_one_that_others_can_use():
    assert reachable("127.0.0.1:5") == "127.0.0.1:5"
    assert reachable("0.0.0.0:5", "127.0.0.1:80") == "127.0.0.1:5"
    assert reachable("0.0.0.0:5", "no address") == reachable("0.0.0.0:5")
    assert own_host_toward("127.0.0.1:9") == "127.0.0.1"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("localhost:6464", "127.0.0.1:6464", True),
        ("[::ffff:127.0.0.1]:6464", "localhost:6464", True),
        ("localhost:6464", "127.0.0.1:6465", False),
        ("127.0.0.1:6464", "127.0.0.2:6464", False),
        ("nowhere.invalid:1", "nowhere.invalid:1", True),
        ("nowhere.invalid:1", "127.0.0.1:1", False),
        ("a name", "127.0.0.1:1", False),
    ],
)
def test_two_names_of_a_host_are_one_address(one, other, same):
    assert is_same(one, other) is is_same(other, one) is same
