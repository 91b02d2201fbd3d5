"""What the demo computes, against the plain way to compute it."""

import math
from collections import Counter

import numpy as np

from fastrt.cli import demo_work as work


def counts(**words):
    return work.Counts(words=Counter(words), files=1)


def test_find_files_takes_sources_only_in_a_fixed_order(tmp_path):
    for name in ("b.py", "a.py", "Makefile", "picture.png", ".hidden/x.py", "site-packages/y.py", "deep/er/c.rs"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [path[len(str(tmp_path)) + 1 :] for path in work.find_files(str(tmp_path))] == [
        "Makefile",
        "a.py",
        "b.py",
        "deep/er/c.rs",
    ]


def test_count_file_counts_words_and_symbols(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("x = _x1 + X  # x2 3y\n")
    found = work.count_file(str(path))
    assert found.words == {"x": 2, "x1": 1, "x2": 1, "y": 1}
    assert found.symbols == {"=": 1, "+": 1, "#": 1}
    assert (found.files, found.nbytes, found.skipped) == (1, 21, [])


def test_count_file_that_is_missing_says_why(tmp_path):
    path = str(tmp_path / "gone.py")
    assert work.count_file(path).skipped == [(path, "No such file or directory")]


def test_merge_adds_up_and_keeps_its_parts():
    one, two = counts(a=1, b=2), counts(b=3)
    two.skipped = [("x", "binary")]
    total = work.merge(one, two)
    assert (total.words, total.files, total.skipped) == ({"a": 1, "b": 5}, 2, [("x", "binary")])
    assert one.words == {"a": 1, "b": 2}


def test_vocabulary_takes_the_most_frequent_words_and_breaks_ties_by_name(monkeypatch):
    monkeypatch.setattr(work, "TERMS_MAX", 3)
    assert work.vocabulary(counts(d=1, c=2, b=2, a=1), 1) == ["b", "c", "a"]


def test_vocabulary_of_very_many_files_is_smaller(monkeypatch):
    monkeypatch.setattr(work, "MATRIX_BYTES_MAX", 4 * 10 * 2)
    assert work.vocabulary(counts(a=3, b=2, c=1), 10) == ["a", "b"]


def test_scores_are_those_of_the_formula():
    parts = [counts(a=2, b=2), counts(a=1, c=3), counts()]
    terms = ["a", "b", "c"]
    matrix = work.fill_rows(terms, *parts)
    assert matrix.tolist() == [[0.5, 0.5, 0.0], [0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]
    scores = [work.score_terms(matrix, *span) for span in work.slices(3, 2)]
    expected = [0.75 * math.log(3 / 2), 0.5 * math.log(3), 0.75 * math.log(3)]
    np.testing.assert_allclose(np.concatenate(scores), expected)
    assert [term for term, _ in work.top_terms(terms, scores, 2)] == ["c", "b"]


def test_slices_cover_everything_once():
    assert work.slices(5, 2) == [(0, 2), (2, 4), (4, 5)]
    assert work.slices(0, 2) == []
