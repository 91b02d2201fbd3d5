"""The computation of `fastrt demo`: words and symbols of source files, and the terms that distinguish files.

These are plain functions without tasks: the demo calls the same functions in worker processes and, for the comparison,
one after the other in its own process. Counts are integers and every sum runs in one fixed order, so both ways must
give equal results, to the last bit.
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SUFFIXES = frozenset(
    {
        ".bash", ".bat", ".c", ".cc", ".cfg", ".clj", ".cmake", ".cpp", ".cs", ".css", ".cu", ".cxx", ".dart", ".el",
        ".erl", ".ex", ".f90", ".go", ".h", ".hh", ".hpp", ".hs", ".html", ".hxx", ".ini", ".ipynb", ".java", ".jl",
        ".js", ".json", ".jsx", ".kt", ".l", ".lisp", ".lua", ".m", ".md", ".ml", ".mli", ".pl", ".pm", ".proto",
        ".ps1", ".pxd", ".pxi", ".py", ".pyi", ".pyx", ".r", ".rb", ".rs", ".rst", ".s", ".scala", ".scss", ".sh",
        ".sql", ".swift", ".tcl", ".toml", ".ts", ".tsx", ".txt", ".v", ".vhd", ".vim", ".xml", ".y", ".yaml", ".yml",
        ".zig", ".zsh",
    }
)  # fmt: skip
NAMES = frozenset({"Makefile", "Dockerfile", "CMakeLists.txt", "GNUmakefile"})
# Folders that hold no sources of the tree itself: caches, and packages installed below a standard library.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})
TERMS_MAX = 4096  # columns of the matrix: the words that occur most often
MATRIX_BYTES_MAX = 256 << 20  # fewer columns for very many files
SLICE_TERMS = 512  # columns of one tf-idf task
ROWS_FILES = 64  # rows of one task that fills a part of the matrix
FAN_IN = 16  # parts of one merge

_WORD = re.compile(r"[^\W\d_]\w*")
_SYMBOL = re.compile(r"[^\w\s]")


@dataclass
class Counts:
    """Counts of some files, in the order of their names.

    Attributes:
        words, symbols: how often each occurs, words in lower case.
        files, nbytes: number and total size of the counted files.
        skipped: (path, reason) of the other files.
    """

    words: Counter[str] = field(default_factory=Counter)
    symbols: Counter[str] = field(default_factory=Counter)
    files: int = 0
    nbytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def find_files(path: str) -> list[str]:
    """List the source files below a folder, or the one file that `path` names.

    Args:
        path: of a folder, or of a single file, which may have any name.
    Returns:
        Paths in a fixed order. Hidden folders, caches and installed packages are skipped, links to folders are
        not followed, and only regular files are listed, because reading a pipe would never end.
    """
    return [path] if os.path.isfile(path) else list(_walk(path))


def _walk(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return  # the folder is not readable, or was removed meanwhile
    for entry in listed:
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith(".") and entry.name not in SKIPPED_FOLDERS:
                yield from _walk(entry.path)
        elif entry.is_file() and (os.path.splitext(entry.name)[1].lower() in SUFFIXES or entry.name in NAMES):
            yield entry.path


def count_file(path: str) -> Counts:
    """Count the words and symbols of one file.

    Args:
        path: of the file.
    Returns:
        Its counts; for a file that cannot be read or is not text, the reason in `skipped`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as exc:
        return Counts(skipped=[(path, exc.strerror or type(exc).__name__)])
    if b"\0" in data:
        return Counts(skipped=[(path, "binary")])
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")  # old sources; this accepts every byte
    return Counts(
        words=Counter(_WORD.findall(text.lower())), symbols=Counter(_SYMBOL.findall(text)), files=1, nbytes=len(data)
    )


def merge(*parts: Counts) -> Counts:
    """Add up counts."""
    total = Counts()
    for part in parts:
        total.words.update(part.words)
        total.symbols.update(part.symbols)
        total.files += part.files
        total.nbytes += part.nbytes
        total.skipped += part.skipped
    return total


def vocabulary(total: Counts, rows: int) -> list[str]:
    """Choose the terms of a matrix of `rows` rows: the most frequent words, ties in alphabetical order."""
    columns = min(TERMS_MAX, MATRIX_BYTES_MAX // (4 * max(1, rows)))
    return [word for word, _ in heapq.nsmallest(columns, total.words.items(), key=lambda item: (-item[1], item[0]))]


def fill_rows(terms: Sequence[str], *parts: Counts) -> Any:
    """Fill the rows of some files.

    Args:
        terms: the matrix's columns.
        parts: counts of one file each.
    Returns:
        float32[len(parts), len(terms)]: each term's share of all words of the file.
    """
    rows = np.zeros((len(parts), len(terms)), np.float32)
    columns = {term: column for column, term in enumerate(terms)}
    for k, part in enumerate(parts):
        known = [(columns[word], count) for word, count in part.words.items() if word in columns]
        if known:
            at, counts = zip(*known, strict=True)
            rows[k, list(at)] = counts
            rows[k] /= part.words.total()
    return rows


def score_terms(matrix: Any, start: int, stop: int) -> Any:
    """Score a slice of the terms by tf-idf: frequent in some files, absent from others.

    Args:
        matrix: float32[files, terms], as `fill_rows` makes it.
        start, stop: the range of columns to score.
    Returns:
        float64[stop - start]: the sum over all files of tf * log(files / files with the term).
    Source:
        K. Sparck Jones, "A statistical interpretation of term specificity and its application in retrieval", 1972.
    """
    part = matrix[:, start:stop]
    having = np.count_nonzero(part, axis=0)
    idf = np.log(matrix.shape[0] / np.maximum(having, 1))
    return part.sum(axis=0, dtype=np.float64) * idf


def top_terms(terms: Sequence[str], scores: Sequence[Any], count: int) -> list[tuple[str, float]]:
    """Choose the terms with the highest scores.

    Args:
        terms: all terms.
        scores: of the slices of terms, in their order.
        count: how many to choose.
    Returns:
        (term, score), the highest first; fewer if there are fewer terms.
    """
    joined = [float(score) for part in scores for score in part]
    ranked = sorted(zip(terms, joined, strict=True), key=lambda item: (-item[1], item[0]))
    return ranked[:count]


def slices(length: int, size: int) -> list[tuple[int, int]]:
    """Cut range(length) into pieces of `size`, the last one shorter."""
    return [(k * size, min(length, (k + 1) * size)) for k in range(math.ceil(length / size))]
