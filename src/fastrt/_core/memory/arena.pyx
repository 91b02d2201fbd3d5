# cython: language_level=3, freethreading_compatible=True
"""The allocator: blocks of 256 bytes to 8 KiB in slab pages of 16 KiB, runs of pages above that.

Two kinds of words decide everything: the page words (kind and length of each run of pages) and the owner words
(the entry or task that a block belongs to). Both lie outside the payload, where no overrun reaches them. The home
word (the offset in the owner's record) is stored before the owner word commits, so after a death a block and its
record either name each other or the block is free. Bins of free runs, slab lists and bitmaps are derived.

An allocation takes the lowest address of the best bin, so a steady state stays in pages that are already mapped:
a fresh page costs twelve times as much as a copy into a warm one. Single pages (slabs, and values that are too small
to be spilled) go to the low end of the memory, and to its high end when that is full. Longer runs take the low end
last. A page between them that cannot be emptied would divide the room for large values.
"""
from libc.stdint cimport uint32_t, uint64_t

from fastrt._core.memory.clients cimport Client
from fastrt._core.memory.errors cimport check
from fastrt._core.memory.layout cimport *
from fastrt._core.memory.segment cimport segment_commit, segment_discard, segment_room

cdef enum:
    COMMIT_FIRST_BYTES = 4 << 20

cdef extern from * nogil:
    """
    static inline int frt_log2(uint32_t v) { return 31 - __builtin_clz(v | 1); }
    """
    int frt_log2(uint32_t) noexcept


cdef inline uint32_t _pages_of(uint64_t word) noexcept nogil:
    return <uint32_t>word


cdef inline uint32_t *_owner(frt_ctx *x, uint32_t page, uint32_t block) noexcept nogil:
    return x.owners + <uint64_t>page * FRT_BLOCKS_PER_PAGE + block


cdef inline uint32_t _page_at(frt_ctx *x, uint64_t offset) noexcept nogil:
    return <uint32_t>((offset - x.payload_offset) >> FRT_PAGE_SHIFT)


# ---- lists of pages (bins of free runs, slabs with room): derived, doubly linked through x.links ----

cdef void _list_add(frt_ctx *x, uint32_t *head, uint32_t page) noexcept nogil:
    x.links[page].next = head[0]
    x.links[page].prev = FRT_NONE
    x.links[page].listed = 1
    if head[0] != FRT_NONE and head[0] >= x.pages_max:
        frt_broken(x, "a list of pages is damaged")
    elif head[0] != FRT_NONE:
        x.links[head[0]].prev = page
    head[0] = page


cdef void _list_remove(frt_ctx *x, uint32_t *head, uint32_t page) noexcept nogil:
    cdef uint32_t after = x.links[page].next
    cdef uint32_t before = x.links[page].prev
    if after != FRT_NONE and after >= x.pages_max or before != FRT_NONE and before >= x.pages_max:
        frt_broken(x, "a list of pages is damaged")
        return
    x.links[page].listed = 0
    if before == FRT_NONE:
        head[0] = after
    else:
        x.links[before].next = after
    if after != FRT_NONE:
        x.links[after].prev = before


# ---- runs of pages, under the extent lock ----

cdef void _bin_add(frt_ctx *x, uint32_t page, uint32_t n) noexcept nogil:
    x.links[page + n - 1].back = page
    _list_add(x, &x.sb.bin_head[frt_log2(n)], page)


cdef void _bin_remove(frt_ctx *x, uint32_t page) noexcept nogil:
    _list_remove(x, &x.sb.bin_head[frt_log2(_pages_of(x.pages[page]))], page)


