"""The optimizers of parameter tables: names, parameters, state arrays, and one update.

Each is a frozen dataclass, so it can be compared, printed and sent. The arithmetic is in `_core.tables.optimizer`. For
embeddings only the rows of the pushed keys are updated: moments and weight decay of other rows stay as they are.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from fastrt._core.tables import optimizer


@dataclass(frozen=True)
class Optimizer:
    """Base class of all optimizers.

    Attributes:
        lr: the default learning rate of a push.
    """

    lr: float = 0.01
    dense_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{type(self).__name__}.{field.name} is {value!r}; it must be a number, 0 or more")
            object.__setattr__(self, field.name, float(value))

    @property
    def states(self) -> tuple[float, ...]:
        """The initial value of each state array."""
        return ()

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Update in place, or into another array with `out=`; only these rows with `rows=`.

        Raises:
            NotImplementedError: always, in this base class.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The name and parameters, for a message or a file."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class SGD(Optimizer):
    """param -= lr * (grad + weight_decay * param)."""

    weight_decay: float = 0.0

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Apply one SGD step."""
        optimizer.sgd(param, grad, lr, self.weight_decay, **how)


@dataclass(frozen=True)
class Momentum(Optimizer):
    """SGD with momentum, optionally Nesterov's."""

    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[float, ...]:
        """The velocity."""
        return (0.0,)

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Apply one momentum step."""
        optimizer.momentum(param, grad, states[0], lr, self.momentum, self.nesterov, self.weight_decay, **how)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: learning rates fall with the root of the sum of squared gradients, which starts at `initial`."""

    eps: float = 1e-10
    initial: float = 0.0
    weight_decay: float = 0.0

    @property
    def states(self) -> tuple[float, ...]:
        """The sum of squares."""
        return (self.initial,)

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Apply one Adagrad step."""
        optimizer.adagrad(param, grad, states[0], lr, self.eps, self.weight_decay, **how)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam over a whole dense table; for embeddings see `LazyAdam`."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    dense_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise ValueError(f"the betas of {type(self).__name__} must be less than 1")

    @property
    def states(self) -> tuple[float, ...]:
        """The means of the gradient and of its square."""
        return (0.0, 0.0)

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Apply one Adam step."""
        optimizer.adam(
            param, grad, states[0], states[1], step, lr, self.beta1, self.beta2, self.eps, self._decay, **how
        )

    @property
    def _decay(self) -> float:
        return 0.0


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 0.01

    @property
    def _decay(self) -> float:
        return self.weight_decay


@dataclass(frozen=True)
class LazyAdam(AdamW):
    """Adam that updates only the rows of the pushed keys; its step number counts all pushes."""

    weight_decay: float = 0.0
    dense_only: ClassVar[bool] = False


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularised leader (FTRL-proximal); `initial` is the first value of the sum of squares."""

    lr: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    initial: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr <= 0 or self.initial <= 0:
            raise ValueError("lr and initial of FTRL must be more than 0")

    @property
    def states(self) -> tuple[float, ...]:
        """The sum of squares, and the linear term."""
        return (self.initial, 0.0)

    def update(self, param: Any, grad: Any, states: list[Any], step: int, lr: float, **how: Any) -> None:
        """Apply one FTRL step."""
        optimizer.ftrl(param, grad, states[0], states[1], lr, self.l1, self.l2, **how)


KINDS: dict[str, type[Optimizer]] = {
    kind.__name__: kind for kind in (SGD, Momentum, Adagrad, Adam, AdamW, LazyAdam, FTRL)
}


def from_json(found: Any) -> Optimizer:
    """Return the optimizer that `to_json` described.

    Raises:
        ValueError: the optimizer is unknown, or a number is out of range.
    """
    if not isinstance(found, dict) or found.get("name") not in KINDS:
        raise ValueError(f"{found!r} is not an optimizer; those are {', '.join(KINDS)}")
    kind = KINDS[found["name"]]
    numbers = {name: value for name, value in found.items() if name != "name"}
    known = {field.name for field in dataclasses.fields(kind)}
    if not set(numbers) <= known:
        raise ValueError(f"{found['name']} has no parameter {', '.join(sorted(set(numbers) - known))}")
    return kind(**numbers)
