"""Faults put into the protocol between nodes, one at a time: does the simulator find them?

Those marked with a commit were mended there, or by the simulator itself; the others take a rule of the protocol away.
`python -m tests.simulation --mutants` runs all of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fastrt"


class Mutant(NamedTuple):
    """A piece of text of a module, and what replaces it.

    The module is one of fastrt.cluster, or of another package if it is named with that one. `aim` is the family of runs
    that leads to this place (`aims`), of which some seed among the first ones finds the mutant; empty: `known` has a
    seed that does.
    """

    name: str
    module: str
    old: str
    new: str
    aim: str = ""

    @property
    def path(self) -> Path:
        """The file of its module."""
        return SOURCE.joinpath(*self.full_name.split(".")[1:]).with_suffix(".py")

    @property
    def full_name(self) -> str:
        """The name of its module."""
        return f"fastrt.{'' if '.' in self.module else 'cluster.'}{self.module}"


MUTANTS = [
    # ---- faults that were in the project ----
    Mutant("copy: no word of a value that is not offered", "value_traffic",
           '        offered = 0\n', '        offered = 0\n        if not here:\n            return\n'),
    Mutant("kept: one name of a shared value ends all", "large_values",
           "            del named[objref]\n", "            named.clear()\n", "relayed"),
    Mutant("export: sent after its release", "peer_stream",
           "if self.closed or self.references.exported_ref(ref.objref) is None:", "if self.closed:"),
    Mutant("lineage: a record that keeps its own object", "lineage", "        return found\n", "        return ()\n"),
    Mutant("lineage: a record that keeps its own object from later on", "node_tables",
           "        self._break_circles()\n", "", "circle"),
    Mutant("a271da1: values that share a source lost one by one", "remote_values",
           "elif one.same_as is not None and self._has_value(one.same_as):", "elif False:",
           "renamed, and lost"),
    Mutant("43e0714: lineage ends with the uplink", "uplink", "self._tables.lineage.adopt(self._lineage)", "pass"),
    Mutant("5f57d72: a value of the owner fetched in a circle", "value_traffic",
           "if theirs and remote.is_missing(self._client, ref):", "if False:", "back again"),
    Mutant("35c16f7: cancellations are not passed on", "peer_stream",
           "            self.out.add(\"cancel\", _Cancel(task=number, force=terms[0], alone=terms[1]))\n", "",
           "endless"),
    Mutant("7eff943: results of accepted tasks are released", "peer_stream",
           "AnyOf(needed, self.traffic.arrivals.named(), self.ledger.awaited())",
           "AnyOf(needed, self.traffic.arrivals.named())", "back again"),
    Mutant("tasks of other nodes go on after the uplink's death", "jobs",
           "return tag << JOB_BITS | self._client.job", "return tag << JOB_BITS"),
    Mutant("stand-ins: those of the last uplink", "uplink", "        self._tables.adopt_stand_ins()\n", ""),
    Mutant("stand-ins: lost with their stream", "remote_values",
           "            if exchange.references.node:\n", "            if False:\n"),
    Mutant("stand-ins: another one for the same object", "claiming",
           "self._remote.share(one, sealed[0].ref if sealed else references.imported(objref).ref)", "pass"),
    Mutant("ca54da5: forgets a function that came again", "sent_functions",
           "if found is not None and found[1] > 1:", "if False:"),
    Mutant("claim: all that is needed, while another stream has not ended here yet", "claiming",
           "        if self._is_only():\n", "        if True:\n"),
    Mutant("stream: a task with all its results runs again", "peer_stream",
           "            if self._has_results(sent.task):\n", "            if False:\n"),
    Mutant("cancel: an argument that comes under the number of a fetch", "inbox",
           "        if isinstance(arriving, Fetching):\n", "        if arriving is not None:\n", "relayed"),
    Mutant("inbox: an argument takes the place of another one with its number", "inbox",
           "            if self.is_fetching(message.native):\n", "            if False:\n", "relayed"),
    Mutant("tidy: the shared source of a result that a peer waits for", "node_tables",
           "*(stream.needs() for stream in self.streams)", "*(stream.references.exported for stream in self.streams)"),
    Mutant("release: one stream ends what another one holds", "uplink",
           "        if not self._tables.kept.is_held(node, objref):\n", "        if True:\n",
           "renamed, and the uplink"),
    Mutant("claim: any value that crosses it is its answer", "claiming",
           "if objref not in self._open or not message.native or message.contains or message.error:",
           "if objref not in self._open or not message.native:", "crossing"),
    Mutant("lineage: a task that begins again has as many runs as before", "value_traffic",
           "self._tables.lineage.count_run(sent.record)", "pass"),
    Mutant("generator: its readers wait without end after the uplink's death", "node_tables",
           "        end_abandoned(self._store)\n", ""),
    Mutant("export: a small value is sent later than its name", "peer_stream",
           "self.out.follow(partial(self._send_export, ref))", "self.send_when_ready(ref)"),
    Mutant("ended: before its result that is another object here has that one's value", "value_traffic",
           "        if own is not None and own.left:\n", "        if False:\n",
           "back again, and broken"),
    # ---- rules taken away ----
    Mutant("lineage: one run more than is left", "lineage", "max(left - 1, 0)", "left"),
    Mutant("release: does not count names", "borrowing", "        if named < held.named:\n", "        if False:\n"),
    Mutant("release: named again, not sent again", "references",
           "            self._send(ref)\n        elif", "            pass\n        elif"),
    Mutant("release: always of one name", "peer_stream",
           "_Release(objref=objref, named=standin.named)", "_Release(objref=objref, named=1)"),
    Mutant("tidy: objects passed on to a third node", "peer_stream",
           "AnyOf(used, *(needs[other] for other in needs if other is not one))", "used", "passed on"),
    Mutant("tidy: objects in values on their way", "peer_stream",
           "AnyOf(needed, self.traffic.arrivals.named(), self.ledger.awaited())",
           "AnyOf(needed, self.ledger.awaited())"),
    Mutant("tidy: objects that share a source", "remote_values",
           "return {source.same_as.objref for source in self._shared.values() if source.same_as is not None}",
           "return set()", "renamed"),
    Mutant("claim: nothing is kept for the peer", "value_traffic",
           "self._tables.kept.keep(self._exchange.node, self._exchange.references.claimable())", "pass"),
    Mutant("claim: another naming is not counted", "claiming", "known.named += 1  # another", "pass  # another"),
    Mutant("claim: values of a stream that ended are forgotten", "remote_values",
           "            absent.add(source.objref, Unclaimed(source.ref, source.origin, source.same_as))\n", ""),
    Mutant("claim: an object is dropped once it is claimed", "remote_values",
           "found = self._held(node).get(objref)", "found = self._held(node).pop(objref, None)", "claimed twice"),
    Mutant("claim: a stream that has not ended here yet", "remote_values",
           "return self.find(node, objref) if found is None else found", "return found"),
    Mutant("uplink: remote values of the last one", "node_tables", "        self.remote.adopt()\n", ""),
    Mutant("uplink: kept objects of the last one", "uplink", "self._tables.kept.keep(message.node, refs)", "pass"),
    Mutant("uplink: kept without a word to the daemon", "large_values",
           "            self.on_keep(ref)\n", "            pass\n"),
    Mutant("stream: forwarded tasks do not run again", "peer_stream",
           "elif core.retry(self._client, sent.task):", "elif False:"),
    Mutant("stream: stand-ins of a lost stream are not made again", "remote_values",
           "            self.rebuild(made, one.origin or one.standin.origin, why)\n", "            pass\n"),
    Mutant("ended: before the last result", "ledger", "        return accepted.left == 0\n", "        return True\n"),
    Mutant("hops: without a limit", "forwarding", "_HOPS_MAX = 4 ", "_HOPS_MAX = 1 << 30 ",
           "back again"),
    Mutant("idle: closed without the peer's word", "idle",
           "            if self.is_claimed or not lately:\n", "            if True:\n"),
    Mutant("inbox: nothing is written for who asked again", "inbox",
           "            if 0 < arriving.attempts < _ATTEMPTS_MAX:\n",
           "            if True:\n                return\n            if False:\n"),
    Mutant("spread: a receiver that stops keeps its turn", "inbox",
           "self._exchange.traffic.has_no_copy(number)", "pass", "stopped"),
    Mutant("spread: a receiver that has stopped takes its turn", "inbox",
           "self._exchange.traffic.has_no_copy(message.number)", "pass", "stopped, and its turn comes"),
    Mutant("spread: a receiver of pieces keeps its turn", "value_traffic",
           "if again:  # the value comes in pieces", "if False:  # the value comes in pieces"),
    Mutant("spread: a failed sender keeps its turn", "spread",
           "        for failed in self._sending.pop(peer, ()):\n",
           "        for failed in self._sending.get(peer, ()):\n"),
    Mutant("daemon: an order is claimed without a look", "daemon_link",
           "return [key for key in self._pending.pop(node, []) if self._claim(key)]",
           "return [key for key in self._pending.get(node, []) if self._claim(key)][:1]"),
    Mutant("ledger: room is not given back", "ledger",
           "        self._uncount(forwarded)\n        return forwarded, was_sealed\n",
           "        return forwarded, was_sealed\n"),
    Mutant("absent: a node that is back is given up", "claims",
           "        elif is_member and self.until", "        elif False and self.until"),
    Mutant("absent: a node that is back twice is given up", "claims",
           "        elif is_member and self.until", "        elif is_member and self.moves < 1 << 8 and self.until"),
    Mutant("heads: gone with the daemon and the uplink", "node.kept",
           "        with contextlib.suppress(FileNotFoundError):\n", "        if not folder.name:\n"),
    # ---- placement groups ----
    Mutant("groups: one that was removed before the daemon knew it", "node.groups",
           "        if name not in self._groups:\n            self._note",
           "        if False:\n            self._note"),
    Mutant("groups: the next daemon places bundles of other nodes again", "node.groups",
           "        if not self.is_away(key):\n", "        if True:\n"),
    Mutant("daemon: the next one takes actors of other nodes for its own", "node.admission",
           "                if not is_away:\n", "                if not is_away or not is_ours:\n",
           "away, and lost"),
    Mutant("groups: the next daemon does not know a removed one", "node.admission",
           'elif order.what == "warn" and self._records.is_removed',
           'elif order.what == "none" and self._records.is_removed'),
    Mutant("groups: tasks on other nodes wait without end", "departure",
           "if admission.refuse(self._client, task, message.id):", "if False:"),
    Mutant("actors: one without a handle waits without end", "node.actors",
           "        some = {**self._waiting, **wanted}\n", "        some = {}\n", "too large"),
    Mutant("groups: ready although a node does not have its bundle", "node.groups",
           "if not node or bundle_name(name, index) not in total:", "if not node:"),
    Mutant("groups: bundles of other nodes take more than there is", "node.admission",
           "if all(room.get(name, 0) >= parts for name, parts in demand.amounts) and self.placing.fit_here",
           "if self.placing.fit_here"),
    # ---- full stores ----
    Mutant("spill: memory is freed before the file is written", "node.spilling",
           "                if is_new:\n", "                if not is_new:\n"),
    Mutant("spill: no value of another node goes to a file for lack of room", "inbox",
           "            elif not self._use_file(number, one):\n", "            else:\n"),
    # ---- standby heads ----
    Mutant("standby: it is never asked", "head_link",
           "        if now - self._lost_at < _TAKEOVER_S:\n", "        if True:\n"),
    Mutant("standby: in charge although its own node is not there", "head",
           "return not self._own or bool(self._own_stream)", "return True"),
    Mutant("standby: it stays in charge when the first head is back", "head_link",
           "until.append(asyncio.create_task(self._other_head_is_in_charge()))", "pass"),
    Mutant("standby: the next uplink does not know it", "node.kept",
           "            link.post(self._heads)\n", "            pass\n"),
    Mutant("standby: it does not look for another one", "head_link",
           "                if await self._is_in_charge(address)", "                if address == self._heads.first"),
]  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Loads one module from changed text."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.full_name
        self._path = str(mutant.path)
        text = Path(self._path).read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: its text occurs {text.count(mutant.old)} times")
        self._text = text.replace(mutant.old, mutant.new)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self._path)

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return self._text.encode()

    def get_code(self, fullname: str) -> Any:
        return compile(self._text, self._path, "exec")


def install(name: str) -> None:
    """Have the next import of a mutant's module load the mutant."""
    mutant = next(one for one in MUTANTS if one.name == name)
    assert mutant.full_name not in sys.modules, f"{mutant.full_name} is imported already"
    sys.meta_path.insert(0, _Finder(mutant))
