"""Map and reduce with a shuffle between: the most frequent pairs of neighbouring words in generated text.

Run: python examples/word_shuffle.py [--engine fastrt|local|ray|ray-itself] [--size N]

A mapper counts pairs of neighbours in one piece of text and returns one part for each reducer, as so many results; a
reducer adds up its parts of all mappers, and is submitted before any mapper has ended: its arguments are references. No
pair goes through the driver. The result is compared with one count over all of the text.
"""

import random
import zlib
from collections import Counter
from itertools import pairwise

from engines import run

WORDS = [a + b for a in ("ba", "co", "di", "fu", "ga", "he", "ki") for b in ("l", "m", "n", "r", "s", "t")]
REDUCERS = 5
MOST = 10
WORDS_IN_PIECE = 5000


def piece_of_text(number, words):
    """Text whose words follow each other unevenly; the same for the same number."""
    made = random.Random(number)
    return " ".join(WORDS[int(made.paretovariate(0.7)) % len(WORDS)] for _ in range(words))


def neighbours(text):
    words = text.split()
    return Counter(pairwise(words))


def map_piece(number, words):
    """Counts of pairs, one dict for each reducer."""
    parts = [{} for _ in range(REDUCERS)]
    for pair, count in neighbours(piece_of_text(number, words)).items():
        parts[zlib.crc32(" ".join(pair).encode()) % REDUCERS][pair] = count
    return parts


def reduce_parts(*parts):
    """The most frequent pairs of one reducer's share."""
    total = Counter()
    for part in parts:
        total.update(part)
    return ranked(total)


def ranked(counts):
    return sorted(((count, pair) for pair, count in counts.items()), reverse=True)[:MOST]


def main(ray, size):
    """The most frequent pairs of neighbours and their counts.

    Args:
        ray: the module: fastrt or Ray.
        size: pieces of text.
    """
    mapper = ray.remote(num_returns=REDUCERS)(map_piece)
    reducer = ray.remote(reduce_parts)
    parts = [mapper.remote(number, WORDS_IN_PIECE) for number in range(size)]
    reduced = ray.get([reducer.remote(*share) for share in zip(*parts, strict=True)])
    del parts
    best = sorted((row for rows in reduced for row in rows), reverse=True)[:MOST]
    return [[count, *pair] for count, pair in best]


def check(result, size):
    """Compare with one count over the whole text."""
    total = Counter()
    for number in range(size):
        total.update(neighbours(piece_of_text(number, WORDS_IN_PIECE)))
    assert result == [[count, *pair] for count, pair in ranked(total)]


if __name__ == "__main__":
    run(main, check, size=40)
