from fastrt._core.memory.clients import Client
from fastrt._core.objects.handles import Ref

def name_object(client: Client, ref: Ref, objref: int) -> None: ...
