from typing_extensions import Buffer

def sgd(
    param: Buffer,
    grad: Buffer,
    lr: float,
    weight_decay: float = ...,
    rows: Buffer | None = ...,
    out: Buffer | None = ...,
) -> None: ...
def momentum(
    param: Buffer,
    grad: Buffer,
    velocity: Buffer,
    lr: float,
    mu: float = ...,
    nesterov: bool = ...,
    weight_decay: float = ...,
    rows: Buffer | None = ...,
    out: Buffer | None = ...,
) -> None: ...
def adagrad(
    param: Buffer,
    grad: Buffer,
    total: Buffer,
    lr: float,
    eps: float = ...,
    weight_decay: float = ...,
    rows: Buffer | None = ...,
    out: Buffer | None = ...,
) -> None: ...
def adam(
    param: Buffer,
    grad: Buffer,
    mean: Buffer,
    square: Buffer,
    step: int,
    lr: float,
    beta1: float = ...,
    beta2: float = ...,
    eps: float = ...,
    weight_decay: float = ...,
    rows: Buffer | None = ...,
    out: Buffer | None = ...,
) -> None: ...
def ftrl(
    param: Buffer,
    grad: Buffer,
    total: Buffer,
    linear: Buffer,
    lr: float,
    l1: float = ...,
    l2: float = ...,
    rows: Buffer | None = ...,
    out: Buffer | None = ...,
) -> None: ...
