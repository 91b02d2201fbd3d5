"""The protocol of the native stream between two stores: its messages and their validation.

    taker  -> source  opening  magic, version, flags
    taker  -> source  request  {ticket, objref, offset, end}, any number, at any time
    source -> taker   frame    header with the request's ticket, names of contained references, data
                   or bundle   header, a list of small objects, the data of all of them

    taker  -> source  name     {0, name, 0, 0}: the taker accepts objects that it did not request
    source -> taker   push     a frame with a ticket of the source, of a whole small object without references
    taker  -> source  answer   {ticket, objref, TAKEN or NOT_TAKEN, 0}

Objects that are requested over one connection take turns, frame by frame. Small objects without references that are
requested together are sent together, in a bundle. A large object can come from several sources at once: each is asked
for a part of it, up to `end`.

`fastrt.transfer.link` authenticates both ends before the first byte of this protocol. A frame holds at most FRAME_BYTES
of data, in order within its object. Its header always has a CRC-32C. Its data have one if the taker requests it: in the
clear between machines, because sealed records and the memory of one machine need none. A frame is accepted when it is
complete and its checksum is right; after a broken connection the object continues at that offset. All numbers are
little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fastrt._core.transfer import stream
from fastrt.transfer.table import TransferError

VERSION = 4
FRAME_BYTES = 4 << 20
REFS_MAX = 1 << 20
TEXT_BYTES_MAX = 4096
REQUESTS_MAX = 256  # open requests of a taker: 9 KiB, which fit into a socket's buffer while the source does not read

# A frame's status; with ABSENT and REFUSED the data are a text with the reason.
OK, ABSENT, REFUSED, BUNDLE, PUSH = 0, 1, 2, 3, 4
TAKEN, NOT_TAKEN = 0, 1
BUNDLE_MAX = 48  # objects in a bundle
SMALL_BYTES = 256 << 10  # of an object in a bundle

CHECKSUM = 1  # an opening's flag: put checksums on data
ERROR, CHECKED = 1, 2  # a frame's flags: the value is an error; `crc` is that of the data

OPENING = struct.Struct("<4sIII")
_OPENING_MAGIC = b"frtO"
REQUEST = struct.Struct("<4sIQQQI")
REQUEST_MAGIC, NAME_MAGIC, ANSWER_MAGIC = b"frtR", b"frtN", b"frtA"
HEAD = struct.Struct("<4sHHIIIQQQQII")
_HEAD_MAGIC = b"frtD"
_HEAD_BYTES_CHECKED = HEAD.size - 4
ENTRY = struct.Struct("<IHHQII")  # of a bundle's list


class WireError(TransferError):
    """The peer of a native stream violates the protocol: another version, or wrong data about an object."""


class BrokenError(TransferError):
    """Data of a native stream were damaged in transit; the object continues over a new connection."""


class Frame(NamedTuple):
    """A frame's header, validated by itself but not against its object."""

    status: int
    kind: int
    flags: int
    nrefs: int
    ticket: int
    objref: int
    total: int
    offset: int
    length: int
    crc: int


class Entry(NamedTuple):
    """The list entry of one object in a bundle."""

    ticket: int
    kind: int
    flags: int
    objref: int
    total: int
    crc: int


class Request(NamedTuple):
    """A request for an object's bytes from an offset to an end; its frames carry the ticket.

    `end` is 0 for the object's own. Names and answers have the same form.
    """

    ticket: int
    objref: int
    offset: int
    end: int = 0


def pack_opening(checksum: bool) -> bytes:
    """Write the first message of a taker."""
    head = OPENING.pack(_OPENING_MAGIC, VERSION, CHECKSUM * checksum, 0)[:-4]
    return head + stream.crc32c(head).to_bytes(4, "little")


def read_opening(data: bytes | bytearray) -> bool:
    """Read the first message of a taker.

    Returns:
        Whether it wants checksums on data.
    Raises:
        WireError: it is no store of this version.
    """
    magic, version, flags, crc = OPENING.unpack(data)
    if magic != _OPENING_MAGIC or version != VERSION or crc != stream.crc32c(memoryview(data)[: OPENING.size - 4]):
        raise WireError(f"the taker is no store of version {VERSION} of the native stream")
    return bool(flags & CHECKSUM)


