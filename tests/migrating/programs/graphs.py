"""Graphs of calls: bind and execute."""

import ray
from ray.dag import InputNode, MultiOutputNode

ray.init(num_cpus=4, ignore_reinit_error=True)


@ray.remote
def plus(a, b):
    return a + b


@ray.remote
class Purse:
    def __init__(self, coins):
        self.coins = coins

    def put(self, coins):
        self.coins += coins

    def count(self):
        return self.coins


print(ray.get(plus.bind(plus.bind(1, 2), 3).execute()))
one, other = Purse.bind(10), Purse.bind(20)
one.put.bind(1)
one.put.bind(2)
other.put.bind(4)
total = plus.bind(one.count.bind(), other.count.bind())
print(ray.get(total.execute()), ray.get(total.execute()))

with InputNode() as given:
    twice = plus.bind(given, given)
print(ray.get(twice.execute(4)), ray.get(twice.execute("ab")))
with InputNode() as given:
    parts = plus.bind(given[0], given.rest)
print(ray.get(parts.execute(5, rest=6)))
with InputNode() as given:
    several = MultiOutputNode([plus.bind(given, 1), plus.bind(given, 2)])
print(ray.get(several.execute(10)))
# prints:
# 6
# 37 37
# 8 abab
# 11
# [11, 12]
