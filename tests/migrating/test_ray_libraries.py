"""Libraries of others that were written for Ray run on fastrt, unmodified, with the results of Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastrt

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", ["modin_frames", "hamilton_graph", "evotorch_search", "daft_query"])
def test_program_of_another_library_prints_the_same_on_ray(program, runtime_dir):
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": str(Path(fastrt.__file__).parents[1])}
    command = [sys.executable, BENCH / "compare_ray_libraries.py", "--rounds", "1", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {program} |" in done.stdout


def test_names_of_ray_that_libraries_import_are_there_and_refuse_in_words():
    code = (
        "import ray\n"
        "from ray.data import from_pandas_refs, Dataset\n"
        "from ray._private.services import get_node_ip_address\n"
        "from ray.autoscaler.sdk import request_resources\n"
        "request_resources(num_cpus=4)\n"
        "assert ray._raylet.ObjectRef is ray.ObjectRef and get_node_ip_address().count('.') == 3\n"
        "assert not isinstance(1, Dataset)\n"
        "for use in (lambda: from_pandas_refs([]), lambda: Dataset.map):\n"
        "    try:\n"
        "        use()\n"
        "    except NotImplementedError as exc:\n"
        "        print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", f"import fastrt.ray.alias as a\na.install()\n{code}"],
                          capture_output=True, text=True, timeout=50)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fastrt has no ray.data.from_pandas_refs: ")
    assert lines[1].startswith("fastrt has no ray.data.Dataset.map: ")


def test_bar_of_tqdm_ray_counts_and_ends_its_line(capfd):
    from fastrt.ray.experimental.tqdm_ray import tqdm

    assert list(tqdm(range(3), desc="walk", flush_interval_s=0)) == [0, 1, 2]
    bar = tqdm(total=10, unit="row")
    bar.update(4)
    bar.set_description("rows")
    bar.close()
    said = capfd.readouterr().err
    assert "walk: 100% [####################] 3/3" in said
    assert "rows:  40% [########------------] 4/10" in said
    assert said.endswith("row/s\n")
