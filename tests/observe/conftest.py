"""Nothing but a start of gRPC, which opens now what it keeps open for good."""

from fastrt.observe.profile import TwoNodes

with TwoNodes(1024, "token") as _nodes:
    _nodes.prepare(1024)
    for _run in _nodes.paths().values():
        _run()
del _nodes, _run