cdef void _rebuild_bins(frt_ctx *x) noexcept nogil:
    """Rebuild the bins by a walk over the runs. Valid after a death at any instruction: each step commits one word.

    A run in use whose owner word is 0 was being freed or allocated: the owner word is cleared before the page word
    says FREE, and set after it says RUN.
    """
    cdef uint32_t page = 0
    cdef uint32_t last_free = FRT_NONE
    cdef uint32_t n
    cdef uint64_t used = 0
    for b in range(FRT_BINS):
        x.sb.bin_head[b] = FRT_NONE
    while page < frt_pages(x):
        n = _pages_of(x.pages[page])
        if n == 0 or n > frt_pages(x) - page:
            frt_broken(x, "a run of pages has an impossible length")
            break
        if (x.pages[page] >> 56) == <uint64_t>FRT_PAGE_RUN and _owner(x, page, 0)[0] == 0:
            a64_store_rel(x.pages + page, frt_page_word(FRT_PAGE_FREE, 0, n))
        if (x.pages[page] >> 56) != <uint64_t>FRT_PAGE_FREE:
            used += n
            last_free = FRT_NONE
        elif last_free != FRT_NONE:
            _bin_remove(x, last_free)
            a64_store_rel(x.pages + last_free, frt_page_word(FRT_PAGE_FREE, 0, page + n - last_free))
            _bin_add(x, last_free, page + n - last_free)
        else:
            last_free = page
            _bin_add(x, page, n)
        page += n
    x.sb.used_pages = used


cdef int _lock_extent(frt_ctx *x) noexcept nogil:
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_EXTENT)
    if rc == FRT_LOCK_ORPHANED:
        _rebuild_bins(x)
        frt_lock_mend(x.locks + FRT_LOCK_EXTENT)
        return FRT_OK
    return rc


cdef inline uint32_t _low_end(frt_ctx *x) noexcept nogil:
    """The first page behind the low end, which takes at most a quarter of the memory of a young store."""
    cdef uint32_t most = FRT_COMMIT_BYTES >> FRT_PAGE_SHIFT >> 2
    return x.pages_max >> 6 if x.pages_max >> 6 < most else most


cdef uint32_t _lowest_fit(frt_ctx *x, int b, uint32_t n, uint32_t first, uint32_t end, uint32_t most) noexcept nogil:
    """The lowest run with n pages from `first` on, among those before `end` and the first `most` of a bin; FRT_NONE."""
    cdef uint32_t best = FRT_NONE
    cdef uint32_t page = x.sb.bin_head[b]
    while page != FRT_NONE and most:
        if page >= x.pages_max:
            frt_broken(x, "a list of free runs is damaged")
            return FRT_NONE
        if page < best and page < end and \
                <uint64_t>page + _pages_of(x.pages[page]) >= <uint64_t>(page if page > first else first) + n:
            best = page
        page = x.links[page].next
        most -= 1
    return best


cdef uint32_t _find_run(frt_ctx *x, uint32_t n, uint32_t first, uint32_t end) noexcept nogil:
    """A free run before page `end` that has n pages from page `first` on, or FRT_NONE.

    A run of a higher bin is long enough. The runs of the bin for n itself may all be too short, so that bin is searched
    to its end only when no higher bin has a run.
    """
    cdef int own = frt_log2(n)
    cdef uint32_t best
    for b in range(own, frt_log2(x.pages_max) + 1):
        best = _lowest_fit(x, b, n, first, end, 32 if n > 1 else 4)
        if best != FRT_NONE:
            return best
    return _lowest_fit(x, own, n, first, end, x.pages_max) if n > 1 else FRT_NONE


cdef uint32_t _highest_run(frt_ctx *x) noexcept nogil:
    """The free run with the highest address among the first ones of all bins, or FRT_NONE."""
    cdef uint32_t page, best = FRT_NONE
    cdef int left
    for b in range(frt_log2(x.pages_max) + 1):
        page, left = x.sb.bin_head[b], 2
        while page < x.pages_max and left:
            if best == FRT_NONE or page > best:
                best = page
            page = x.links[page].next
            left -= 1
    return best


