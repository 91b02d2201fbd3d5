"""A matrix product from its blocks: each task multiplies a row of blocks by a column, in NumPy's BLAS.

Run: python examples/matrix_blocks.py [--engine fastrt|local|ray|ray-itself] [--size N]

Every task computes with as many threads as it has CPUs (one, unless it asks for more): tasks on all cores, each with
threads for all cores, would compete for the cores. Numbers are small integers, so that sums are exact in any order.
"""

import numpy as np
from engines import run

EDGE = 384  # rows and columns of a block
DEEP = 4  # blocks in a row


def block(matrix, row, column):
    """A block of one of the two matrices, the same in every run."""
    return np.random.default_rng((matrix, row, column)).integers(-8, 9, (EDGE, EDGE)).astype(np.float64)


def product(row, column):
    """One block of the product: its trace, and the sum of its squares."""
    found = sum(block(0, row, k) @ block(1, k, column) for k in range(DEEP))
    return [int(np.trace(found)), int(np.square(found).sum())]


def main(ray, size):
    """Traces and squares, added up over all blocks of the product.

    Args:
        ray: the module: fastrt or Ray.
        size: blocks of the product.
    """
    task = ray.remote(product)
    found = ray.get([task.remote(number // DEEP, number % DEEP) for number in range(size)])
    return [sum(one[0] for one in found), sum(one[1] for one in found)]


def check(result, size):
    """Compare with the same work in a loop."""
    found = [product(number // DEEP, number % DEEP) for number in range(size)]
    assert result == [sum(one[0] for one in found), sum(one[1] for one in found)]


if __name__ == "__main__":
    run(main, check, size=64)
