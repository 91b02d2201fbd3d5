# cython: language_level=3, freethreading_compatible=True
"""Check a whole table of reference counts, save it, and load it again.

The caller ensures that no thread changes the table meanwhile.
"""
from array import array

from fastrt._core.refcounts.refcount import RefTable as _new

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from fastrt._core.refcounts.refcount cimport BLOCK_BITS, NIL, PENDING, RefTable, frt_ref, ref_at


def check_invariants(RefTable table):
    """Raise AssertionError if the table contradicts itself. Takes time and memory in proportion to its size."""
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
    """The table's contents as bytes by name, for `load`. Forgotten references take no room."""
    cdef uint64_t r, block, i = 0
    kept = [block for block in range(table.block_count) if table.is_kept(block)]
    cdef uint64_t n = 0
    for block in kept:
        n += min(<uint64_t>1 << BLOCK_BITS, table.length - (block << BLOCK_BITS))
    cdef bytes counts = PyBytes_FromStringAndSize(NULL, n * 8), targets = PyBytes_FromStringAndSize(NULL, n * 8)
    cdef bytes holds = PyBytes_FromStringAndSize(NULL, n * 4)
    inside = array("Q")
    for block in kept:
        for r in range(block << BLOCK_BITS, min(table.length, (block + 1) << BLOCK_BITS)):
            (<uint64_t *>PyBytes_AS_STRING(counts))[i] = ref_at(table, r).count
            (<uint64_t *>PyBytes_AS_STRING(targets))[i] = ref_at(table, r).target
            (<uint32_t *>PyBytes_AS_STRING(holds))[i] = ref_at(table, r).hold
            i += 1
            if ref_at(table, r).contents != NULL:
                held = table.contained(r)
                inside.extend([r, len(held), *held])
    saved = {
        "counts": counts,
        "targets": targets,
        "holds": holds,
        "contents": inside.tobytes(),
        "dangling": array("Q", [table.dangling_count]).tobytes(),
    }
    if len(kept) < table.block_count:
        saved["kept"] = array("Q", [table.length, *kept]).tobytes()
    return saved


def load(saved):
    """Make a table from the data of `dump`.

    Raises:
        ValueError: the data is inconsistent.
    """
    cdef bytes counts = saved["counts"], targets = saved["targets"], holds = saved["holds"]
    cdef uint64_t r, target, i = 0, n = len(counts) // 8
    cdef RefTable table = _new()
    cdef frt_ref *at
    if PyBytes_GET_SIZE(targets) != PyBytes_GET_SIZE(counts) or len(holds) != n * 4:
        raise ValueError(f"Cannot load {n} references: the saved fields have different lengths.")
    refs = _make_blocks(table, saved.get("kept"), n)
    for r in refs:
        at = ref_at(table, r)
        at.count = (<const uint64_t *>PyBytes_AS_STRING(counts))[i]
        at.hold = (<const uint32_t *>PyBytes_AS_STRING(holds))[i]
        at.live = at.count != NIL and (at.count != 0 or at.hold != 0)
        table.freed_count += at.count == NIL
        table.block_alive[r >> BLOCK_BITS] -= at.count == NIL
        i += 1
    i = 0
    for r in refs:
        target = (<const uint64_t *>PyBytes_AS_STRING(targets))[i]
        i += 1
        if target == r:
            ref_at(table, r).target = r
        elif target != NIL and (not _is_here(table, target) or table.merge(r, target) != 0):
            raise ValueError(f"Reference {r} is saved as an alias of {target}, which cannot be its target.")
    _load_contents(table, saved["contents"])
    table.dangling_count = array("Q", saved["dangling"])[0]
    table.forget()  # of a table that was saved with its dead references
    return table


cdef _make_blocks(RefTable table, kept, uint64_t n):
    """Make the references of a saved table, as pending; returns the numbers of those that are not forgotten."""
    cdef uint64_t block, length
    if kept is None:
        table.add(n)
        return range(n)
    length, *blocks = array("Q", kept)
    refs = []
    for block in blocks:
        if block << BLOCK_BITS >= length:
            raise ValueError(f"A saved table of {length} references has block {block}.")
        while table.length < block << BLOCK_BITS:
            table.add_forgotten()
        first = table.add(min(<uint64_t>1 << BLOCK_BITS, length - (block << BLOCK_BITS)))
        if first != block << BLOCK_BITS:
            raise ValueError(f"A saved table has block {block} out of order.")
        refs += range(first, table.length)
    while table.length < length:
        table.add_forgotten()
    if len(refs) != n or table.length != length:
        raise ValueError(f"A saved table of {length} references has {n} of the {len(refs)} that it keeps.")
    return refs


