"""Functions that nodes of a test export to their scheduler."""

import fastrt


@fastrt.remote
def square(x):
    return x * x


@fastrt.remote(num_returns=2)
def both(a, b):
    return a + b, [a, b]


@fastrt.remote
def fail():
    raise ValueError("as it should")