cdef int _take_run(frt_ctx *x, uint32_t n, int kind, uint32_t cls, uint32_t owner, uint64_t *home) noexcept nogil:
    """Take n pages from a free run: the page index, or FRT_GROW. `home` may be NULL (slab pages)."""
    cdef uint32_t page, have, before = 0
    cdef uint32_t low = _low_end(x)
    cdef int rc = _lock_extent(x)
    if rc != FRT_OK:
        return rc
    page = _find_run(x, n, 0, low) if n == 1 else _find_run(x, n, low, FRT_NONE)
    if page != FRT_NONE:
        have = _pages_of(x.pages[page])
        before = low - page if n > 1 and page < low else 0
    elif n == 1:
        page = _highest_run(x)
        have = _pages_of(x.pages[page]) if page != FRT_NONE else 0
        before = have - 1
    else:
        page = _find_run(x, n, 0, FRT_NONE)
        have = _pages_of(x.pages[page]) if page != FRT_NONE else 0
    if page == FRT_NONE:
        rc = FRT_GROW
    elif page >= frt_pages(x) or have < n or have > frt_pages(x) - page or \
            (x.pages[page] >> 56) != <uint64_t>FRT_PAGE_FREE:
        rc = frt_broken(x, "a free run has an impossible length")
    if rc != FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_EXTENT)
        return rc
    _bin_remove(x, page)
    have -= before
    page += before
    if have > n:
        # The rest's page word is not read until the next store shortens the run before it.
        a64_store_rel(x.pages + page + n, frt_page_word(FRT_PAGE_FREE, 0, have - n))
    a64_store_rel(x.pages + page, frt_page_word(kind, cls, n))
    if before:
        a64_store_rel(x.pages + page - before, frt_page_word(FRT_PAGE_FREE, 0, before))  # now both others are read
    if home != NULL:
        # Until the commit the run has no owner, and a rebuild frees it: no free page ever has an owner word.
        home[0] = x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT)
        a32_store_rel(_owner(x, page, 0), owner)  # commit
    if before:
        _bin_add(x, page - before, before)
    if have > n:
        _bin_add(x, page + n, have - n)
    x.sb.used_pages += n
    frt_lock_give(x.locks + FRT_LOCK_EXTENT)
    return <int>page


cdef void _free_run_locked(frt_ctx *x, uint32_t page) noexcept nogil:
    """Free the run at `page` and join it with free neighbours; one store of a page word commits each step."""
    cdef uint32_t n = _pages_of(x.pages[page])
    cdef uint32_t other
    cdef uint32_t end = frt_pages(x)
    if n == 0 or page >= end or n > end - page:
        frt_broken(x, "a run of pages has an impossible length")
        return
    a64_store_rel(x.pages + page, frt_page_word(FRT_PAGE_FREE, 0, n))  # commit
    x.sb.used_pages -= n
    other = page + n
    if other < end and (x.pages[other] >> 56) == <uint64_t>FRT_PAGE_FREE and _pages_of(x.pages[other]) <= end - other:
        _bin_remove(x, other)
        n += _pages_of(x.pages[other])
        a64_store_rel(x.pages + page, frt_page_word(FRT_PAGE_FREE, 0, n))
    if page > 0:
        # `back` is only a hint: it is used if a free run starts there and ends right before `page`.
        other = x.links[page - 1].back
        if other < page and (x.pages[other] >> 56) == <uint64_t>FRT_PAGE_FREE and x.links[other].listed \
                and _pages_of(x.pages[other]) == page - other:
            _bin_remove(x, other)
            n += page - other
            a64_store_rel(x.pages + other, frt_page_word(FRT_PAGE_FREE, 0, n))
            a64_store_rel(x.pages + page, 0)
            page = other
    _bin_add(x, page, n)


