"""A server's part in moving parts of tables to other servers, and in writing and loading checkpoints.

The head leads a move in three steps. First the receiving servers fetch the parts from their owners, while pushes are
held back. Then each of them makes the parts its own, durably and in one step. Then the previous owners drop them. Until
a server has made parts its own, their previous owner still has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrt.errors import NotFoundError
from fastrt.ps.arrays import pack, unpack
from fastrt.ps.dense import DenseShard
from fastrt.ps.endpoint import Answer, Caller
from fastrt.ps.errors import CheckpointError
from fastrt.ps.journal import read, write_all
from fastrt.ps.push_clock import Array
from fastrt.ps.remote_errors import raise_refusal
from fastrt.ps.rows import EmbeddingShard, restricted
from fastrt.ps.spec import Spec
from fastrt.ps.wire import VERSION, Meta, dial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastrt.ps.server import Server, Shard

_CALL_S = 60.0


class Moving:
    """Handlers of one server for moves and checkpoints.

    Args:
        server: the server that they belong to.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._fetched: dict[str, list[tuple[list[int], dict[str, Array]]]] = {}
        self.handlers = {
            "freeze": self._freeze, "thaw": self._thaw, "export": self._export, "fetch": self._fetch,
            "adopt": self._adopt, "checkpoint": self._checkpoint, "restore": self._restore,
        }  # fmt: skip

    def _freeze(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Accept no more pushes until `adopt`."""
        with self._server.turn:
            self._server.frozen = True
            self._fetched.clear()
            self._server.turn.notify_all()
        return Answer({})

    def _thaw(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Accept pushes if this server knows the current distribution; one that died during the move may not."""
        with self._server.turn:
            self._server.frozen = self._server.frozen and self._server.epoch != meta["epoch"]
            self._server.turn.notify_all()
        return Answer({})

    def _export(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        with self._server.turn:
            listed, arrays = pack(self._found(meta).dump(meta["parts"]))
            return Answer({"arrays": listed}, arrays)

    def _found(self, meta: Meta) -> Shard:
        found = self._server.shards.get(str(meta.get("table")))
        if found is None or not set(meta["parts"]) <= set(found.parts):
            raise NotFoundError(f"server {self._server.index} does not have these parts of {meta.get('table')!r}")
        return found

    def _fetch(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Fetch parts of a table from another server; they are kept aside until `adopt`."""
        wire = dial(meta.get("unix"), meta["address"], self._server.trust, _CALL_S)
        try:
            raise_refusal(wire.call({"version": VERSION, "client": 0}, timeout_s=_CALL_S)[0])
            answer, raw, _ = wire.call(
                {"op": "export", "table": meta["table"], "parts": meta["parts"]}, timeout_s=_CALL_S
            )
        finally:
            wire.close()
        raise_refusal(answer)
        with self._server.turn:
            self._fetched.setdefault(meta["table"], []).append((meta["parts"], unpack(answer["arrays"], raw)))
        return Answer({})

    def _adopt(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Own exactly these parts of the tables, at an epoch, durably; accept pushes again."""
        server = self._server
        with server.turn:
            shards: dict[str, Shard] = {}
            for spec_json, parts in meta["tables"]:
                spec = Spec.from_json(spec_json)
                shards[spec.name] = self._made(spec, sorted(parts))
            server.shards, before = shards, server.shards
            server.epoch, previous = meta["epoch"], server.epoch
            try:
                server.snapshot()
            except BaseException:
                server.shards, server.epoch = before, previous
                raise
            for name, shard in before.items():
                if server.shards.get(name) is not shard:
                    shard.memory.retire()
            self._fetched.clear()
            server.frozen = False
            server.turn.notify_all()
        return Answer({})

    def _made(self, spec: Spec, parts: list[int]) -> Shard:
        """Make a shard from parts that are here and parts that were fetched."""
        here = self._server.shards.get(spec.name)
        if here is not None and here.parts == parts:
            return here
        shard: Shard = (DenseShard if spec.kind == "dense" else EmbeddingShard)(spec, parts)
        missing = set(parts)
        kept = sorted(missing & set(here.parts)) if here is not None else []
        if here is not None and kept:
            shard.load(kept, here.dump(kept))
            missing -= set(kept)
        for some, arrays in self._fetched.get(spec.name, []):
            if set(some) <= missing:
                shard.load(some, arrays)
                missing -= set(some)
        if missing:
            raise NotFoundError(f"server {self._server.index} lacks parts {sorted(missing)} of {spec.name!r}")
        return shard

    # ---- checkpoints ----

    def _checkpoint(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Write all parts, or only changed rows of embeddings, into a file of the given name."""
        path = Path(meta["path"])
        with self._server.turn:
            self._server.cut.require(meta["cut"])
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                check = write_all(fd, 1, self._written(bool(meta.get("incremental"))), sync=True)
            finally:
                os.close(fd)
            for shard in self._server.shards.values():
                if isinstance(shard, EmbeddingShard):
                    shard.checkpointed()
        return Answer({"bytes": path.stat().st_size, "check": check})

    def _written(self, incremental: bool) -> Iterator[tuple[dict[str, Any], list[Array]]]:
        for shard in self._server.shards.values():
            record = {"spec": shard.spec.to_json()}
            if isinstance(shard, EmbeddingShard):
                listed, arrays = pack(shard.dump(shard.parts, incremental))
                yield {**record, "parts": shard.parts, "arrays": listed}, arrays
                continue
            for part in shard.parts:  # one record each: another number of servers distributes parts differently
                listed, arrays = pack(shard.dump([part]))
                yield {**record, "parts": [part], "arrays": listed}, arrays

    def _restore(self, caller: Caller, meta: Meta, data: Any) -> Answer:
        """Load parts of tables from files; later files override earlier ones."""
        server = self._server
        with server.turn:
            shards: dict[str, Shard] = {}
            for spec_json, parts in meta["tables"]:
                spec = Spec.from_json(spec_json)
                shards[spec.name] = (DenseShard if spec.kind == "dense" else EmbeddingShard)(spec, parts)
            for path, check in meta["paths"]:
                self._load_file(Path(path), check, shards)
            for shard in shards.values():
                shard.pace.reset_clients()
            server.shards, server.epoch = shards, meta["epoch"]
            server.snapshot()
        return Answer({})

    def _load_file(self, path: Path, check: int, shards: dict[str, Shard]) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error}.") from error
        try:
            whole = False
            for record, raw in read(fd, 1):
                if "end" in record:
                    whole = record["check"] == check
                    break
                shard = shards.get(record["spec"]["name"])
                if shard is None:
                    continue  # all of its parts belong to other servers
                wanted = sorted(set(record["parts"]) & set(shard.parts))
                found = unpack(record["arrays"], raw)
                if wanted and isinstance(shard, EmbeddingShard):
                    shard.load(wanted, restricted(found, record["parts"], wanted))
                elif wanted:
                    shard.load(wanted, found)
            if not whole:
                raise CheckpointError(f"{path} is incomplete or damaged, or of another checkpoint: use an older one")
        finally:
            os.close(fd)
