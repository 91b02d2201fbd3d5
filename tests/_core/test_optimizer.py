"""Parameter updates beside the same in NumPy, dense and by rows; and everything that they refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastrt._core.tables import optimizer

F = np.float32
Arrays = list[np.ndarray[Any, Any]]
SIZES = [0, 1, 3, 4, 7, 8, 31, 1024, 4099]


def np_sgd(p: Any, g: Any, s: Arrays, step: int) -> None:
    p -= F(0.1) * (g + F(0.01) * p)


def np_momentum(p: Any, g: Any, s: Arrays, step: int) -> None:
    s[0][:] = F(0.9) * s[0] + (g + F(0.01) * p)
    p -= F(0.1) * s[0]


def np_nesterov(p: Any, g: Any, s: Arrays, step: int) -> None:
    d = g + F(0.01) * p
    s[0][:] = F(0.9) * s[0] + d
    p -= F(0.1) * (d + F(0.9) * s[0])


def np_adagrad(p: Any, g: Any, s: Arrays, step: int) -> None:
    s[0] += g * g
    p -= F(0.1) * g / (np.sqrt(s[0]) + F(1e-10))


def np_adam(p: Any, g: Any, s: Arrays, step: int, decay: float = 0.0) -> None:
    s[0][:] = F(0.9) * s[0] + F(0.1) * g
    s[1][:] = F(0.999) * s[1] + F(0.001) * (g * g)
    p *= F(1 - 0.1 * decay)
    p -= F(0.1 / (1 - 0.9**step)) * s[0] / (np.sqrt(s[1]) * F(1 / np.sqrt(1 - 0.999**step)) + F(1e-8))


def np_adamw(p: Any, g: Any, s: Arrays, step: int) -> None:
    np_adam(p, g, s, step, 0.05)


def np_ftrl(p: Any, g: Any, s: Arrays, step: int) -> None:
    total = s[0] + g * g
    s[1] += g - (np.sqrt(total) - np.sqrt(s[0])) / F(0.1) * p
    s[0][:] = total
    shrunk = np.where(np.abs(s[1]) > F(0.5), np.sign(s[1]) * F(0.5) - s[1], F(0))
    p[:] = shrunk / (np.sqrt(total) / F(0.1) + F(2 * 0.2))


# name -> (count of state arrays, their first value, fastrt's, NumPy's)
KINDS: dict[str, tuple[int, float, Callable[..., None], Callable[..., None]]] = {
    "sgd": (0, 0.0, lambda p, g, s, t, **k: optimizer.sgd(p, g, 0.1, 0.01, **k), np_sgd),
    "momentum": (
        1,
        0.0,
        lambda p, g, s, t, **k: optimizer.momentum(p, g, s[0], 0.1, 0.9, False, 0.01, **k),
        np_momentum,
    ),
    "nesterov": (
        1,
        0.0,
        lambda p, g, s, t, **k: optimizer.momentum(p, g, s[0], 0.1, 0.9, True, 0.01, **k),
        np_nesterov,
    ),
    "adagrad": (1, 0.1, lambda p, g, s, t, **k: optimizer.adagrad(p, g, s[0], 0.1, **k), np_adagrad),
    "adam": (2, 0.0, lambda p, g, s, t, **k: optimizer.adam(p, g, *s, t, 0.1, **k), np_adam),
    "adamw": (2, 0.0, lambda p, g, s, t, **k: optimizer.adam(p, g, *s, t, 0.1, weight_decay=0.05, **k), np_adamw),
    "ftrl": (2, 0.1, lambda p, g, s, t, **k: optimizer.ftrl(p, g, *s, 0.1, 0.5, 0.2, **k), np_ftrl),
}


def close(mine: Any, theirs: Any) -> None:
    assert mine.dtype == theirs.dtype == F
    np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-6)


def states(kind: str, shape: Any) -> Arrays:
    count, first, _, _ = KINDS[kind]
    made = [np.zeros(shape, F) for _ in range(count)]
    if made:
        made[0] += F(first)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_dense_update_is_that_of_numpy(kind: str, size: int) -> None:
    dice = np.random.default_rng(size)
    mine = dice.standard_normal(size).astype(F)
    theirs = mine.copy()
    my_state, their_state = states(kind, size), states(kind, size)
    for step in range(1, 6):
        grad = dice.standard_normal(size).astype(F)
        before = grad.copy()
        KINDS[kind][2](mine, grad, my_state, step)
        KINDS[kind][3](theirs, grad, their_state, step)
        assert np.array_equal(grad, before)
        close(mine, theirs)
    for one, other in zip(my_state, their_state, strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_update_into_another_array_leaves_the_old_parameter(kind: str) -> None:
    dice = np.random.default_rng(7)
    old, grad = dice.standard_normal(1027).astype(F), dice.standard_normal(1027).astype(F)
    new, before, in_place = np.zeros(1027, F), old.copy(), old.copy()
    states_out, states_in = states(kind, 1027), states(kind, 1027)
    old.flags.writeable = False
    KINDS[kind][2](old, grad, states_out, 1, out=new)
    KINDS[kind][2](in_place, grad, states_in, 1, out=in_place)
    assert np.array_equal(old, before)
    assert np.array_equal(new, in_place)
    assert all(np.array_equal(a, b) for a, b in zip(states_out, states_in, strict=True))
    for out in (np.zeros(5, F), grad, np.zeros(1027)):
        with pytest.raises(ValueError, match=r"out must be|share memory"):
            KINDS[kind][2](before, grad, states_out, 1, out=out)
    with pytest.raises(ValueError, match="out= cannot be used"):
        KINDS[kind][2](before, grad[:1], states_out, 1, out=new, rows=np.zeros(1, np.int64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_update_of_rows_is_that_of_these_rows_alone(kind: str, dim: int) -> None:
    dice = np.random.default_rng(dim)
    mine = dice.standard_normal((50, dim)).astype(F)
    theirs = mine.copy()
    my_state, their_state = states(kind, (50, dim)), states(kind, (50, dim))
    for step in range(1, 6):
        rows = dice.permutation(50)[: dice.integers(1, 20)]
        grad = dice.standard_normal((len(rows), dim)).astype(F)
        KINDS[kind][2](mine, grad, my_state, step, rows=rows)
        part = theirs[rows]
        part_state = [one[rows] for one in their_state]
        KINDS[kind][3](part, grad, part_state, step)
        theirs[rows] = part
        for one, other in zip(their_state, part_state, strict=True):
            one[rows] = other
        close(mine, theirs)
    KINDS[kind][2](mine, np.empty((0, dim), F), my_state, 6, rows=np.empty(0, np.int64))
    close(mine, theirs)


def test_ftrl_makes_small_weights_exactly_zero() -> None:
    weight, total, linear = np.ones(8, F), np.full(8, 0.1, F), np.zeros(8, F)
    optimizer.ftrl(weight, np.zeros(8, F), total, linear, 0.1, l1=1.0)
    assert not weight.any()


def test_nan_in_a_gradient_stays_where_it_is() -> None:
    weight, mean, square = np.ones(9, F), np.zeros(9, F), np.zeros(9, F)
    grad = np.ones(9, F)
    grad[4] = np.nan
    optimizer.adam(weight, grad, mean, square, 1, 0.1)
    assert np.isnan(weight).nonzero()[0].tolist() == [4]


@pytest.mark.parametrize(
    ("arrays", "rows", "error", "words"),
    [
        ((np.ones(4), np.ones(4, F)), None, TypeError, "float32"),
        ((np.ones(4, F), np.ones(4, np.int32)), None, TypeError, "float32"),
        ((np.ones(4, F), np.ones(5, F)), None, ValueError, "5 elements, the parameter 4"),
        ((np.ones(4, F), np.ones((2, 2), F).T[:1]), None, (ValueError, BufferError), ""),
        ((np.ones(4, F), np.ones(2, F)), np.array([0], np.int32), TypeError, "int64"),
        ((np.ones(4, F), np.ones(2, F)), np.array([2]), IndexError, "row 2 does not exist"),
        ((np.ones(4, F), np.ones(2, F)), np.array([-1]), IndexError, "row -1"),
        ((np.ones(4, F), np.ones(3, F)), np.array([0, 1]), ValueError, "2 rows"),
        ((np.ones(4, F), np.ones(3, F)), np.array([0]), ValueError, "1 rows"),
        ((np.ones(4, F), np.ones(3, F)), np.empty(0, np.int64), ValueError, "rows= is empty"),
        ((b"aaaaaaaaaaaaaaaa", np.ones(4, F)), None, (BufferError, TypeError), ""),
        ((None, np.ones(4, F)), None, TypeError, ""),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changed(arrays: Any, rows: Any, error: Any, words: str) -> None:
    before = [np.array(one) if isinstance(one, np.ndarray) else one for one in arrays]
    with pytest.raises(error, match=words or None):
        optimizer.sgd(*arrays, 0.1, rows=rows)
    for one, other in zip(arrays, before, strict=True):
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def test_state_of_another_size_shared_memory_and_bad_numbers_are_refused() -> None:
    one, two = np.ones(8, F), np.ones(8, F)
    with pytest.raises(ValueError, match="array 2 of an update has 7 elements"):
        optimizer.adagrad(one, two, np.ones(7, F), 0.1)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.sgd(one, one, 0.1)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.sgd(one[:5], one[3:], 0.1)
    with pytest.raises(ValueError, match="the first one is 1"):
        optimizer.adam(one, two, np.ones(8, F), np.ones(8, F), 0, 0.1)
    with pytest.raises(ValueError, match="more than 0"):
        optimizer.ftrl(one, two, np.ones(8, F), np.ones(8, F), 0.0)
    locked = np.ones(8, F)
    locked.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        optimizer.sgd(locked, two, 0.1)
    assert (one == 1).all()