cdef int arena_grow(frt_ctx *x, uint32_t seen, uint64_t most) noexcept nogil:
    """Commit up to `most` bytes more of the payload: less at the end, or if /dev/shm has less. FRT_FULL if it has none.

    Nothing happens if more than the `seen` pages are committed by now: another client has grown the arena.
    A call makes one step, so that the lock is never held for longer: the kernel makes fresh shared pages at about
    1 GB/s.
    """
    cdef frt_superblock *sb = x.sb
    cdef uint64_t first, n, o, room
    cdef int rc = frt_lock_take(x.locks + FRT_LOCK_GROW)
    if rc == FRT_LOCK_ORPHANED:
        frt_lock_mend(x.locks + FRT_LOCK_GROW)  # an unfinished fallocate is repeated below
    elif rc < 0:
        return rc
    first = frt_pages(x)
    n = most >> FRT_PAGE_SHIFT
    if n > x.pages_max - first:
        n = x.pages_max - first
    # When /dev/shm is almost full the rest is kept for the tables: values without records are useless.
    room = segment_room(x.fd)
    if n > (room >> FRT_PAGE_SHIFT):
        n = room >> FRT_PAGE_SHIFT
    if n == 0 or first != seen:
        frt_lock_give(x.locks + FRT_LOCK_GROW)
        return FRT_FULL if first == seen else FRT_OK
    o = FRT_BLOCKS_PER_PAGE * 4
    rc = FRT_FULL
    while rc != FRT_OK and n:
        rc = segment_commit(x, <char *>(x.pages + first) - x.base, n * 8)
        rc = rc or segment_commit(x, <char *>(x.links + first) - x.base, n * sizeof(frt_page_link))
        rc = rc or segment_commit(x, <char *>(x.bits + first) - x.base, n * 8)
        rc = rc or segment_commit(x, <char *>x.owners - x.base + first * o, n * o)
        rc = rc or segment_commit(x, x.payload_offset + (first << FRT_PAGE_SHIFT), n << FRT_PAGE_SHIFT)
        if rc != FRT_OK:
            segment_discard(x, x.payload_offset + (first << FRT_PAGE_SHIFT), n << FRT_PAGE_SHIFT)  # its first part
            n //= 2
    if rc == FRT_OK:
        rc = _lock_extent(x)
        if rc == FRT_OK:
            # The new pages become a run in use that is then freed, so that only one function joins runs.
            a64_store_rel(x.pages + first, frt_page_word(FRT_PAGE_RUN, 0, <uint32_t>n))
            a32_store_rel(&sb.pages_committed, <uint32_t>(first + n))  # commit
            sb.used_pages += n
            _free_run_locked(x, <uint32_t>first)
            frt_lock_give(x.locks + FRT_LOCK_EXTENT)
    frt_lock_give(x.locks + FRT_LOCK_GROW)
    return rc


# ---- slabs, each class under its own lock ----

cdef inline uint64_t _all_free(uint32_t cls) noexcept nogil:
    cdef uint32_t blocks = FRT_PAGE_BYTES // FRT_CLASS_BYTES(cls)
    return ~<uint64_t>0 if blocks == 64 else (<uint64_t>1 << blocks) - 1


cdef void _rebuild_class(frt_ctx *x, uint32_t cls) noexcept nogil:
    """Rebuild the class's bitmaps and list from page and owner words. The caller also holds the extent lock.

    An empty page whose return was interrupted is returned now: no later free would empty it again.
    """
    cdef uint32_t page = 0
    cdef uint32_t left = x.pages_max
    cdef uint32_t n, b, following, blocks = FRT_PAGE_BYTES // FRT_CLASS_BYTES(cls)
    cdef uint64_t bits
    x.sb.slab_head[cls] = FRT_NONE
    while page < frt_pages(x):
        n = _pages_of(a64_load_acq(x.pages + page))
        if n == 0 or n > frt_pages(x) - page:
            frt_broken(x, "a run of pages has an impossible length")
            return
        if x.pages[page] == frt_page_word(FRT_PAGE_SLAB, cls, 1):
            bits = 0
            for b in range(blocks):
                if a32_load_acq(_owner(x, page, b)) == 0:
                    bits |= <uint64_t>1 << b
            x.bits[page] = bits
            if bits:
                _list_add(x, &x.sb.slab_head[cls], page)
            else:
                x.links[page].listed = 0
        page += n
    page = x.sb.slab_head[cls]
    while page < x.pages_max and left:
        left -= 1
        following = x.links[page].next
        if x.bits[page] == _all_free(cls) and (x.sb.slab_head[cls] != page or following != FRT_NONE):
            _list_remove(x, &x.sb.slab_head[cls], page)
            _free_run_locked(x, page)
        page = following