def pack_request(request: Request, magic: bytes = REQUEST_MAGIC) -> bytes:
    """Write a request; by its magic a name or an answer."""
    head = REQUEST.pack(magic, *request, 0)[:-4]
    return head + stream.crc32c(head).to_bytes(4, "little")


def read_request(data: bytes | bytearray | memoryview, at: int) -> tuple[bytes, Request]:
    """Read a request, a name or an answer.

    Returns:
        (magic, fields).
    Raises:
        WireError: it is none of them.
    """
    magic, *fields, crc = REQUEST.unpack_from(data, at)
    if magic not in (REQUEST_MAGIC, NAME_MAGIC, ANSWER_MAGIC) or crc != stream.crc32c(
        memoryview(data)[at : at + REQUEST.size - 4]
    ):
        raise WireError("the other end sent something that is no request")
    return magic, Request(*fields)


def pack_frame(frame: Frame) -> bytes:
    """Write a frame's header."""
    head = HEAD.pack(_HEAD_MAGIC, *frame, 0)[:_HEAD_BYTES_CHECKED]
    return head + stream.crc32c(head).to_bytes(4, "little")


def read_frame(head: bytearray) -> Frame:
    """Read a frame's header.

    Raises:
        WireError: it is none, or says what cannot be.
        BrokenError: its checksum is wrong.
    """
    magic, *fields, crc = HEAD.unpack(head)
    if magic != _HEAD_MAGIC:
        raise WireError("the other end sent something that is no frame")
    if crc != stream.crc32c(memoryview(head)[:_HEAD_BYTES_CHECKED]):
        raise BrokenError("a frame's header was damaged on the way")
    frame = Frame(*fields)
    if frame.status == BUNDLE:
        if not 0 < frame.nrefs <= BUNDLE_MAX or frame.length > frame.nrefs * (ENTRY.size + SMALL_BYTES):
            raise WireError(f"a bundle of {frame.nrefs} objects has {frame.length} bytes")
        return frame
    if frame.status not in (OK, PUSH):
        if frame.length > TEXT_BYTES_MAX or frame.nrefs:
            raise WireError(f"the reason for refusing object {frame.objref:#x} has {frame.length} bytes")
        return frame
    most = min(FRAME_BYTES, frame.total - frame.offset)
    if frame.offset > frame.total or frame.length > most or (frame.length == 0 and frame.total):
        raise WireError(
            f"a frame of object {frame.objref:#x} has {frame.length} bytes at {frame.offset} of {frame.total}"
        )
    if frame.nrefs > REFS_MAX or (frame.nrefs and frame.offset):
        raise WireError(f"a frame of object {frame.objref:#x} names {frame.nrefs} references at {frame.offset}")
    if frame.status == PUSH and (frame.nrefs or frame.length != frame.total or frame.total > SMALL_BYTES):
        raise WireError(f"object {frame.objref:#x} of {frame.total} bytes is pushed, which is only for small ones")
    return frame


def pack_bundle(entries: list[Entry]) -> bytes:
    """Write a bundle's header and list; the data follow, in the order of the list."""
    table = b"".join([ENTRY.pack(*entry) for entry in entries])
    length = len(table) + sum([entry[4] for entry in entries])
    return pack_frame(Frame(BUNDLE, 0, 0, len(entries), 0, 0, length, 0, length, stream.crc32c(table))) + table


def read_entries(frame: Frame, table: bytearray) -> list[Entry]:
    """Read a bundle's list.

    Raises:
        WireError: it says what cannot be.
        BrokenError: its checksum is wrong.
    """
    if frame.crc != stream.crc32c(table):
        raise BrokenError("a bundle's list was damaged on the way")
    entries = [Entry._make(fields) for fields in ENTRY.iter_unpack(table)]
    sizes = [entry.total for entry in entries]
    if max(sizes) > SMALL_BYTES or sum(sizes) + len(table) != frame.length:
        raise WireError(f"the objects of a bundle of {frame.length} bytes have {sum(sizes)}, one of them {max(sizes)}")
    return entries
