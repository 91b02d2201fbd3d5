"""The choice of the values to spill: those that lie beside each other, and leave one piece of memory when they go.

A value needs memory in one piece. Spilling the least recently used values frees memory in many places, and a large
value may find no room after all of them have gone. So the memory is read by address: free runs, values that can be
spilled, and gaps, which stay. Each window without a gap that is large enough has a price; the values in the cheapest
one go. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PAGE = 1 << 14  # the arena allocates large values in such pages
FILE_BYTES = 1 << 16  # a file costs as much as writing so many bytes
RECENT = 3.0  # price of a byte of the most recently used values; that of the least recently used ones is 1
COPY = 0.125  # price of a byte of a copy, which is dropped and not written
AHEAD_SHARE = 32  # part of the store that one round frees at least, so that small values do not ask for a round each
AHEAD_MOST = 64 << 20


class Candidate(NamedTuple):
    """A value that can be spilled now, as `spill.candidates` lists it."""

    used: int
    nbytes: int
    offset: int
    entry: int
    objref: int


class Piece(NamedTuple):
    """Memory that is free, or is when its value has gone."""

    offset: int
    nbytes: int
    price: float
    value: Candidate | None


def choose(
    candidates: Sequence[tuple[int, int, int, int, int]],
    free: Sequence[tuple[int, int]],
    wanted: int,
    store_bytes: int,
) -> list[Candidate] | None:
    """Choose the values to spill, so that `wanted` bytes in one piece are free.

    Args:
        candidates: from `spill.candidates`, least recently used first.
        free: from `spill.free_runs`.
        wanted: bytes.
        store_bytes: size of the store.
    Returns:
        The values by address, and more than are needed for a small `wanted`; none if there is such a piece already.
        None if there is not even if all values are spilled.
    """
    pieces = priced([Candidate(*row) for row in candidates], free)
    exact = -(-max(wanted, 1) // PAGE) * PAGE
    window = cheapest(pieces, exact)
    if window is None or not any(piece.value for piece in window):
        return None if window is None else []
    ahead = min(store_bytes // AHEAD_SHARE, AHEAD_MOST)
    if exact < ahead:
        window = cheapest(pieces, ahead) or window
    return [piece.value for piece in window if piece.value is not None]


def priced(candidates: Sequence[Candidate], free: Sequence[tuple[int, int]]) -> list[Piece]:
    """List the free and the spillable memory by address, each piece with its price."""
    pieces = [Piece(offset, nbytes, 0.0, None) for offset, nbytes in free]
    times = sorted({row.used for row in candidates if row.used >= 0})
    step = (RECENT - 1) / max(1, len(times) - 1)
    factor = {used: 1 + k * step for k, used in enumerate(times)}
    for row in candidates:
        price = row.nbytes * COPY if row.used < 0 else row.nbytes * factor[row.used] + FILE_BYTES
        pieces.append(Piece(row.offset, row.nbytes, price, row))
    pieces.sort()
    return pieces


def cheapest(pieces: Sequence[Piece], wanted: int) -> list[Piece] | None:
    """Find the cheapest row of pieces without a gap that has `wanted` bytes; None if there is none."""
    first = best_first = best_last = end = 0
    nbytes, price, best = 0, 0.0, float("inf")
    for last, piece in enumerate(pieces):
        if piece.offset != end:
            first, nbytes, price = last, 0, 0.0
        end = piece.offset + piece.nbytes
        nbytes += piece.nbytes
        price += piece.price
        while nbytes - pieces[first].nbytes >= wanted:  # prices are not below 0: a shorter window is never dearer
            nbytes -= pieces[first].nbytes
            price -= pieces[first].price
            first += 1
        if nbytes >= wanted and price < best:
            best, best_first, best_last = price, first, last
    return None if best == float("inf") else list(pieces[best_first : best_last + 1])