cdef bint _is_here(RefTable table, uint64_t ref):
    return ref < table.length and table.is_kept(ref >> BLOCK_BITS)


cdef int _load_contents(RefTable table, bytes data) except -1:
    """Restore the contents. Not by `contain`: it would reject references whose count a client dropped since then."""
    cdef const uint64_t *words = <const uint64_t *>PyBytes_AS_STRING(data)
    cdef uint64_t at = 0, end = len(data) // 8
    while at < end:
        if at + 2 > end or words[at + 1] > end - at - 2 or not _is_here(table, words[at]):
            raise ValueError(f"The saved contents are damaged at word {at}.")
        twice = ref_at(table, words[at]).contents != NULL
        if twice or table.keep_contents(words[at], words + at + 2, words[at + 1]) != 0:
            raise ValueError(f"The saved contents name reference {words[at]} twice, or there is no memory for them.")
        at += 2 + words[at + 1]
    return 0


cdef int _check_members(RefTable table, uint64_t *members, uint64_t *lives) except -1:
    """Check that members die together, and that dead ones hold nothing. Counts members and live members by class."""
    cdef uint64_t r, root, i, freed = 0
    cdef frt_ref *at
    cdef bint dead
    alive = [0] * table.block_count
    for r in range(table.length):
        at = ref_at(table, r)
        dead = at.count == NIL
        freed += dead
        if dead:
            assert at.hold == 0 and at.contents == NULL, f"{r} is deallocated and holds something"
            continue
        root = table.find(r)
        assert ref_at(table, root).count != NIL, f"class of {r} is deallocated in part"
        alive[r >> BLOCK_BITS] += 1
        members[root] += 1
        lives[root] += at.count != 0 or at.hold != 0
        if at.contents != NULL:
            for i in range(at.contents.count):
                assert at.contents.refs[i] < table.length, f"{r} contains a reference that was never made"
    assert freed == table.freed_count, f"{freed} references are deallocated, the counter says {table.freed_count}"
    for r in range(table.block_count):
        assert alive[r] == table.block_alive[r], f"block {r} has {alive[r]} live references"
        is_dead = alive[r] == 0 and (r + 1) << BLOCK_BITS <= table.length
        assert is_dead == (not table.is_kept(r)), f"block {r} is dead and kept, or the reverse"
    return 0


cdef int _check_rings(RefTable table, uint64_t *members, uint64_t *lives) except -1:
    """Check that all members of a class are in one ring, and that one of them lives."""
    cdef uint64_t r, root, steps
    for root in range(table.length):
        if members[root] == 0:
            continue
        live = ref_at(table, root).live
        assert lives[root] == live, f"class {root} has {lives[root]} live members, the counter says {live}"
        assert lives[root] > 0, f"class {root} has no live member and is not deallocated"
        r, steps = ref_at(table, root).next, 1
        while r != root and steps <= members[root]:
            assert table.find(r) == root, f"{r} is in the ring of {root} and not in its class"
            r, steps = ref_at(table, r).next, steps + 1
        assert r == root and steps == members[root], f"the ring of {root} does not have its {members[root]} members"
    return 0


cdef int _check_chains(RefTable table, unsigned char *seen) except -1:
    """Check that each chain of aliases ends at its class's end, and that only references without a target are pending.
    """
    cdef uint64_t r, at, target
    for r in range(table.length):
        if ref_at(table, r).count == NIL:
            continue
        at = r
        while seen[at] == 0 and ref_at(table, at).target != NIL and ref_at(table, at).target != at:
            seen[at] = 1
            target = ref_at(table, at).target
            assert target < table.length, f"{at} is an alias of a reference that was never made"
            assert table.find(at) == table.find(target), f"{at} and its target {target} are in two classes"
            at = target
        assert seen[at] != 1, f"the aliases of {r} form a circle"
        if seen[at] == 0:
            assert ref_at(table, table.find(at)).end == at, f"the chain of {r} ends at {at}, not at its class's end"
        seen[at] = 2
        if ref_at(table, r).target != NIL:
            assert ref_at(table, r).hold & PENDING == 0, f"{r} has a target and a pending producer"
        at = r
        while seen[at] == 1:
            seen[at] = 2
            at = ref_at(table, at).target
    return 0
