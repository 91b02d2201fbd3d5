"""Rules of the core removed one at a time: does the campaign notice? `python tests/crash/mutants.py [NAME...]`

Each mutant is one piece of text of one file replaced by another; only that module is compiled again. MODELS names
those that need an interleaving which kills do not bring about: tests/models removes the same rule from a protocol.
Others name a test of the core that has to fail: their rule is one of order, not of deaths, and a campaign comes to
where it counts only now and then.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import chaos
import variant

CORE = "tests/_core/"
SECONDS = 60.0  # of campaign for each mutant, at most
MODELS = "models"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    by: str = "campaign"


def gone(name: str, file: str, line: str, by: str = "campaign") -> Mutant:
    """A statement, with all of its line, that is not there."""
    return Mutant(name, file, line, "pass", by)


MUTANTS = (
    gone("pool: free stack not rebuilt", "pool.pyx",
         "_rebuild(x, tasks)"),
    gone("pool: record not stamped", "pool.pyx",
         "a64_store_rel(word, frt_word(FRT_OBJ_RESERVED, x.me, frt_word_gen(word[0])))"),
    gone("arena: bins not rebuilt", "arena.pyx", "_rebuild_bins(x)"),
    gone("arena: class not rebuilt", "arena.pyx", "_rebuild_class(x, cls)"),
    Mutant("arena: run without owner kept", "arena.pyx",
           "if (x.pages[page] >> 56) == <uint64_t>FRT_PAGE_RUN and _owner(x, page, 0)[0] == 0:", "if False:"),
    Mutant("arena: owner before home", "arena.pyx",
           "    home[0] = x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT) + block * FRT_CLASS_BYTES(cls)\n"
           "    a32_store_rel(_owner(x, page, block), owner)  # commit\n",
           "    a32_store_rel(_owner(x, page, block), owner)  # commit\n"
           "    home[0] = x.payload_offset + (<uint64_t>page << FRT_PAGE_SHIFT) + block * FRT_CLASS_BYTES(cls)\n"),
    Mutant("arena: home cleared before the block is freed", "arena.pyx",
           "    page = _page_at(x, offset)\n    word = a64_load_acq(x.pages + page)\n    rc = FRT_OK\n",
           "    home[0] = 0\n"
           "    page = _page_at(x, offset)\n    word = a64_load_acq(x.pages + page)\n    rc = FRT_OK\n"),
    Mutant("files: left by an unsealed value", "objects.pyx",
           "        spill_remove(x, entry.objref)\n    entry.nrefs,", "        pass\n    entry.nrefs,"),
    gone("files: half a remote value's left", "recovery.pyx", "spill_remove(x, x.entries[i].objref)",
         CORE + "test_mapped.py::test_death_of_a_writer_leaves_no_file"),
    Mutant("files: references go with the bytes", "recovery.pyx", "if x.entries[i].nrefs == 0:", "if True:"),
    gone("links: counts not rebuilt", "references.pyx", "_rebuild(x)"),
    Mutant("links: functions not counted again", "references.pyx",
           "if x.functions[k].objref and i < objects and", "if False and"),
    gone("links: uncounted twice", "references.pyx", "flags[0] &= ~flag"),
    gone("links: admitted without its device", "references.pyx",
         "a32_store_rel(&body.refs[body.ndeps - 1].extra, devices)"),
    gone("links: intent to queue missing", "references.pyx",
         "a32_store_rel(&x.clients[x.me].pushing, t + 1)  # recovery queues it if this process dies before"),
    Mutant("links: no second look after linking", "references.pyx",
           "            if frt_word_state(a64_load_sc(frt_state(x, i))) == FRT_OBJ_PENDING:\n                return\n",
           "            return\n"),
    Mutant("queue: cell dropped before the claim", "queue.pyx",
           "        claimed = queue_means(x, cell, word) and a64_cas_sc(\n"
           "            x.task_words + t, word, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(word)))\n"
           "        a64_store_rel(&sb.ring_head, sb.ring_head + 1)  # commit\n",
           "        a64_store_rel(&sb.ring_head, sb.ring_head + 1)  # commit\n"
           "        claimed = queue_means(x, cell, word) and a64_cas_sc(\n"
           "            x.task_words + t, word, frt_word(FRT_TASK_CLAIMED, x.me, frt_word_gen(word)))\n"),
    gone("ranked: stale cells kept when it is full", "priority_queue.pyx",
         "ranked_rebuild(x)  # drops stale cells and adds this task",
         CORE + "test_queue.py::test_full_heap_drops_what_is_stale_and_keeps_the_rest"),
    Mutant("queue: wider before the cells are moved", "queue.pyx",
           "    for k in range(x.sb.ring_head, x.sb.ring_tail):\n        if k & cells:\n",
           "    a32_store_rel(&x.sb.ring_cells, 2 * cells)\n"
           "    for k in range(x.sb.ring_head, x.sb.ring_tail):\n        if k & cells:\n"),
    gone("tasks: intent to queue missing", "submission.pyx",
         "a32_store_rel(&x.clients[x.me].pushing, t + 1)  # recovery links or queues it if we do not come that far"),
    Mutant("tasks: retry without intent", "tasks.pyx",
           "when this client runs another one\n    a32_store_rel(&x.clients[x.me].pushing, t + 1)\n",
           "when this client runs another one\n"),
    Mutant("tasks: arguments not counted", "submission.pyx",
           "    if task.nrefs:\n        rc = links_count(", "    if False:\n        rc = links_count("),
    gone("objects: intent to tell missing", "objects.pyx", "a32_store_rel(&me.sealing, i + 1)"),
    Mutant("objects: waiters not told", "objects.pyx",
           "    object_tell(x, i)\n    a32_store_rel(&me.sealing, 0)", "    a32_store_rel(&me.sealing, 0)"),
    Mutant("objects: children not deleted", "objects.pyx",
           "elif _condemn(x, child):", "elif False:"),
    Mutant("objects: bit after the look", "objects.pyx",
           "    a64_or_sc(bits, x.me_bit)\n    word = a64_load_sc(state)\n",
           "    word = a64_load_sc(state)\n    a64_or_sc(bits, x.me_bit)\n", MODELS),
    Mutant("objects: deleter does not look again", "objects.pyx",
           "        if not _held(x, i):\n            if a64_cas_sc",
           "        if True:\n            if a64_cas_sc", MODELS),
    gone("objects: failed acquire does not decide again", "objects.pyx",
         "object_maybe_delete(x, i)  # a deleter may have kept the object because of this bit", MODELS),
    Mutant("recovery: refs of the dead kept", "recovery.pyx",
           "        if refs[0] & bit:\n            a64_and_sc(refs, ~bit)\n", ""),
    gone("recovery: pins of the dead kept", "recovery.pyx", "a64_and_sc(pins, ~bit)"),
    gone("recovery: intents ignored", "recovery.pyx", "_intents(x, v)"),
    gone("recovery: intent to requeue missing", "recovery.pyx",
         "a32_store_rel(&x.clients[x.me].pushing, t + 1)  # this process may die, too"),
    Mutant("recovery: slot freed first", "recovery.pyx",
           "frt_word(FRT_CLIENT_DYING, 0,", "frt_word(FRT_CLIENT_FREE, 0,"),
    Mutant("recovery: half-made task kept", "recovery.pyx",
           "        return _unsubmit(x, t)", "        return pool_return(x, True, &t, 1)"),
    Mutant("recovery: running task forgotten", "recovery.pyx",
           "    if state == FRT_TASK_RUNNING or state == FRT_TASK_BLOCKED:", "    if False:"),
    Mutant("recovery: freeing not finished", "recovery.pyx",
           "            if what == FRT_OBJ_FREEING:", "            if False:"),
    gone("recovery: undecided deletion kept", "recovery.pyx", "a64_cas_sc(state, word, frt_word_undeleted(word))"),
    Mutant("recovery: half-spilled block kept", "recovery.pyx",
           "rc = rc or arena_free(x, i + 1, &x.entries[i].offset)", "pass"),
    gone("actors: process of the dead kept", "recovery.pyx", "actors_of_dead(x, v)"),
    Mutant("actors: taken calls not looked for", "actors.pyx",
           "    a32_store_sc(&actor.rescan, 1)  # a former process may have taken calls out of the mailbox\n", ""),
    gone("actors: object counted for good", "actors.pyx", "check(actor_uncount(x, actor))"),
    gone("actors: counts not mended after a death while making one", "actors.pyx", "links_recount(x)"),
    Mutant("calls: ready before it is pushed", "submission.pyx",
           "    mailbox_push(x, actor, t)\n"
           "    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen))  # commit\n",
           "    a64_store_sc(x.task_words + t, frt_word(FRT_TASK_READY, x.me, gen))  # commit\n"
           "    mailbox_push(x, actor, t)\n", MODELS),
    Mutant("calls: no look at the actor after the commit", "submission.pyx",
           "    if frt_word_state(a64_load_sc(&actor.word)) == FRT_ACTOR_DEAD:\n", "    if False:\n"),
    Mutant("recovery: call of a dead actor kept", "recovery.pyx",
           "    if state == FRT_TASK_READY and 0 < task.actor", "    if False and 0 < task.actor"),
    Mutant("recovery: late task run again", "recovery.pyx", " or task.flags & FRT_TASK_LATE:", ":"),
    gone("counts: one that a death has cut off is not made up for", "recovery.pyx", "tally_settle(x, v, t, ended)"),
    gone("counts: one before a seal that never came is kept", "recovery.pyx", "tally_settle(x, v, t, False)"),
    Mutant("counts: recovery counts again what was counted", "tally.pyx", "if ended and not counted:", "if ended:"),
    gone("failures: a dead writer's place is kept", "recovery.pyx", "failures_of_dead(x, v)"),
    Mutant("failures: committed before it is written", "failures.pyx",
           "    memcpy(f, &made, sizeof(made))\n    _commit(x, number)\n",
           "    _commit(x, number)\n    memcpy(f, &made, sizeof(made))\n"),
    Mutant("failures: two of one death", "failures.pyx",
           "x.tasks[t].function == 0 or _is_kept(x, x.tasks[t].id, x.tasks[t].attempts)", "x.tasks[t].function == 0"),
    Mutant("fifo: next segment named after the commit", "fifo.pyx",
           "            old.next.objref, old.next.index, old.end = segment.objref, segment.index, q.state.tail\n"
           "            q.plan = q.state\n            q.plan.tail_in, q.plan.tail = old.next, 0\n"
           "            frt_fifo_commit(q)\n",
           "            old.end, q.plan = q.state.tail, q.state\n"
           "            q.plan.tail_in.objref, q.plan.tail_in.index, q.plan.tail = segment.objref, segment.index, 0\n"
           "            frt_fifo_commit(q)\n"
           "            old.next.objref, old.next.index = segment.objref, segment.index\n"),
    Mutant("recovery: object of the dead kept", "recovery.pyx",
           "                rc = rc or object_empty(x, i)\n                x.entries[i].objref = 0\n",
           "                x.entries[i].objref = 0\n"),
)  # fmt: skip


def apply(mutant: Mutant, core: Path) -> None:
    """Replace the text in a copy of the sources; the first place where it stands on a line of its own, if several."""
    (path,) = core.rglob(mutant.file)
    text = path.read_text()
    if mutant.old not in text:
        raise LookupError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}; the table is to be looked at again")
    at = text.index(mutant.old) if text.count(mutant.old) == 1 else _statement(text, mutant)
    path.write_text(text[:at] + mutant.new + text[at + len(mutant.old) :])


def _statement(text: str, mutant: Mutant) -> int:
    """Where the text is a whole statement: the definition of a function of that name comes before it."""
    at = -1
    while (at := text.find(mutant.old, at + 1)) >= 0:
        line = text[text.rfind("\n", 0, at) + 1 : at]
        if not line.strip():
            return at
    raise LookupError(f"{mutant.name}: {mutant.old!r} is no statement in {mutant.file}")


def build(mutant: Mutant, base: Path, folder: Path) -> Path:
    """Compile a mutant beside the unchanged modules of the campaign's own build."""
    tree = folder / "tree"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (variant.ROOT / name).exists():
            tree.mkdir(exist_ok=True)
            shutil.copy2(variant.ROOT / name, tree / name)
    shutil.copytree(variant.ROOT / "src" / "fastrt", tree / "src" / "fastrt",
                    ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))  # fmt: skip
    shutil.copytree(base, folder / "lib", symlinks=True)
    shutil.copytree(base.parent / "objects", folder / "objects")
    apply(mutant, tree / "src" / "fastrt" / "_core")
    variant.compile_core(tree, folder / "lib", folder / "objects")
    return folder / "lib"