cdef int _lock_class(frt_ctx *x, uint32_t cls) noexcept nogil:
    cdef frt_lock *lock = x.locks + FRT_LOCK_CLASS0 + cls
    cdef int rc = frt_lock_take(lock)
    if rc == FRT_LOCK_ORPHANED:
        # The walk over the pages needs the extent lock. Wait for it without limit, even if a stopped process holds it:
        # a robust lock that is released without being mended can never be taken again.
        while _lock_extent(x) != FRT_OK:
            pass
        _rebuild_class(x, cls)
        frt_lock_give(x.locks + FRT_LOCK_EXTENT)
        frt_lock_mend(lock)
        return FRT_OK
    return rc


cdef int _alloc_block(frt_ctx *x, uint32_t cls, uint32_t owner, uint64_t *home) noexcept nogil:
    cdef uint32_t page, block
    cdef int got
    cdef int rc = _lock_class(x, cls)
    if rc != FRT_OK:
        return rc
    page = x.sb.slab_head[cls]
    if page == FRT_NONE:
        got = _take_run(x, 1, FRT_PAGE_SLAB, cls, 0, NULL)
        if got >= 0:
            page = <uint32_t>got
            x.bits[page] = _all_free(cls)
            _list_add(x, &x.sb.slab_head[cls], page)
        else:
            rc = got
    elif page >= x.pages_max or x.bits[page] == 0 or x.bits[page] & ~_all_free(cls):
        rc = frt_broken(x, "a list of slab pages is damaged")
    if rc != FRT_OK:
        frt_lock_give(x.locks + FRT_LOCK_CLASS0 + cls)
        return rc
    block = frt_lowest(x.bits[page])
    home[0] = x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT) + block * FRT_CLASS_BYTES(cls)
    a32_store_rel(_owner(x, page, block), owner)  # commit
    x.bits[page] &= ~(<uint64_t>1 << block)
    if x.bits[page] == 0:
        _list_remove(x, &x.sb.slab_head[cls], page)
    frt_lock_give(x.locks + FRT_LOCK_CLASS0 + cls)
    return FRT_OK


cdef int _free_block(frt_ctx *x, uint32_t cls, uint32_t page, uint32_t block, uint32_t owner) noexcept nogil:
    cdef uint32_t *head = &x.sb.slab_head[cls]
    cdef int rc = _lock_class(x, cls)
    if rc != FRT_OK:
        return rc
    if a32_load_acq(_owner(x, page, block)) == owner:
        a32_store_rel(_owner(x, page, block), 0)  # commit
        if x.bits[page] == 0:
            _list_add(x, head, page)
        x.bits[page] |= <uint64_t>1 << block
        # Return an empty page, but never the class's last one: the next allocation would take it again.
        if x.bits[page] == _all_free(cls) and (head[0] != page or x.links[page].next != FRT_NONE):
            _list_remove(x, head, page)
            rc = _lock_extent(x)
            if rc == FRT_OK:
                _free_run_locked(x, page)
                frt_lock_give(x.locks + FRT_LOCK_EXTENT)
            else:
                _list_add(x, head, page)
                rc = FRT_OK
    frt_lock_give(x.locks + FRT_LOCK_CLASS0 + cls)
    return rc


cdef bint _release_spares(frt_ctx *x) noexcept nogil:
    """Free the one empty page that each class keeps: it may split the only large enough run."""
    cdef uint32_t cls, page, following, left
    cdef bint released = False
    for cls in range(FRT_CLASSES):
        if _lock_class(x, cls) != FRT_OK:
            continue
        page = x.sb.slab_head[cls]
        left = x.pages_max
        while page < x.pages_max and left:
            left -= 1
            following = x.links[page].next
            if x.bits[page] == _all_free(cls) and _lock_extent(x) == FRT_OK:
                _list_remove(x, &x.sb.slab_head[cls], page)
                _free_run_locked(x, page)
                frt_lock_give(x.locks + FRT_LOCK_EXTENT)
                released = True
            page = following
        frt_lock_give(x.locks + FRT_LOCK_CLASS0 + cls)
    return released


