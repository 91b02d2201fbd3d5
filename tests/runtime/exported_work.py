"""Functions that nodes of a test export to their scheduler."""

import os
import threading

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


@fastrt.remote
def meet(folder, mine, theirs):
    """Wait for another call of this function, which must run beside this one."""
    open(os.path.join(folder, mine), "x").close()
    until = threading.Event()
    while not os.path.exists(os.path.join(folder, theirs)):
        until.wait(0.005)
    return mine


@fastrt.remote
def large(n):
    import numpy

    return numpy.arange(float(n))
