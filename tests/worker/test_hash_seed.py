"""Hashes of text in workers: those of the driver where PYTHONHASHSEED says which."""

SEED = """
import fastrt

@fastrt.remote
def hashed(text):
    return hash(text)

with fastrt.init(2, "64MiB"):
    print(hash("key"), fastrt.get([hashed.options(num_cpus=2).remote("key"), hashed.remote("key")]))
"""


def test_workers_hash_text_as_the_driver_does_where_the_seed_is_given(program):
    out, _ = program(SEED, PYTHONHASHSEED="7").finish()
    driver, workers = out.split(" ", 1)
    assert workers.strip() == f"[{driver}, {driver}]"