# ---- the two calls ----

cdef inline uint32_t _class_for(uint64_t nbytes) noexcept nogil:
    if nbytes <= FRT_CLASS_BYTES(0):
        return 0
    return frt_log2(<uint32_t>(nbytes - 1)) - 7


cdef inline uint64_t _step(uint32_t pages) noexcept nogil:
    """How many bytes an allocation without room commits: as many as there are, at least 4 MiB (2 ms; 64 MiB: 30 ms)."""
    cdef uint64_t step = <uint64_t>pages << FRT_PAGE_SHIFT
    if step < COMMIT_FIRST_BYTES:
        step = COMMIT_FIRST_BYTES
    return step if step < FRT_COMMIT_BYTES else FRT_COMMIT_BYTES


cdef int arena_alloc(frt_ctx *x, uint64_t nbytes, uint32_t owner, uint64_t *home) noexcept nogil:
    """Allocate a block for `owner`, whose record's `home` word receives the offset before the block is committed.

    FRT_TOO_LARGE: it can never fit. FRT_FULL: it does not fit now. Blocks are aligned to 64 bytes or more.
    """
    cdef uint64_t pages = (nbytes + FRT_PAGE_BYTES - 1) >> FRT_PAGE_SHIFT
    cdef uint32_t seen
    cdef bint spared = False
    cdef int rc
    if nbytes > x.total_bytes or pages > x.pages_max:
        return FRT_TOO_LARGE
    while True:
        seen = frt_pages(x)
        if nbytes <= FRT_CLASS_BYTES(FRT_CLASSES - 1):
            rc = _alloc_block(x, _class_for(nbytes), owner, home)
        else:
            rc = _take_run(x, <uint32_t>pages, FRT_PAGE_RUN, 0, owner, home)
        if rc != FRT_GROW:
            return rc if rc < 0 else FRT_OK
        rc = arena_grow(x, seen, _step(seen))
        if rc == FRT_FULL and not spared and _release_spares(x):
            spared = True
        elif rc != FRT_OK:
            return rc


