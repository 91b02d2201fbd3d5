"""A sum as a tree of tasks, and a sort as a tree of merges; the driver never holds more than the root's value.

Run: python examples/tree_reduction.py [--engine fastrt|local|ray|ray-itself] [--size N]

All tasks are submitted at once: each names the results of two others as its arguments, and runs when these are ready.
Whole numbers are added, so the order of the additions makes no difference; the result is known.
"""

import numpy as np
from engines import run

LENGTH = 2000


def leaf(number):
    """Some whole numbers, all different among the leaves."""
    return np.random.default_rng(number).permutation(np.arange(number * LENGTH, (number + 1) * LENGTH, dtype=np.int64))


def total(values):
    return int(values.sum())


def in_order(values):
    return np.sort(values)


def add(a, b):
    return a + b


def merge(a, b):
    """Two sorted arrays as one."""
    both = np.concatenate([a, b])
    both.sort(kind="stable")
    return both


def tree(join, refs):
    """Join neighbours until one is left."""
    refs = list(refs)
    while len(refs) > 1:
        refs = [join.remote(*refs[k : k + 2]) if k + 1 < len(refs) else refs[k] for k in range(0, len(refs), 2)]
    return refs[0]


def main(ray, size):
    """The sum of all numbers, and all of them in order.

    Args:
        ray: the module: fastrt or Ray.
        size: leaves.
    """
    make, sum_up, adder = ray.remote(leaf), ray.remote(total), ray.remote(add)
    sorter, merger = ray.remote(in_order), ray.remote(merge)
    leaves = [make.remote(number) for number in range(size)]
    grand = tree(adder, [sum_up.remote(values) for values in leaves])
    whole = tree(merger, [sorter.remote(values) for values in leaves])
    del leaves
    grand, whole = ray.get([grand, whole])
    return [grand, whole.tolist()]


def check(result, size):
    """Check against all numbers from 0 on."""
    count = size * LENGTH
    assert result == [count * (count - 1) // 2, list(range(count))]


if __name__ == "__main__":
    run(main, check, size=100)
