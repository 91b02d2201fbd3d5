"""Frames: what was captured from the original, every way to cut it, and what is no frame at all."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrt.membership.framing import FRAME_BYTES_MAX, HEADER, META_BYTES_MAX, Frame, FramingError, Kind, Parser
from fastrt.net.grpc.descriptors import message_set

CAPTURED = json.loads(Path(__file__).with_name("mindspore_frames.json").read_text())
PACKAGE = "mindspore.ps.core."
# What each captured frame's data is, by command and direction; None: bytes of no message.
DATA = {
    (1, "->sched"): "RegisterMessage",
    (1, "<-resp"): "RegisterRespMessage",
    (2, "->sched"): "HeartbeatMessage",
    (2, "<-resp"): "HeartbeatRespMessage",
    (4, "->sched"): "FetchServersMessage",
    (4, "<-resp"): "FetchServersRespMessage",
    (5, "->sched"): None,
    (5, "<-resp"): None,
    (5, "<-sched(req)"): None,
    (7, "<-sched(req)"): "SendMetadataMessage",
    (12, "->sched"): "EventMessage",
    (12, "<-resp"): "EventMessage",  # the request, given back
    (12, "<-sched(req)"): "EventRespMessage",
}
WHOLE = b"".join(bytes.fromhex(frame["header"] + frame["meta"] + frame["data"]) for frame in CAPTURED)


def message(name: str) -> Any:
    return message_set("cluster").message(PACKAGE + name)


def known(parsed: Any) -> bytes:
    """A message as bytes again, without what our description of it does not know."""
    parsed.DiscardUnknownFields()
    return bytes(parsed.SerializeToString())


def frames_of(*pieces: bytes) -> list[Frame]:
    parser = Parser()
    found = [frame for piece in pieces for frame in parser.feed(piece)]
    assert not parser.is_torn()
    return found


@pytest.mark.parametrize("captured", CAPTURED, ids=lambda frame: f"{frame['who']}{frame['dir']}{frame['t']}")
def test_captured_frame_makes_the_round_trip_byte_for_byte(captured: dict[str, Any]) -> None:
    wire = bytes.fromhex(captured["header"] + captured["meta"] + captured["data"])
    (frame,) = frames_of(wire)
    meta = message("MessageMeta").FromString(frame.meta)
    name = DATA[meta.cmd, captured["dir"]]
    data = frame.data if name is None else known(message(name).FromString(frame.data))
    assert Frame(frame.kind, known(meta), data).pack() == wire


def test_stream_is_parsed_alike_at_every_split_point() -> None:
    expected = frames_of(WHOLE)
    assert len(expected) == len(CAPTURED)
    for at in range(len(WHOLE) + 1):
        assert frames_of(WHOLE[:at], WHOLE[at:]) == expected
    assert frames_of(*(WHOLE[i : i + 1] for i in range(len(WHOLE)))) == expected


def test_torn_frame_is_known_as_such() -> None:
    one = Frame(Kind.RAW, b"\x08\x01\x10\x01", b"data").pack()
    for at in range(1, len(one)):
        parser = Parser()
        assert not list(parser.feed(one[:at]))
        assert parser.is_torn()


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ((3, 4, 4), "kind 3"),
        ((0xFFFFFFFF, 4, 4), "kind"),
        ((1, 0, 0), "request_id of 1"),
        ((1, 5, 4), "claims 5 bytes of meta"),
        ((1, META_BYTES_MAX + 1, 1 << 20), "bytes of meta"),
        ((1, 4, FRAME_BYTES_MAX + 1), "at most"),
        ((1, 4, (1 << 64) - 1), "at most"),
    ],
)
def test_header_that_makes_no_sense_is_refused_after_the_frames_before_it(
    header: tuple[int, int, int], words: str
) -> None:
    good = Frame(Kind.PROTOBUF, b"\x10\x01", b"")
    frames = Parser().feed(good.pack() + HEADER.pack(*header))
    assert next(frames) == good
    with pytest.raises(FramingError, match=words):
        next(frames)


def test_limit_of_the_service_holds_before_anything_is_kept() -> None:
    parser = Parser(frame_bytes_max=100)
    assert len(list(parser.feed(Frame(0, b"\x10\x01", bytes(98)).pack()))) == 1
    with pytest.raises(FramingError, match="at most 100"):
        list(parser.feed(HEADER.pack(0, 2, 101)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=40), st.binary(max_size=300)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_any_frames_in_any_pieces_come_out_as_they_went_in(parts: list[Any], dice: random.Random) -> None:
    frames = [Frame(*part) for part in parts]
    wire = b"".join(frame.pack() for frame in frames)
    cuts = sorted(dice.randrange(len(wire) + 1) for _ in range(dice.randrange(6)))
    assert frames_of(*(wire[a:b] for a, b in itertools.pairwise([0, *cuts, len(wire)]))) == frames


@pytest.mark.parametrize("seed", range(8))
def test_damaged_stream_gives_frames_or_an_error_and_nothing_else_fuzz(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(150):
        wire = bytearray(WHOLE)
        for _ in range(dice.randrange(1, 4)):
            wire[dice.randrange(len(wire))] ^= 1 << dice.randrange(8)
        at = dice.randrange(len(wire))
        parser, found = Parser(frame_bytes_max=1 << 20), []
        try:
            for piece in (wire[:at], wire[at:]):
                found += list(parser.feed(piece))
        except FramingError:
            pass
        # Whatever was taken for a frame stood there: nothing is made up, moved or repeated.
        assert bytes(wire).startswith(b"".join(frame.pack() for frame in found))
