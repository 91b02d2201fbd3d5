from typing import Any, final

from typing_extensions import Buffer, disjoint_base

@disjoint_base
class Chunk: ...

@disjoint_base
class Part:
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Taker: ...

@final
class Stream:
    def __new__(cls, head: bytes, buffers: list[Buffer]) -> Stream: ...
    def __arrow_c_stream__(self, requested_schema: object = ...) -> object: ...

def take(exporter: Any) -> tuple[bytes, list[Part]]: ...
