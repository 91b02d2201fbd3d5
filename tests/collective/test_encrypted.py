"""Groups whose ranks connect beyond loopback, in a network namespace of their own: TLS by default."""

import os
import shutil
import subprocess
import sys

import pytest

ADDRESS = "10.77.4.1"
RANKS = """
import sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from fastrt.collective import CollectiveMismatch, CollectiveTimeout, init_group, new_token
from fastrt.coordination import Coordinator, CoordinatorOptions

address = sys.argv[1]
token = new_token()

def join(rank, name, token=token, insecure=False, timeout=20.0):
    return init_group(name=name, rank=rank, world_size=2, address=service.address, node=str(rank), token=token,
                      insecure=insecure, timeout=timeout)

def work(rank, name, insecure):
    with join(rank, name, insecure=insecure) as g:
        assert g._ring._behind._link.sealed is not insecure
        for n in (1, 5000, 1 << 20):
            assert (g.all_reduce(np.full(n, rank + 1.0)) == 3).all()
        assert g.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        sent = g.isend(np.full(300_000, rank), 1 - rank)
        assert (g.recv(np.empty(300_000, int), 1 - rank) == 1 - rank).all()
        sent.wait()
        with g.split("both") as again:
            assert again.all_reduce(np.ones(2))[0] == 2
    return True

def refusal(rank, name, **options):
    try:
        join(rank, name, timeout=2.0, **options)
    except (CollectiveMismatch, CollectiveTimeout) as error:
        return f"{type(error).__name__}: {error}"

options = CoordinatorOptions(f"{address}:0", num_tasks=1, allow_anonymous=True)
with Coordinator(options) as service, ThreadPoolExecutor(2) as pool:
    assert all(pool.map(work, [0, 1], ["tls"] * 2, [False] * 2))
    assert all(pool.map(work, [0, 1], ["clear"] * 2, [True] * 2))
    both = [pool.submit(refusal, 0, "mixed"), pool.submit(refusal, 1, "mixed", insecure=True)]
    print(both[1].result())
    both = [pool.submit(refusal, 0, "strange"), pool.submit(refusal, 1, "strange", token=new_token())]
    print(both[1].result())
    print("done")
"""


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("unshare"), reason="a network namespace needs root and unshare"
)
def test_ranks_beyond_loopback_use_tls_and_refuse_others() -> None:
    setup = f'ip link set lo up && ip addr add {ADDRESS}/32 dev lo && exec {sys.executable} -c "$0" {ADDRESS}'
    done = subprocess.run(["unshare", "-n", "sh", "-c", setup, RANKS], capture_output=True, text=True, timeout=50)
    mixed, strange, last = [*done.stdout.splitlines(), "", "", ""][:3]
    assert last == "done", done.stderr
    assert mixed.startswith("CollectiveMismatch: ")
    assert "rank 0 wants TLS at 10.77.4.1, rank 1 wants no TLS" in mixed
    assert strange.startswith("CollectiveTimeout: ")
    assert "not written by a rank with this token" in strange
