"""A search for parameters: ridge regression by cross-validation, coarse first and finer around the best.

Run: python examples/parameter_search.py [--engine fastrt|local|ray|ray-itself] [--size N]

The data is put once; every trial reads the same memory. Trials are started a few at a time, the next one as soon as
any has ended, so that a long one delays no other. The result is compared with a plain loop over the same trials.
"""

import numpy as np
from engines import run

FOLDS = 4
IN_FLIGHT = 8
GRID = np.logspace(-2, 3, 8), np.linspace(0.6, 1.4, 5)


def make_data(rows, columns):
    random = np.random.default_rng(7)
    x = random.normal(size=(rows, columns))
    y = x @ random.normal(size=columns) + random.normal(scale=2.0, size=rows)
    return x, y


def error_of(x, y, penalty, power):
    """Mean squared error over the folds, of features that are raised to a power by sign."""
    x = np.sign(x) * np.abs(x) ** power
    part, errors = np.arange(len(y)) % FOLDS, []
    for fold in range(FOLDS):
        train, test = part != fold, part == fold
        matrix = x[train].T @ x[train] + penalty * np.eye(x.shape[1])
        weights = np.linalg.solve(matrix, x[train].T @ y[train])
        errors.append(np.mean((x[test] @ weights - y[test]) ** 2))
    return float(np.mean(errors))


def search(trial, penalties, powers):
    """The grid around the best of a coarser grid, twice."""
    best = (float("inf"), 0.0, 0.0)
    for _ in range(2):
        grid = [(penalty, power) for penalty in penalties for power in powers]
        best = min([best, *trial(grid)])
        penalties = best[1] * np.array([0.5, 0.8, 1.25, 2.0])
        powers = best[2] + np.array([-0.1, 0.0, 0.1])
    return best


def main(ray, size):
    """The best (error, penalty, power), found by tasks.

    Args:
        ray: the module: fastrt or Ray.
        size: hundreds of rows.
    """
    x, y = make_data(100 * size, 20)
    error = ray.remote(error_of)
    x_ref, y_ref = ray.put(x), ray.put(y)

    def in_tasks(grid):
        waiting, asked, results = list(grid)[::-1], {}, []
        while waiting or asked:
            while waiting and len(asked) < IN_FLIGHT:
                parameters = waiting.pop()
                asked[error.remote(x_ref, y_ref, *parameters)] = parameters
            done, _ = ray.wait(list(asked), num_returns=1)
            results += [(ray.get(ref), *asked.pop(ref)) for ref in done]
        return results

    return [float(value) for value in search(in_tasks, *GRID)]


def check(result, size):
    """Compare with a plain loop."""
    x, y = make_data(100 * size, 20)
    assert result == list(search(lambda grid: [(error_of(x, y, *p), *p) for p in grid], *GRID))


if __name__ == "__main__":
    run(main, check, size=4)
