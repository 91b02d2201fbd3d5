"""`fastrt run` under real launchers: Slurm on three hosts of their own, Open MPI and MPICH. Long tests."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from concurrent import futures
from pathlib import Path

import pytest

from fastrt.launch import manifest as manifests
from fastrt.net.grpc.identity import new_token
from support import slurm as slurms
from support.cluster import FASTRT
from support.disks import with_own_shm
from support.jax_members import MEMBERS
from support.jobs import APP, SLOW, WAIT, captured, is_swept, kill_all, needs, rest_of
from support.machines import Machines
from support.netns import UnavailableError

ROOT = Path(__file__).resolve().parents[2]
FIRST_TASK_S = 2.0  # from srun to the first task on the other node
ALONE_S = 0.7  # for one process without srun; under load srun's job took 1.5 to 2.4 times as long as that
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture
def slurm(machines, tmp_path):
    needs(*slurms.PROGRAMS)
    folder = tmp_path / "slurm"
    folder.mkdir()
    made = slurms.Slurm(folder, machines)
    yield made
    made.close()


class Srun:
    """Starts jobs by srun on the host ctl."""

    def __init__(self, slurm, env):
        self._slurm = slurm
        self._slurm.env.update(env)

    def start(self, *words, options=(), nodes=2):
        return self._slurm.srun(
            f"-N{nodes}", *options, *FASTRT, "run", *words,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words, **about):
        process = self.start(*words, **about)
        out, err = self._slurm.output(process)
        return process.returncode, out, err


@pytest.fixture
def srun(slurm, command):
    return Srun(slurm, command.env)


def test_slurm_job_is_one_cluster_whose_exit_code_is_the_programs(srun, program):
    path = program(APP)
    for code in (0, 9):
        ended, out, err = srun.run("--num-workers", "1", path, str(code))
        assert ended == code, err
        about = json.loads(out)
        assert about["names"] == ["n1", "n2"]
        assert [row[0] for row in about["hosts"]] == ["n2"]
        assert not rest_of(path)


def test_first_task_on_the_other_node_has_run_within_two_seconds_of_srun(srun, command, program):
    """The best of five counts, and a machine that starts one process of `fastrt run` more slowly has more time."""
    path, took = program(APP), []
    for _ in range(5):
        start = time.time()
        code, out, err = command.run("--num-workers", "1", path, "0")
        assert code == 0, err
        alone = json.loads(out)["seen"] - start
        start = time.time()
        code, out, err = srun.run("--num-workers", "1", path, "0")
        assert code == 0, err
        took.append((json.loads(out)["seen"] - start, alone))
        if took[-1][0] < FIRST_TASK_S * max(1.0, alone / ALONE_S):
            return
    raise AssertionError(f"from srun to the first task, and beside it the start of one process alone: {took}")


@pytest.fixture
def finds_devices(monkeypatch):
    monkeypatch.setenv("FASTRT_DETECT_DEVICES", "1")


@pytest.mark.usefixtures("finds_devices")  # before the environment of the commands is made
def test_gpus_of_a_slurm_step_are_those_that_tasks_get(srun, program):
    text = (
        "import fastrt, json, os\n"
        "@fastrt.remote(num_gpus=1)\ndef mine():\n"
        "    return os.uname().nodename, os.environ['CUDA_VISIBLE_DEVICES'], fastrt.get_gpu_ids()\n"
        "with fastrt.init():\n"
        "    nodes = fastrt.nodes()\n"
        "    amounts = {node['NodeName']: node['Resources'].get('GPU') for node in nodes}\n"
        "    tasks = [mine.options(scheduling=node['NodeID']).remote() for node in nodes for _ in range(4)]\n"
        "    given = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "    print(json.dumps([amounts, given, fastrt.get(tasks)]))\n"
    )
    code, out, err = srun.run("--num-workers", "2", program(text), options=["--gres=gpu:2"])
    assert code == 0, err
    amounts, given, ran = json.loads(out)
    assert amounts == {"n1": 2.0, "n2": 2.0}  # of the three of each
    assert {host for host, _, _ in ran} == {"n1", "n2"}
    for _, variable, ids in ran:
        assert [variable] == [str(one) for one in ids]
        assert variable in given.split(",")


def test_tasks_of_a_slurm_job_meet_at_its_coordinator_for_jax(srun, program):
    code, out, err = srun.run("--jax", "--num-workers", "1", program(MEMBERS))
    assert (code, out) == (0, "[(0, '2', 2), (1, '2', 2)] 0 127.0.0.1:0\n"), err


def test_two_jobs_of_one_user_on_the_same_machines_are_two_clusters(srun, slurm, program):
    path = program(APP)
    jobs = [srun.start("--num-workers", "1", path, "0") for _ in range(2)]
    for job in jobs:
        out, err = slurm.output(job)
        assert job.returncode == 0, err
        assert json.loads(out)["names"] == ["n1", "n2"]


def test_program_that_raises_ends_the_slurm_job_with_its_traceback(srun, program):
    code, _, err = srun.run("--num-workers", "1", program("import fastrt\nfastrt.init()\nraise ValueError('wrong')\n"))
    assert code == 1
    assert "ValueError: wrong" in err


def test_program_without_room_in_shared_memory_runs(srun, slurm, program):
    text = (
        "import fastrt, numpy as np\n"
        "@fastrt.remote\ndef total(x):\n    return float(x.sum())\n"
        "with fastrt.init():\n"
        "    refs = [fastrt.put(np.ones(1_000_000)) for _ in range(12)]\n"  # 96 MB in a /dev/shm of 64 MB
        "    print(sum(fastrt.get([total.remote(ref) for ref in refs])))\n"
    )
    path = program(text)
    del slurm.env["FASTRT_OBJECT_STORE_MEMORY"]
    words = [*FASTRT, "run", "--num-workers", "1", path]
    process = slurm.srun("-N2", *with_own_shm("64m"), *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = slurm.output(process)
    assert (process.returncode, out) == (0, "12000000.0\n"), err


def test_node_that_comes_late_is_named_and_then_joins(slurm, command, program, tmp_path):
    """Rank 1 comes once rank 0 has named it; the patience is shorter than 30 s."""
    path, named = program(APP), tmp_path / "named"
    slurm.env.update(command.env)
    late = f'[ $SLURM_PROCID = 0 ] || while [ ! -e {named} ]; do read -t 0.1 x <> {tmp_path}/fifo; done; exec "$@"'
    os.mkfifo(tmp_path / "fifo")
    words = ["bash", "-c", late, "sh", *FASTRT, "run", "--patience", "0.5", "--num-workers", "1", path, "0"]
    process = slurm.srun("-N2", "--unbuffered", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if "n2: has not connected to port" in line:
            break
    named.touch()
    out, err = slurm.output(process)
    assert process.returncode == 0, err
    assert json.loads(out)["names"] == ["n1", "n2"]
    assert "node 2 of 2: n2" in err


def test_node_that_is_killed_leaves_and_its_tasks_run_elsewhere(
    srun, slurm, program, wait_until, runtime_dir, tmp_path
):
    path = program(f"{SLOW}    print(len(hosts), set(hosts) >= {{'n1'}}, flush=True)\n")
    process = srun.start("--num-workers", "2", path, options=["--unbuffered"])
    assert process.stdout.readline() == "up\n"
    (rank,) = [one for one in rest_of(path) if one.environ().get("SLURM_PROCID") == "1" and "run" in one.cmdline()]
    kill_all(rank)
    out, err = slurm.output(process)
    assert out == "40 True\n", err
    assert "node n2 has left: 1 of 2 are there" in err
    wait_until(lambda: is_swept(runtime_dir, tmp_path), "the sessions to be swept")


@pytest.mark.parametrize("how", ["scancel", "terminal"])
def test_cancelled_slurm_job_leaves_no_process(srun, slurm, program, wait_until, how, runtime_dir, tmp_path):
    path = program(WAIT)
    process = srun.start("--num-workers", "1", path, options=["--unbuffered"])
    assert process.stdout.readline() == "up 2\n"
    if how == "scancel":
        subprocess.run([*slurm.machines.within("ctl"), "scancel", "--user=root"], env=slurm.env, check=True, timeout=60)
    else:
        process.send_signal(signal.SIGINT)  # srun passes the second one within a second on to the job
        for line in process.stderr:
            if "interrupt" in line:
                break
        process.send_signal(signal.SIGINT)
    slurm.output(process, 60.0)
    assert process.returncode != 0
    wait_until(lambda: not rest_of(path), "all processes of the job to end", 20)
    wait_until(lambda: is_swept(runtime_dir, tmp_path), "the sessions to be swept")


def test_head_is_found_on_the_network_of_its_name_although_the_default_route_is_another(srun, machines, program):
    machines.mislead()
    code, out, err = srun.run("--num-workers", "1", program(APP), "0")
    assert code == 0, err
    assert json.loads(out)["names"] == ["n1", "n2"]


def test_nothing_readable_goes_over_the_network(srun, slurm, program, tmp_path):
    """The capture sees Slurm's own traffic with the job's environment, too."""
    needs("tcpdump")
    marker, large = "marker-of-a-value-4711", "large-marker-"
    text = (
        "import fastrt, os\n"
        "small, large = '-'.join(['marker', 'of', 'a', 'value', '4711']), '-'.join(['large', 'marker', '']) * 100_000\n"
        "@fastrt.remote\ndef echo(value):\n    return os.uname().nodename, value\n"
        "with fastrt.init():\n"
        "    (node,) = [node['NodeID'] for node in fastrt.nodes() if not node['IsHere']]\n"
        "    for value in (small, large):\n"
        "        host, same = fastrt.get(echo.options(scheduling=node).remote(value))\n"
        "        print(host, same == value)\n"
    )
    path = program(text)
    capture = tmp_path / "capture.pcap"
    with captured(slurm.machines, "n2", capture):
        code, out, err = srun.run("--num-workers", "1", path)
        assert (code, out) == (0, "n2 True\nn2 True\n"), err
    seen = capture.read_bytes()
    assert len(seen) > 2_000_000  # the large value went there and back
    assert str(path).encode() in seen  # the capture works: Slurm sends the command in the clear
    key = (tmp_path / "keys" / "key").read_text().strip()
    for secret in (marker, large, key, "fastrt1-", "fastrt1-"[:7], "echo", "cloudpickle", "__main__"):
        assert secret.encode() not in seen, secret
    assert bytes.fromhex(key) not in seen


def mpi(name: str) -> list[str]:
    needs(name)
    if name == "mpirun.openmpi":
        return [name, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe"]
    return [name]


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpi_job_is_one_cluster_whose_exit_code_is_the_programs(command, program, name):
    path = program(APP)
    for code in (0, 3):
        ended, out, err = command.run("--num-workers", "1", path, str(code), within=[*mpi(name), "-n", "3"])
        assert ended == code, err
        about = json.loads(out.splitlines()[0])
        assert len(about["names"]) == 3
        assert len(set(about["names"])) == 3
        assert [row[1:] for row in about["hosts"]] == [[None, None]] * 2  # tasks are no ranks
        assert not rest_of(path)


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_tasks_of_an_mpi_job_meet_at_its_coordinator_for_jax(command, program, name):
    words = ("--jax", "--num-workers", "1", program(MEMBERS))
    code, out, err = command.run(*words, within=[*mpi(name), "-n", "2"])
    assert (code, out.splitlines()[0]) == (0, "[(0, '2', 2), (1, '2', 2)] 0 127.0.0.1:0"), err


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpi_job_on_two_hosts_meets_although_rank_0_is_not_on_the_launchers(command, machines, program, tmp_path, name):
    """The agent that is to start processes on other hosts enters their namespaces, as ssh would."""
    agent = tmp_path / "agent"
    cases = "\n".join(
        f"{host}) shift; exec {' '.join(machines.within(host)[:-2])} 'hostname {host} && mount --bind {tmp_path}/hosts "
        f'/etc/hosts && exec sh -c "$*"\' sh "$@";;'
        for host in ("n1", "n2")
    )
    agent.write_text(f'#!/bin/sh\nwhile [ "$1" = -x ] || [ "$1" = -q ]; do shift; done\ncase $1 in\n{cases}\nesac\n')
    agent.chmod(0o755)
    if name == "mpirun.openmpi":
        hosts = [
            "--mca",
            "plm_rsh_agent",
            str(agent),
            "--mca",
            "plm",
            "rsh",
            "--host",
            "n1,n2",
            "--map-by",
            "ppr:1:node",
        ]
    else:
        hosts = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", "n1,n2", "-ppn", "1"]
    launcher = [*machines.within("ctl"), *mpi(name), *hosts, "-n", "2"]
    ended, out, err = command.run("--num-workers", "1", program(APP), "4", within=launcher)
    assert ended == 4, err
    about = json.loads(out.splitlines()[0])
    assert about["names"] == ["n1", "n2"]
    assert [row[0] for row in about["hosts"]] == ["n2"]


def page(launcher: str) -> tuple[str, list[list[str]]]:
    """The program of docs/launching.md, and its commands with this launcher."""
    text = (ROOT / "docs" / "launching.md").read_text()
    (app,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    lines = re.findall(rf"^\$ ({launcher} [^#\n]*)", text, re.M)
    assert lines
    return app, [line.split() for line in lines]


def run_page(words: list[str], within: list[str], env: dict[str, str], folder: Path) -> tuple[int, str, str]:
    at = words.index("fastrt")
    command = [*within, *words[:at], *FASTRT, *words[at + 1 :]]
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=90)
    return ended.returncode, ended.stdout, ended.stderr


def test_commands_of_the_page_run_on_slurm(slurm, command, tmp_path):
    app, commands = page("srun")
    (tmp_path / "app.py").write_text(app)
    env = {**slurm.env, **command.env, "FASTRT_NUM_WORKERS": "1"}
    for words in commands:
        code, out, err = run_page(words, slurm.machines.within("ctl"), env, tmp_path)
        assert (code, out) == (0, "328350\n"), err


@pytest.mark.parametrize("name", ["mpirun.openmpi", "mpirun.mpich"])
def test_commands_of_the_page_run_on_mpi(command, tmp_path, name):
    app, commands = page("mpirun")
    (tmp_path / "app.py").write_text(app)
    for words in commands:
        launcher = mpi(name)
        code, out, err = run_page([*launcher, *words[1:]], [], {**command.env, "FASTRT_NUM_WORKERS": "1"}, tmp_path)
        assert (code, out.splitlines()[:1]) == (0, ["328350"]), err


def test_command_of_the_page_runs_by_torchrun_on_two_nodes(command, tmp_path, free_port):
    torchrun = ROOT / ".cache" / "libraries" / "bin" / "torchrun"
    if not torchrun.exists():
        pytest.skip("torch is not installed: tests/support/libraries_env.py does that")
    app, (words,) = page("torchrun")
    (tmp_path / "app.py").write_text(app)
    left_out, env = words.index("..."), {**command.env, "FASTRT_NUM_WORKERS": "1"}
    meets = ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    with futures.ThreadPoolExecutor() as pool:
        nodes = []
        for rank in ("0", "1"):
            options = [*words[1:left_out], "--node-rank", rank, *meets]
            nodes.append(pool.submit(run_page, [*options, *words[left_out + 1 :]], [str(torchrun)], env, tmp_path))
        (code, out, err), other = (node.result() for node in nodes)
    assert (code, out) == (0, "328350\n"), err
    assert "node 2 of 2: " in err
    assert other[:2] == (0, ""), other[2]


def test_pods_of_a_manifest_are_one_cluster(command, program, tmp_path):
    """Two hosts with the names and variables of the Job's pods; there is no Kubernetes."""
    needs("ip", "unshare")
    _, service, job = manifests.objects(
        manifests.ManifestOptions("train-1", 2, "image", ["--num-workers", "1", program(APP), "5"], new_token())
    )
    pods = [f"{job['metadata']['name']}-{index}" for index in range(2)]
    try:
        machines = Machines(tmp_path, pods)
    except UnavailableError as exc:
        pytest.skip(f"network namespaces cannot be made: {exc}")
    with contextlib.closing(machines), contextlib.ExitStack() as stack:
        with (tmp_path / "hosts").open("a") as hosts:  # as the cluster's DNS resolves them by the headless service
            hosts.writelines(f"{machines.address(pod)} {pod}.{service['metadata']['name']}\n" for pod in pods)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value", "") for one in container["env"]} | {"FASTRT_TOKEN": new_token()}
        ranks = []
        for index, pod in enumerate(pods):
            words = [*machines.within(pod), *FASTRT, *container["command"][1:]]
            variables = {**command.env, **env, "JOB_COMPLETION_INDEX": str(index)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            ranks.append(stack.enter_context(subprocess.Popen(words, env=variables, **pipes)))
            stack.callback(ranks[-1].kill)
        out, err = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 5, err
        assert json.loads(out)["names"] == pods
        assert ranks[1].communicate(timeout=60)[0] == ""
        assert ranks[1].returncode == 0
