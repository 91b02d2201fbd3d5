"""Logistic regression on handwritten digits, the data divided among processes that all_reduce their gradients.

Run: python examples/all_reduce_training.py [PROCESSES]      (needs scikit-learn, for its bundled data)

Every process computes the gradient over its own rows; their sum is the gradient over all rows, so each step is
equal to a step of one process with all the data, up to the rounding of sums. The program trains both ways and compares.
"""

import multiprocessing
import sys

import numpy as np
from sklearn.datasets import load_digits

from fastrt.collective import init_group

STEPS, RATE, DECAY = 100, 0.5, 1e-3
TEST_EVERY = 5  # every fifth row is kept for the test


def data():
    """Pixels from 0 to 1 with a column of ones, and one row of ten for each digit; for training and for the test."""
    pixels, digits = load_digits(return_X_y=True)
    x = np.hstack([pixels / 16, np.ones((len(pixels), 1))])
    y = np.eye(10)[digits]
    test = np.arange(len(x)) % TEST_EVERY == 0
    return (x[~test], y[~test]), (x[test], y[test])


def gradient(weights, x, y):
    """Of the sum, not the mean, of the rows' losses: sums can be added up."""
    scores = x @ weights
    scores -= scores.max(axis=1, keepdims=True)
    likely = np.exp(scores)
    likely /= likely.sum(axis=1, keepdims=True)
    return x.T @ (likely - y)


def train(x, y, total, reduce):
    """Full-batch gradient descent; `reduce` makes a gradient over some rows one over all `total` rows."""
    weights = np.zeros((x.shape[1], y.shape[1]))
    for _ in range(STEPS):
        weights -= RATE * (reduce(gradient(weights, x, y)) / total + DECAY * weights)
    return weights


def accuracy(weights, x, y):
    return float(np.mean((x @ weights).argmax(axis=1) == y.argmax(axis=1)))


def member(rank, world_size, result):
    """One process: its own rows, the gradients of all."""
    (x, y), _ = data()
    with init_group(name="digits", rank=rank, world_size=world_size) as group:
        mine = group.empty((x.shape[1], y.shape[1]), np.float64)  # where the others can read it without a copy

        def reduce(part):
            mine[:] = part
            return group.all_reduce(mine)

        weights = train(x[rank::world_size], y[rank::world_size], len(x), reduce)
        same = group.all_gather_object(weights.tobytes())
        assert len(set(same)) == 1, "all processes have the same weights, bit for bit"
    if rank == 0:
        result.send(weights)


def main(world_size=2):
    (x, y), test = data()
    alone = train(x, y, len(x), lambda whole: whole)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=member, args=(rank, world_size, sender)) for rank in range(world_size)]
    for process in processes:
        process.start()
    together = receiver.recv()
    for process in processes:
        process.join()
    print(f"one process: {accuracy(alone, *test):.4f} of the test's digits are right")
    print(f"{world_size} processes: {accuracy(together, *test):.4f}")
    print(f"largest difference of a weight: {np.abs(alone - together).max():.1e}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