def judge(mutant: Mutant, base: Path, seed: int) -> str:
    """What the campaign says of a mutant: its first complaint, or nothing."""
    with tempfile.TemporaryDirectory(prefix="frt-mutant-") as name:
        folder = Path(name)
        target = build(mutant, base, folder)
        if mutant.by.startswith(CORE):
            return complaint_of_test(mutant.by, target)
        spec = {**chaos.FORMS["short"], "seed": seed, "per_side": 4, "first": True, "until": time.monotonic() + SECONDS}
        spec["prefer"] = mutant.file  # die there first
        spec["source"] = str(folder / "tree" / "src" / "fastrt" / "_core")
        failures = [failure for lane in chaos.run_lanes(target, spec, 2) for failure in lane.failures]
        return failures[0]["failure"] if failures else ""


def complaint_of_test(test: str, target: Path) -> str:
    """The error that a test of the core ends with on a build; nothing if it passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", test]
    done = subprocess.run(command, cwd=variant.ROOT, env=variant.environment(target), capture_output=True, text=True)
    if done.returncode not in (0, 1):  # no test has run
        raise RuntimeError(f"{test} cannot be run:\n{done.stdout}{done.stderr}")
    failures = [line for line in done.stdout.splitlines() if line.startswith(("E ", "/", "FAILED"))]
    return (failures or ["it failed"])[0] if done.returncode else ""


def campaign(names: list[str], seed: int = 1) -> int:
    """Judge the mutants; prints `mutants detected n of m`, with who must find the others."""
    base = variant.build()
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    mine = [mutant for mutant in chosen if mutant.by != MODELS]
    missed = []
    for mutant in mine:
        complaint = judge(mutant, base, seed)
        chaos.say(f"{'found' if complaint else 'MISSED':>8}  {mutant.name}: {complaint[:120]}")
        if not complaint:
            missed.append(mutant)
    for mutant in chosen:
        if mutant.by == MODELS:
            chaos.say(f"{'models':>8}  {mutant.name}: left to tests/models")
    chaos.say(f"mutants detected {len(mine) - len(missed)} of {len(mine)}, {len(chosen) - len(mine)} by the models")
    return len(missed)


if __name__ == "__main__":
    sys.exit(1 if campaign(sys.argv[1:]) else 0)
