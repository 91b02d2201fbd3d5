"""Beside other libraries, where they are installed: MPI's own reductions, and torch's tensors."""

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import fastrt
from fastrt.collective import init_group

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]
# In a process of its own: MPI is started by its import, and keeps threads and descriptors.
MPI_PROGRAM = """
    import sys, numpy as np
    from mpi4py import MPI
    ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "band": MPI.BAND, "bor": MPI.BOR}
    found = {}
    with np.load(sys.argv[1]) as inputs:
        for key, arrays in inputs.items():
            dtype, op = key.split("-")
            total = arrays[0].copy()
            for one in arrays[1:]:
                into = one.copy()
                ops[op].Reduce_local(total, into)
                total = into
            found[key] = total
    np.savez(sys.argv[2], **found)
"""


def cases():
    for dtype in DTYPES:
        for op in ("sum", "prod", "min", "max", *(("band", "bor") if "int" in dtype else ())):
            rng = np.random.default_rng(len(dtype + op))
            if "int" in dtype:
                # Without overflow: Open MPI's sums of int8 stop at the largest value, ours wrap as NumPy's do.
                yield f"{dtype}-{op}", rng.integers(-5 if dtype[0] == "i" else 0, 6, (3, 1001), dtype)
            else:
                yield f"{dtype}-{op}", rng.normal(size=(3, 1001)).astype(dtype)


def run_cases(rank, world_size, name):
    with init_group(name=name, rank=rank, world_size=world_size) as g:
        return {key: g.all_reduce(arrays[rank].copy(), key.split("-")[1]) for key, arrays in cases()}


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="compared with mpi4py where it is installed")
def test_results_are_those_of_mpi(ranks, name, tmp_path):
    np.savez(tmp_path / "inputs.npz", **dict(cases()))
    words = [sys.executable, "-c", textwrap.dedent(MPI_PROGRAM), tmp_path / "inputs.npz", tmp_path / "found.npz"]
    subprocess.run(words, check=True, timeout=50)
    for found in ranks(3, run_cases, name):
        with np.load(tmp_path / "found.npz") as wanted:
            assert set(wanted) == set(found)
            for key, want in wanted.items():
                assert found[key].tobytes() == want.tobytes(), key


MPI_PYTHON = os.environ.get("FASTRT_MPI", sys.executable)
HAS_MPI = "FASTRT_MPI" in os.environ or importlib.util.find_spec("mpi4py") is not None


@pytest.mark.skipif(not HAS_MPI, reason="no mpi4py: FASTRT_MPI may name a Python that has it, and an MPI")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_operations_of_all_kinds_come_out_as_with_mpi(name, count):
    mpiexec = shutil.which("mpiexec", path=str(Path(MPI_PYTHON).parent)) or "mpiexec"
    options = ["-n", str(count), "--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    script = Path(__file__).with_name("mpi_ranks.py")
    source = str(Path(fastrt.__file__).parents[1])
    done = subprocess.run(
        [mpiexec, *options, MPI_PYTHON, str(script), name],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all are equal") == count


def run_torch(rank, world_size, name):
    import torch

    with init_group(name=name, rank=rank, world_size=world_size) as g:
        results = []
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            tensor = torch.arange(5, dtype=dtype) + rank
            assert g.all_reduce(tensor) is tensor
            results.append(tensor.tolist())
        gathered = g.all_gather(torch.ones(2, 3) * rank)
        assert gathered.shape == (world_size, 2, 3)
        with pytest.raises(ValueError, match="contiguous"):
            g.all_reduce(torch.ones(4, 4).t()[1:])
        return results


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="tensors come from torch")
def test_tensors_of_torch_are_reduced_in_place(ranks, name):
    assert ranks(2, run_torch, name) == [[[1, 3, 5, 7, 9]] * 3] * 2
