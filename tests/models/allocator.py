"""The allocator: runs of pages split, joined and freed by single stores; blocks of slab pages; repair of both.

Truth: `pages` (kind and length of the run that begins at a page), `owner` per block (two a page), `home` per client
(the record that shall name the block). Derived, and changed in one step with a truth word because a death inside the
lock makes it anew: `listed` (free runs in bins), `back` (the hint at a run's last page), `slabs`, `bits`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from .explorer import Memory, Model, Program, at, await_victim, get, load, lock, put, store, unlock

A, R = "arena.", "recovery."
FREE, RUN, SLAB, INNER = "free", "run", "slab", "-"
PAGES = 4


def walk(s: Memory) -> list[int]:
    """The first pages of all runs, by their lengths."""
    page, starts = 0, []
    while page < PAGES and s["pages"][page][1]:
        starts.append(page)
        page += s["pages"][page][1]
    return starts if page == PAGES else []


def find_run(s: Memory, n: int, low: int) -> Any:
    """Take the lowest fitting run out of its bin: (pages before those to use, first of these, their number), or None.

    The pages before `low` are used only if there is no room behind them.
    """
    for first in (low, 0):
        for page in sorted(s["listed"]):
            start = max(page, first)
            if page + s["pages"][page][1] >= start + n:
                s["listed"] -= {page}
                return start - page, start, page + s["pages"][page][1] - start
    return None


def list_run(s: Memory, page: int) -> None:
    s["listed"] |= {page}
    put(s, "back", page + s["pages"][page][1] - 1, page)


def set_owner(s: Memory, page: int, block: int, owner: int) -> None:
    put(s, "owner", page, (owner, s["owner"][page][1]) if block == 0 else (s["owner"][page][0], owner))


def rebuild_class(s: Memory) -> None:
    for page in range(PAGES):
        if page in walk(s) and s["pages"][page][0] == SLAB:
            put(s, "bits", page, sum(1 << b for b in (0, 1) if not s["owner"][page][b]))
    s["slabs"] = frozenset(p for p in walk(s) if s["pages"][p][0] == SLAB and s["bits"][p])


class Allocator(Model):
    LOCKS = ("extent", "class", "janitor")
    SCENARIOS: ClassVar = {"runs": 3, "slabs": 1}
    MUTANTS: ClassVar = {
        "tail before the run is shortened": "runs", "home before owner": "runs", "page word before owner": "runs",
        "owner is given up before the page": "runs", "free looks at the owner": "runs",
        "rebuild frees what nobody owns": "runs", "bins are rebuilt after a death": "runs",
        "the run is shortened last": "runs",
        "the hint is checked": "runs", "joined run leaves its bin": "runs", "slabs are rebuilt after a death": "slabs",
        "recovery frees by home": "slabs", "only an empty slab page goes back": "slabs",
    }  # fmt: skip

    def memory(self) -> Memory:
        n = len(self.programs())
        return {
            "pages": ((FREE, PAGES), *((INNER, 0),) * (PAGES - 1)), "owner": ((0, 0),) * PAGES, "home": (None,) * n,
            "listed": frozenset({0}), "back": (0,) * PAGES, "slabs": frozenset(), "bits": (0,) * PAGES,
            "extent": 0, "class": 0, "janitor": 0, "dead": 0, "slots": ("LIVE",) * n,
        }  # fmt: skip

    def programs(self) -> list[tuple[str, Callable[[int], Program]]]:
        actors = [("client1", lambda me: self.runs(me, 1, 2)), ("client2", lambda me: self.runs(me, 2, 1))]
        if self.scenario == "slabs":
            actors = [("client1", self.blocks), ("client2", self.blocks), ("client3", self.block_kept)]
        return [*actors, *((f"janitor{k}", self.janitor) for k in range(3))]

    def check(self, s: Memory) -> str | None:
        starts = walk(s)
        if not starts:
            return "the walk over the pages does not end where they end"
        taken = set()
        for p, home in enumerate(s["home"]):
            if home and s["owner"][home[0]][home[1]] == p + 1:
                if home[0] not in starts or s["pages"][home[0]][0] == FREE or home in taken:
                    return f"client {p}'s block at page {home[0]} is free memory too"
                taken.add(home)
        return None

    def quiet(self, s: Memory, asleep: list[str]) -> str | None:
        if s["extent"] or s["class"]:
            return None if s["dead"] else "a lock stays taken"
        for p, home in enumerate(s["home"]):
            if home and (s["owner"][home[0]][home[1]] == p + 1) == bool(s["dead"] >> p & 1):
                return f"client {p} is {'dead and keeps' if s['dead'] >> p & 1 else 'alive and has lost'} its block"
        for page in walk(s):
            kind, owners = s["pages"][page][0], s["owner"][page]
            if kind == FREE and (any(owners) or page not in s["listed"]):
                return f"free page {page} has owners {owners}, or is not to be found"
            for block, owner in enumerate(owners):
                if owner and s["home"][owner - 1] != (page, block):
                    return f"a block at page {page} belongs to client {owner - 1}, which does not name it"
            if kind == RUN and not owners[0]:
                return f"run {page} belongs to nobody"
            if kind == SLAB and s["bits"][page] != sum(1 << b for b in (0, 1) if not owners[b]):
                return f"the bitmap of slab page {page} is wrong"
        return None

    # ---- the core's functions ----

    def lock_extent(self, me: int) -> Program:
        if (yield at(A + "_lock_extent: frt_lock_take"), lock, "extent", me) and not self.no(
            "bins are rebuilt after a death"
        ):
            yield at(A + "_rebuild_bins: bin_head[b] = FRT_NONE"), store, "listed", frozenset()
            page, last = 0, -1
            while page < PAGES:
                kind, n, owner = yield at(A + "_rebuild_bins: n = _pages_of"), self.look, page
                if kind == RUN and not owner and not self.no("rebuild frees what nobody owns"):
                    yield at(A + "_rebuild_bins: FRT_PAGE_FREE, 0, n"), put, "pages", page, (FREE, n)
                    kind = FREE
                if kind != FREE:
                    last = -1
                elif last >= 0:
                    yield at(A + "_rebuild_bins: page + n - last_free))"), self.join, last, page + n - last
                else:
                    last = page
                    yield at(A + "_rebuild_bins: _bin_add(x, page, n)"), list_run, page
                page += n

    def look(self, s: Memory, page: int) -> tuple[str, int, int]:
        return (*s["pages"][page], s["owner"][page][0])

    def join(self, s: Memory, page: int, n: int) -> None:
        put(s, "pages", page, (FREE, n))
        list_run(s, page)

    def take_run(self, me: int, n: int, kind: str, low: int = 0) -> Program:
        yield from self.lock_extent(me)
        found = yield at(A + "_take_run: page = _find_run"), find_run, n, low
        if found:
            before, page, have = found
            front = at(A + "_take_run: FRT_PAGE_FREE, 0, before)"), put, "pages", page - before, (FREE, before)
            tail = at(A + "_take_run: FRT_PAGE_FREE, 0, have - n"), put, "pages", page + n, (FREE, have - n)
            word = at(A + "_take_run: frt_page_word(kind, cls, n)"), put, "pages", page, (kind, n)
            home = at(A + "_take_run: home[0] ="), put, "home", me, (page, 0)
            owner = at(A + "_take_run: a32_store_rel(_owner"), set_owner, page, 0, me + 1
            if have > n and not self.no("tail before the run is shortened"):
                yield tail
            if before and self.no("the run is shortened last"):
                yield front
            if kind == SLAB:
                yield word
            elif self.no("page word before owner"):
                yield home
                yield owner
                yield word
            else:
                yield word
                if before and not self.no("the run is shortened last"):
                    yield front
                yield owner if self.no("home before owner") else home
                yield home if self.no("home before owner") else owner
            if before:
                yield at(A + "_take_run: _bin_add(x, page - before"), list_run, page - before
            if have > n:
                if self.no("tail before the run is shortened"):
                    yield tail
                yield at(A + "_take_run: _bin_add(x, page + n"), list_run, page + n
            del front, tail, word, home, owner
        yield at(A + "_take_run: frt_lock_give"), unlock, "extent"
        return found[1] if found else -1

    def free_run(self, page: int) -> Program:
        n = (yield at(A + "_free_run_locked: n = _pages_of"), get, "pages", page)[1]
        yield at(A + "_free_run_locked: FRT_PAGE_FREE, 0, n"), put, "pages", page, (FREE, n)
        n = yield at(A + "_free_run_locked: n += _pages_of"), self.join_right, page, n
        other = yield at(A + "_free_run_locked: other = x.links"), self.left_of, page
        if other >= 0:
            yield at(A + "_free_run_locked: pages + other"), put, "pages", other, (FREE, page + n - other)
            yield at(A + "_free_run_locked: a64_store_rel(x.pages + page, 0)"), put, "pages", page, (INNER, 0)
            page = other
        yield at(A + "_free_run_locked: _bin_add"), list_run, page

    def join_right(self, s: Memory, page: int, n: int) -> int:
        other = page + n
        if other < PAGES and s["pages"][other][0] == FREE:
            n += s["pages"][other][1]
            if not self.no("joined run leaves its bin"):
                s["listed"] -= {other}
            put(s, "pages", page, (FREE, n))
        return n

    def left_of(self, s: Memory, page: int) -> int:
        other = s["back"][page - 1] if page else page
        if other >= page:
            return -1
        kind, n = s["pages"][other]
        if not self.no("the hint is checked") and not (kind == FREE and other in s["listed"] and other + n == page):
            return -1
        s["listed"] -= {other}
        return other

    def lock_class(self, me: int) -> Program:
        if (yield at(A + "_lock_class: frt_lock_take"), lock, "class", me) and not self.no(
            "slabs are rebuilt after a death"
        ):
            yield from self.lock_extent(me)
            yield at(A + "_rebuild_class: slab_head[cls] = FRT_NONE"), rebuild_class
            yield at(A + "_lock_class: frt_lock_give(x.locks + FRT_LOCK_EXTENT)"), unlock, "extent"

    def alloc_block(self, me: int) -> Program:
        yield from self.lock_class(me)
        page = min((yield at(A + "_alloc_block: page = x.sb.slab_head"), load, "slabs"), default=-1)
        if page < 0:
            page = yield from self.take_run(me, 1, SLAB)
            yield at(A + "_alloc_block: _list_add"), self.new_slab, page
        bits = yield at(A + "_alloc_block: block = frt_lowest"), get, "bits", page
        block = 0 if bits & 1 else 1
        yield at(A + "_alloc_block: home[0] ="), put, "home", me, (page, block)
        yield at(A + "_alloc_block: a32_store_rel(_owner"), set_owner, page, block, me + 1
        yield at(A + "_alloc_block: x.bits[page] &="), self.set_bits, page, bits & ~(1 << block)
        yield at(A + "_alloc_block: frt_lock_give(x.locks"), unlock, "class"

    def new_slab(self, s: Memory, page: int) -> None:
        self.set_bits(s, page, 3)

    def set_bits(self, s: Memory, page: int, bits: int) -> None:
        put(s, "bits", page, bits)
        s["slabs"] = s["slabs"] | {page} if bits else s["slabs"] - {page}

    def free(self, me: int, owner: int) -> Program:
        """arena_free: also repeated, on behalf of the dead."""
        home = yield at(A + "arena_free: offset = home[0]"), get, "home", owner - 1
        if not home:
            return
        page, block = home
        kind = (yield at(A + "arena_free: word = a64_load_acq"), get, "pages", page)[0]
        if kind == SLAB:
            yield from self.free_block(me, page, block, owner)
        elif kind == RUN:
            yield from self.lock_extent(me)
            mine = (yield at(A + "arena_free: a32_load_acq(_owner"), get, "owner", page)[0] == owner
            kind = (yield at(A + "arena_free: (x.pages[page] >> 56) == <uint64_t>FRT_PAGE_RUN:"), get, "pages", page)[0]
            if (mine or self.no("free looks at the owner")) and kind == RUN:
                early = not self.no("owner is given up before the page")
                if early:
                    yield at(A + "arena_free: a32_store_rel(_owner"), set_owner, page, 0, 0
                yield from self.free_run(page)
                if not early:
                    yield at(A + "arena_free: a32_store_rel(_owner"), set_owner, page, 0, 0
                del early
            yield at(A + "arena_free: frt_lock_give"), unlock, "extent"
        yield at(A + "arena_free: a64_store_rel(home, 0)"), put, "home", owner - 1, None

    def free_block(self, me: int, page: int, block: int, owner: int) -> Program:
        yield from self.lock_class(me)
        if (yield at(A + "_free_block: == owner"), get, "owner", page)[block] == owner:
            yield at(A + "_free_block: a32_store_rel(_owner"), set_owner, page, block, 0
            bits = (yield at(A + "_free_block: |= <uint64_t>1"), get, "bits", page) | 1 << block
            yield at(A + "_free_block: |= <uint64_t>1"), self.set_bits, page, bits
            others = (yield at(A + "_free_block: head[0] != page"), load, "slabs") - {page}
            if (bits == 3 or self.no("only an empty slab page goes back")) and others:
                yield at(A + "_free_block: _list_remove"), store, "slabs", others
                yield from self.lock_extent(me)
                yield from self.free_run(page)
                yield at(A + "_free_block: frt_lock_give(x.locks + FRT_LOCK_EXTENT)"), unlock, "extent"
        yield at(A + "_free_block: FRT_LOCK_CLASS0"), unlock, "class"

    # ---- who does what ----

    def runs(self, me: int, first: int, second: int) -> Program:
        yield from self.take_run(me, first, RUN)
        yield from self.free(me, me + 1)
        yield from self.take_run(me, second, RUN, 1)

    def blocks(self, me: int) -> Program:
        yield from self.alloc_block(me)
        yield from self.free(me, me + 1)

    def block_kept(self, me: int) -> Program:
        yield from self.alloc_block(me)

    def janitor(self, me: int) -> Program:
        first = len(self.programs()) - 3
        while True:
            v = yield at(R + "recover: slot = x.clients + v"), await_victim, me, first
            yield at(R + "recover: FRT_LOCK_JANITOR"), lock, "janitor", me
            yield from self.lock_extent(me)
            yield at(A + "arena_touch: FRT_LOCK_EXTENT"), unlock, "extent"
            if self.scenario == "slabs":
                yield from self.lock_class(me)
                yield at(A + "arena_touch: FRT_LOCK_CLASS0"), unlock, "class"
            if not self.no("recovery frees by home"):
                yield from self.free(me, v + 1)
            yield at(R + "recover: FRT_CLIENT_FREE, 0"), put, "slots", v, "FREE"
            yield at(R + "recover: frt_lock_give"), unlock, "janitor"
            del v
