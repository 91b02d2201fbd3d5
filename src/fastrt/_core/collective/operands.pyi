from typing_extensions import disjoint_base

NAMES: dict[int, str]

@disjoint_base
class Held: ...
