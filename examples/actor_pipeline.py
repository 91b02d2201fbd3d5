"""A pipeline of actors with backpressure: blocks go from stage to stage, and the number on their way is bounded.

Run: python examples/actor_pipeline.py [--engine fastrt|local|ray|ray-itself] [--size N]

A stage's result is the next one's argument, by reference: the driver sees none of the blocks. It admits a block when
one has come out, so a slow stage delays the source instead of filling the store. Each stage counts its blocks. Stages
with state from one block to the next (the running mean) need their calls in order, which actors guarantee.
"""

from collections import deque

import numpy as np
from engines import run

ON_THEIR_WAY = 6
WIDTH = 4096


class Source:
    """Blocks of a signal with noise, the same in every run."""

    def block(self, number):
        noise = np.random.default_rng(number).normal(size=WIDTH)
        return np.sin(np.arange(number * WIDTH, (number + 1) * WIDTH) / 50.0) + 0.3 * noise


class Smooth:
    """A running mean that goes on across blocks."""

    def __init__(self, length):
        self.length = length
        self.before = np.zeros(length - 1)

    def apply(self, block):
        whole = np.concatenate([self.before, block])
        self.before = whole[len(whole) - self.length + 1 :].copy()
        sums = np.cumsum(np.concatenate([[0.0], whole]))
        return (sums[self.length :] - sums[: -self.length]) / self.length


class Crossings:
    """Counts how often the signal changes its sign."""

    def __init__(self):
        self.last = 1.0
        self.count = 0
        self.blocks = 0

    def apply(self, block):
        signs = np.sign(np.concatenate([[self.last], block]))
        self.count += int(np.count_nonzero(np.diff(signs)))
        self.last = float(block[-1])
        self.blocks += 1
        return self.count

    def result(self):
        return [self.blocks, self.count]


def directly(size):
    """The same by plain objects."""
    source, stages, last = Source(), [Smooth(25), Smooth(9)], Crossings()
    for number in range(size):
        block = source.block(number)
        for stage in stages:
            block = stage.apply(block)
        last.apply(block)
    return last.result()


def main(ray, size):
    """Blocks that came through, and changes of sign.

    Args:
        ray: the module: fastrt or Ray.
        size: blocks.
    """
    source = ray.remote(Source).remote()
    stages = [ray.remote(Smooth).remote(25), ray.remote(Smooth).remote(9), ray.remote(Crossings).remote()]
    inside, most = deque(), 0
    for number in range(size):
        if len(inside) == ON_THEIR_WAY:
            ray.get(inside.popleft())
        ref = source.block.remote(number)
        for stage in stages:
            ref = stage.apply.remote(ref)
        inside.append(ref)
        most = max(most, len(inside))
    assert most <= ON_THEIR_WAY
    return ray.get(stages[-1].result.remote())


def check(result, size):
    """Compare with the same by plain objects."""
    assert result == directly(size)


if __name__ == "__main__":
    run(main, check, size=200)
