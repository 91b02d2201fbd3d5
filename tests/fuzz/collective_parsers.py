"""Fuzz targets: foreign text, and what ranks read of the coordinator and of each other while a group is made."""

import json
import time
from functools import cache
from typing import Any

PACKAGES = [
    "fastrt.foreign_text",
    "fastrt.collective.access",
    "fastrt.collective.greetings",
    "fastrt.collective.tcp_rendezvous",
]
PURPOSE = "fastrt collective gather 00 victims"
PLACE = [1, "node", "127.0.0.1", 7000, 1]


def text(data: bytes) -> None:
    """Any bytes: a value that can be written again, or the one error."""
    from fastrt.foreign_text import ForeignTextError, read_int, read_json

    for own in (False, True):
        try:
            value = read_json(data, "x", bytes_max=4096, depth_max=8, own=own)
        except ForeignTextError:
            continue
        written = json.dumps(value)
        if not own:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            assert read_json(written, "x", bytes_max=1 << 16, depth_max=8) == value
    try:
        assert 0 <= read_int(data, "x", 0, 65535) <= 65535
    except ForeignTextError:
        pass


@cache
def _part() -> Any:
    from fastrt.collective.access import Access
    from fastrt.collective.tcp_rendezvous import Place, _Part
    from fastrt.net.grpc.identity import Identity, new_token

    access = Access(Identity.from_token(new_token()))
    return _Part("victims", Place(0, "n", "127.0.0.1", 1, 1), 2, "", access, None, time.monotonic(), None)


def invitation(data: bytes) -> None:
    """What the coordinator has under a group's key; the fuzzer does not have the secret."""
    from fastrt.collective.access import Invitation
    from fastrt.foreign_text import ForeignTextError

    try:
        found = Invitation.read(data, "victims", _part().access)
    except ForeignTextError:
        return
    raise AssertionError(f"{found} was accepted without the secret")


def greeting(data: bytes) -> None:
    """What a rank sends behind its proof."""
    from fastrt.collective.greetings import _Caller
    from fastrt.foreign_text import ForeignTextError

    caller = object.__new__(_Caller)
    caller._purpose = PURPOSE
    steps = caller._read_greeting()
    needed = next(steps)
    found: dict[str, Any] = {"purpose": PURPOSE}
    try:
        while len(data) >= needed:
            piece, data = data[:needed], data[needed:]
            needed = steps.send(piece)
    except StopIteration as stop:
        found = stop.value
    except ForeignTextError:
        pass
    assert found["purpose"] == PURPOSE


class _Silent:
    """A link that takes everything."""

    def send(self, parts: list[bytes], timeout_s: float) -> None:
        assert all(parts)

    def close(self) -> None:
        pass


def admission(data: bytes) -> None:
    """Which rank a greeting is of."""
    from fastrt.foreign_text import ForeignTextError, read_object

    try:
        hello = read_object(data, "a rank's greeting")
    except ForeignTextError:
        return
    there: dict[int, tuple[Any, Any]] = {0: (None, _part().place)}
    _part()._admit(_Silent(), hello, there)
    assert set(there) <= {0, 1}


def answer(data: bytes) -> None:
    """Rank 0's list of all ranks."""
    from fastrt.errors import FastrtError
    from fastrt.foreign_text import read_object

    try:
        made = _part()._read_answer(read_object(data, "rank 0's answer"))
    except FastrtError:
        return
    assert [place.rank for place in made.places] == [0, 1]


def word(data: bytes) -> None:
    """The failure that one node tells the others."""
    from fastrt.collective.ring import unpack_error
    from fastrt.errors import FastrtError
    from fastrt.foreign_text import ForeignTextError, read_object

    try:
        assert isinstance(unpack_error(read_object(data, "a word")), FastrtError)
    except ForeignTextError:
        pass


def _framed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body


def _json(*messages: Any) -> list[bytes]:
    return [json.dumps(one).encode() for one in messages]


TARGETS = {
    "text": text,
    "invitation": invitation,
    "greeting": greeting,
    "admission": admission,
    "answer": answer,
    "word": word,
}
_HELLO = {"place": PLACE, "world_size": 2, "wish": ""}
SEEDS: dict[str, list[bytes]] = {
    "text": [
        *_json({"a": [1, -2.5e3, "\ud800"], "b": {"c": None}}),
        b"[" * 20 + b"]" * 20,
        b"65535",
        b"NaN",
        b'"\\u00e9"',
    ],
    "invitation": _json(
        {"host": "127.0.0.1", "port": 1, "nonce": "00", "size": 2, "tls": False, "mac": "0" * 64}, {"port": [1]}
    ),
    "greeting": [_framed({**_HELLO, "purpose": PURPOSE}), _framed({"purpose": 1}), b"\xff\xff\0\0{}"],
    "admission": _json(_HELLO, {**_HELLO, "place": [1, 2, 3]}, {**_HELLO, "world_size": 3}),
    "answer": _json(
        {"group_id": "x", "places": [[0, *PLACE[1:]], PLACE]},
        {"died": "x", "rank": 1},
        {"timeout": "x"},
        {"mismatch": 1},
    ),
    "word": _json({"kind": "died", "text": "x", "rank": 1}, {"kind": "timeout", "text": "x"}, {"kind": [], "text": 1}),
}
