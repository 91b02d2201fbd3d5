"""`fastrt run --jax` with real JAX: a task of each rank's node is the JAX process of that rank."""

import os
import subprocess

from support.cluster import FASTRT
from support.jax_envs import python_of
from support.jax_programs import APP, JAX, VERSION


def test_jax_of_two_ranks_sums_over_both(runtime_dir, tmp_path):
    app = tmp_path / "app.py"
    app.write_text(APP)
    env = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_KEY_FILE": str(tmp_path / "keys" / "key")}
    env |= {"FASTRT_OBJECT_STORE_MEMORY": "64MiB", "FASTRT_SPILL_DIR": str(tmp_path / "spill")}
    words = ["run", "--jax", "--size", "2", "--head", "127.0.0.1", "--job", "jax", "--num-workers", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    ranks = []
    try:
        for rank in range(2):
            command = [*FASTRT, *words, "--rank", str(rank), str(app), str(python_of(VERSION)), JAX]
            ranks.append(subprocess.Popen(command, **pipes))
        out, err = ranks[0].communicate(timeout=60)
        assert (ranks[0].returncode, out) == (0, "['28', '28']\n"), err
        assert ranks[1].communicate(timeout=60)[0] == ""
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()
