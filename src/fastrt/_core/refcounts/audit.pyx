# cython: language_level=3
"""A table of reference counts as a whole: check it, save it, and make it again from what was saved.

The caller sees to it that nobody changes the table meanwhile.
"""
from array import array

from fastrt._core.refcounts.refcount import RefTable as _new

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastrt._core.refcounts.refcount cimport NIL, PENDING, RefTable, frt_ref, ref_at


def check_invariants(RefTable table):
    """Raise AssertionError when the table contradicts itself. Takes time and memory in proportion to it."""
    cdef size_t n = table.length + 1
    cdef uint64_t *members = <uint64_t *>calloc(n, 8)
    cdef uint64_t *lives = <uint64_t *>calloc(n, 8)
    cdef unsigned char *seen = <unsigned char *>calloc(n, 1)
    try:
        if members == NULL or lives == NULL or seen == NULL:
            raise MemoryError(f"no memory to check {table.length} references")
        _check_members(table, members, lives)
        _check_rings(table, members, lives)
        _check_chains(table, seen)
    finally:
        free(members)
        free(lives)
        free(seen)


def dump(RefTable table):
    """All that `load` needs, as bytes by name."""
    cdef uint64_t r
    cdef bytes holds = PyBytes_FromStringAndSize(NULL, table.length * 4)
    inside = array("Q")
    for r in range(table.length):
        (<uint32_t *>PyBytes_AS_STRING(holds))[r] = ref_at(table, r).hold
        if ref_at(table, r).contents != NULL:
            held = table.contained(r)
            inside.extend([r, len(held), *held])
    return {
        "counts": table.counts().tobytes(),
        "targets": table.targets().tobytes(),
        "holds": holds,
        "contents": inside.tobytes(),
        "dangling": array("Q", [table.dangling_count]).tobytes(),
    }


def load(saved):
    """The table that `dump` saved.

    Raises:
        ValueError: the data does not fit together.
    """
    cdef bytes counts = saved["counts"], targets = saved["targets"], holds = saved["holds"]
    cdef uint64_t r, target, n = len(counts) // 8
    cdef RefTable table = _new()
    cdef frt_ref *at
    if PyBytes_GET_SIZE(targets) != PyBytes_GET_SIZE(counts) or len(holds) != n * 4:
        raise ValueError(f"Cannot load {n} references: the saved fields are of other numbers.")
    table.add(n)
    for r in range(n):
        at = ref_at(table, r)
        at.count = (<const uint64_t *>PyBytes_AS_STRING(counts))[r]
        at.hold = (<const uint32_t *>PyBytes_AS_STRING(holds))[r]
        at.live = at.count != NIL and (at.count != 0 or at.hold != 0)
        table.freed_count += at.count == NIL
    for r in range(n):
        target = (<const uint64_t *>PyBytes_AS_STRING(targets))[r]
        if target == r:
            ref_at(table, r).target = r
        elif target != NIL and (target >= n or table.merge(r, target) != 0):
            raise ValueError(f"Reference {r} is saved as an alias of {target}, which cannot be.")
    _load_contents(table, saved["contents"])
    table.dangling_count = array("Q", saved["dangling"])[0]
    return table


cdef int _load_contents(RefTable table, bytes data) except -1:
    """Not by `contain`: what it would refuse today, a count dropped by somebody else, was right when it was said."""
    cdef const uint64_t *words = <const uint64_t *>PyBytes_AS_STRING(data)
    cdef uint64_t at = 0, end = len(data) // 8
    while at < end:
        if at + 2 > end or words[at + 1] > end - at - 2 or words[at] >= table.length:
            raise ValueError(f"The saved contents are damaged at word {at}.")
        twice = ref_at(table, words[at]).contents != NULL
        if twice or table.keep_contents(words[at], words + at + 2, words[at + 1]) != 0:
            raise ValueError(f"The saved contents name reference {words[at]} twice, or there is no memory.")
        at += 2 + words[at + 1]
    return 0


cdef int _check_members(RefTable table, uint64_t *members, uint64_t *lives) except -1:
    """Members die together, and the dead hold nothing. Counts each class's members, and those that live."""
    cdef uint64_t r, root, i, freed = 0
    cdef frt_ref *at
    cdef bint dead
    for r in range(table.length):
        root = table.find(r)
        at = ref_at(table, r)
        dead = at.count == NIL
        freed += dead
        assert dead == (ref_at(table, root).count == NIL), f"class of {r} is deallocated in part"
        if dead:
            assert at.hold == 0 and at.contents == NULL, f"{r} is deallocated and holds something"
            continue
        members[root] += 1
        lives[root] += at.count != 0 or at.hold != 0
        if at.contents != NULL:
            for i in range(at.contents.count):
                assert at.contents.refs[i] < table.length, f"{r} contains what was never made"
    assert freed == table.freed_count, f"{table.freed_count} deallocated by count, {freed} by looking"
    return 0


cdef int _check_rings(RefTable table, uint64_t *members, uint64_t *lives) except -1:
    """All members of a class are in one ring, and one of them lives."""
    cdef uint64_t r, root, steps
    for root in range(table.length):
        if members[root] == 0:
            continue
        live = ref_at(table, root).live
        assert lives[root] == live, f"{root}: {live} live, {lives[root]} by looking"
        assert lives[root] > 0, f"class {root} is not counted and not deallocated"
        r, steps = ref_at(table, root).next, 1
        while r != root and steps <= members[root]:
            assert table.find(r) == root, f"{r} is in the ring of {root} and not in its class"
            r, steps = ref_at(table, r).next, steps + 1
        assert r == root and steps == members[root], f"the ring of {root} has not its {members[root]} members"
    return 0


cdef int _check_chains(RefTable table, unsigned char *seen) except -1:
    """Every chain of aliases ends, at its class's end; only ends are ready, and what is resolved is not pending."""
    cdef uint64_t r, at, target
    for r in range(table.length):
        at = r
        while seen[at] == 0 and ref_at(table, at).target != NIL and ref_at(table, at).target != at:
            seen[at] = 1
            target = ref_at(table, at).target
            assert target < table.length, f"{at} is an alias of what was never made"
            assert table.find(at) == table.find(target), f"{at} and its target {target} are of two classes"
            at = target
        assert seen[at] != 1, f"the aliases of {r} go round"
        if seen[at] == 0:
            assert ref_at(table, table.find(at)).end == at, f"the chain of {r} ends at {at}, not at its class's end"
        seen[at] = 2
        if ref_at(table, r).target != NIL:
            assert ref_at(table, r).hold & PENDING == 0, f"{r} is resolved and waits for a producer"
        at = r
        while seen[at] == 1:
            seen[at] = 2
            at = ref_at(table, at).target
    return 0
