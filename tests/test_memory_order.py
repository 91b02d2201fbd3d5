"""docs/memory_order.md names every word that the core accesses with less than sequential consistency, and how."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/memory_order.md"
CALL = re.compile(r"\ba(?:8|16|32|64)_([a-z]+_(?:rlx|acq|rel))\(")


def accesses(text):
    """Words, by the last name of the address, with their accesses: `&x.entries[i].objref` is objref."""
    for match in CALL.finditer(text):
        depth, end = 1, match.end()
        while depth and not (depth == 1 and text[end] == ","):
            depth += (text[end] in "([") - (text[end] in ")]")
            end += 1
        address = text[match.end() : end].removesuffix(")" if depth == 0 else ",").strip()
        if re.match(r"(?:const )?u?int\d+_t\b", address):
            continue  # the declaration
        inside = 1
        while inside:  # casts, arguments and indexes
            address, inside = re.subn(r"\([^()]*\)|\[[^\[\]]*\]", "", address)
        address = address.lstrip("&")
        yield re.split(r"\.|->", address.split("+")[0].strip())[-1].lstrip("_"), match[1]


def in_the_core():
    found = {}
    for path in sorted((ROOT / "src/fastrt/_core").rglob("*")):
        if path.suffix in (".pyx", ".pxd", ".h") and path.name != "atomic.h":
            for word, access in accesses(path.read_text()):
                found.setdefault(word, set()).add(access)
    return found


def on_the_page():
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    return [(re.findall(r"`(\w+)`", words), set(how.split(", ")), why) for words, how, why in rows]


def test_every_word_has_one_reason():
    named = [word for words, _, _ in on_the_page() for word in words]
    assert len(named) == len(set(named))
    assert set(named) == set(in_the_core())
    assert all(len(why) > 20 for _, _, why in on_the_page())


def test_accesses_are_those_of_the_page():
    found = in_the_core()
    assert sum(map(len, found.values())) > 60
    for words, how, _ in on_the_page():
        assert set.union(*(found[word] for word in words)) == how, words


def test_an_access_is_found_in_any_form():
    text = "a64_store_rel(&x.entries[f(i, 2)].odd, 1)\na32_load_acq(frt_thing(x, i))\na8_load_rlx(const uint8_t *p)\n"
    text += "a64_load_acq(x.task_words + r.t); a64_store_rel((uint64_t *)&r->end, y); a32_load_acq(_owner(x, b(1), 0))"
    expected = [("odd", "store_rel"), ("frt_thing", "load_acq"), ("task_words", "load_acq"), ("end", "store_rel")]
    assert list(accesses(text)) == [*expected, ("owner", "load_acq")]
