"""Results in the order in which they come, and references as futures."""

import asyncio

import ray
from ray.util import as_completed, map_unordered

ray.init(num_cpus=4, ignore_reinit_error=True)


@ray.remote
def double(x):
    return 2 * x


@ray.remote(num_returns=2)
def both(x):
    return x, -x


refs = [double.remote(k) for k in range(12)]
print(sorted(as_completed(refs)), sorted(as_completed(refs, chunk_size=5)) == [2 * k for k in range(12)])
print(all(isinstance(one, ray.ObjectRef) for one in as_completed(refs, yield_obj_refs=True)))
print(sorted(map_unordered(double, range(8), backpressure_size=3, chunk_size=2)))
try:
    list(as_completed(refs, num_returns=3))
except ValueError:
    print("num_returns is refused")
ready, rest = ray.wait(refs, num_returns=5, timeout=30)
print(len(ready), len(rest))
first, second = both.remote(3)
print(ray.get([second, first]), double.remote(4).future().result())


async def main():
    one, other = await asyncio.gather(double.remote(5), double.remote(6).as_future())
    return one, other


print(asyncio.run(main()))
nested = ray.put([double.remote(1), ray.put("inner")])
print([ray.get(one) for one in ray.get(nested)])
# prints:
# [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22] True
# True
# [0, 2, 4, 6, 8, 10, 12, 14]
# num_returns is refused
# 5 7
# [-3, 3] 8
# (10, 12)
# [2, 'inner']
