from typing_extensions import disjoint_base

from fastrt._core.objects.handles import Pin

@disjoint_base
class Private:
    def __buffer__(self, flags: int, /) -> memoryview: ...

def map_private(pin: Pin) -> Private | None: ...