cdef int arena_free(frt_ctx *x, uint32_t owner, uint64_t *home) noexcept nogil:
    """Free the block that home[0] names if it still belongs to the owner, then clear the home word.

    Safe to repeat after a death in the middle: a block with another owner is not touched.
    """
    cdef uint64_t offset = home[0]
    cdef uint64_t word
    cdef uint32_t page, cls
    cdef int rc
    if offset < x.payload_offset or offset >= x.total_bytes:
        home[0] = 0
        return FRT_OK if offset == 0 else FRT_CORRUPT
    page = _page_at(x, offset)
    word = a64_load_acq(x.pages + page)
    rc = FRT_OK
    if (word >> 56) == <uint64_t>FRT_PAGE_SLAB:
        cls = (word >> 48) & 255
        if cls >= FRT_CLASSES:
            return FRT_CORRUPT
        rc = _free_block(x, cls, page, <uint32_t>((offset & (FRT_PAGE_BYTES - 1)) // FRT_CLASS_BYTES(cls)), owner)
    elif (word >> 56) == <uint64_t>FRT_PAGE_RUN:
        rc = _lock_extent(x)
        if rc == FRT_OK:
            if a32_load_acq(_owner(x, page, 0)) == owner and (x.pages[page] >> 56) == <uint64_t>FRT_PAGE_RUN:
                a32_store_rel(_owner(x, page, 0), 0)
                _free_run_locked(x, page)
            frt_lock_give(x.locks + FRT_LOCK_EXTENT)
    if rc == FRT_OK:
        a64_store_rel(home, 0)
    return rc


cdef int arena_touch(frt_ctx *x) noexcept nogil:
    """Take every lock of the allocator once, so that deaths inside them are repaired now."""
    cdef uint32_t cls
    cdef int rc = _lock_extent(x)
    if rc != FRT_OK:
        return rc
    frt_lock_give(x.locks + FRT_LOCK_EXTENT)
    for cls in range(FRT_CLASSES):
        rc = _lock_class(x, cls)
        if rc != FRT_OK:
            return rc
        frt_lock_give(x.locks + FRT_LOCK_CLASS0 + cls)
    return FRT_OK


cdef uint64_t arena_block_bytes(frt_ctx *x, uint64_t offset) noexcept nogil:
    """Capacity of the block at an offset, 0 when there is none."""
    cdef uint64_t word
    if offset < x.payload_offset or offset >= x.total_bytes:
        return 0
    word = a64_load_acq(x.pages + _page_at(x, offset))
    if (word >> 56) == <uint64_t>FRT_PAGE_SLAB:
        return FRT_CLASS_BYTES((word >> 48) & 255) if ((word >> 48) & 255) < FRT_CLASSES else 0
    if (word >> 56) == <uint64_t>FRT_PAGE_RUN:
        return <uint64_t>_pages_of(word) << FRT_PAGE_SHIFT
    return 0


cdef uint32_t arena_owner(frt_ctx *x, uint64_t offset) noexcept nogil:
    """Owner word of the block at an offset; 0 when it is free."""
    cdef uint64_t word
    cdef uint32_t page
    if offset < x.payload_offset or offset >= x.total_bytes:
        return 0
    page = _page_at(x, offset)
    word = a64_load_acq(x.pages + page)
    if (word >> 56) == <uint64_t>FRT_PAGE_SLAB and ((word >> 48) & 255) < FRT_CLASSES:
        return a32_load_acq(_owner(x, page, <uint32_t>((offset & (FRT_PAGE_BYTES - 1)) //
                                                       FRT_CLASS_BYTES((word >> 48) & 255))))
    return a32_load_acq(_owner(x, page, 0))


def room(Client client):
    """Measure the payload region: (used, committed, most) bytes, in whole pages. Takes no lock."""
    cdef frt_ctx *x = &client.x
    client.ensure()
    return (x.sb.used_pages << FRT_PAGE_SHIFT, <uint64_t>frt_pages(x) << FRT_PAGE_SHIFT,
            <uint64_t>x.pages_max << FRT_PAGE_SHIFT)


def grow(Client client):
    """Commit up to 64 MiB more of the payload region. False when it is complete or /dev/shm is full."""
    cdef frt_ctx *x = &client.x
    cdef int rc
    client.ensure()
    with nogil:
        rc = arena_grow(x, frt_pages(x), FRT_COMMIT_BYTES)
    if rc == FRT_FULL:
        return False
    check(rc)
    return True


def discard(Client client, list keepers):
    """Return the payload's memory to the system at the end of a session, except values that `keepers` have pinned.

    The segment cannot be used afterwards. Without this call, one forgotten reference in a process that goes on would
    keep the mapping, and with it the memory of the whole store.

    Args:
        client: the daemon's attachment.
        keepers: clients that are still alive; their views stay readable.
    """
    cdef frt_ctx *x = &client.x
    cdef uint64_t at = x.payload_offset
    cdef uint64_t end = at + (<uint64_t>frt_pages(x) << FRT_PAGE_SHIFT)
    cdef uint32_t i, c
    cdef list kept = []
    client.ensure()
    for i in range(frt_objects(x)):
        if frt_inside(x, x.entries[i].offset, x.entries[i].bytes) != NULL:
            for c in keepers:
                if frt_bits(x, i, FRT_PINS, c >> 6)[0] >> (c & 63) & 1:
                    kept.append((x.entries[i].offset, x.entries[i].offset + x.entries[i].bytes))
                    break
    for first, last in [*sorted(kept), (end, end)]:
        # Discard whole system pages only: a value may share its first and last page with its neighbours.
        first = first & ~4095
        if first > at:
            segment_discard(x, at, first - at)
        at = max(at, (last + 4095) & ~4095)
