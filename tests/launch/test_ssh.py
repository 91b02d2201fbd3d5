"""`fastrt run --hosts`: nodes that a real ssh client starts through real servers on hosts of their own."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fastrt
from fastrt.errors import ConfigError
from fastrt.launch.ssh import SshHost, parse_hosts
from support.cluster import FASTRT
from support.jax_envs import ENVS, python_of
from support.jax_members import MEMBERS
from support.jax_programs import APP as JAX_APP
from support.jax_programs import JAX, VERSION
from support.jobs import APP, SLOW, WAIT, captured, is_swept, kill_all, needs, rest_of
from support.sshd import PROGRAMS, Sshds

REMOTE = "from fastrt.launch.remote import main"
# Makes the tasks of a program carry marked values.
MARKED = """
import fastrt, os
small, large = '-'.join(['marker', 'of', 'a', 'value', '4711']), '-'.join(['large', 'marker', '']) * 100_000
@fastrt.remote
def echo(value):
    return value
with fastrt.init():
    (node,) = [node['NodeID'] for node in fastrt.nodes() if not node['IsHere']]
    for value in (small, large):
        print(fastrt.get(echo.options(scheduling=node).remote(value)) == value, flush=True)
"""


def long(test):
    """Mark a test that needs servers."""
    return pytest.mark.long(pytest.mark.timeout(180)(test))


def test_hosts_are_parsed_and_what_ssh_could_take_for_an_option_is_refused():
    assert parse_hosts("a,b:2222,user@n[1-2]") == (
        *(SshHost("a"), SshHost("b", port=2222)),
        *(SshHost("n1", "user"), SshHost("n2", "user")),
    )
    assert SshHost("n1", "user", 22).words() == ["-p", "22", "-l", "user", "n1"]
    for text in ("-oProxyCommand=sh", "a,-b", "-x@a", "user@-a", "a b", "a:99999", "a:0", "a:", "", "a@b@c", "$(a)"):
        with pytest.raises(ConfigError):
            parse_hosts(text)
    with pytest.raises(ConfigError, match="more than once"):
        parse_hosts("a,a")


def test_job_of_another_launcher_refuses_hosts(command, program):
    words = ("--rank", "0", "--size", "2", "--head", "127.0.0.1", "--hosts", "a")
    code, _, err = command.run(*words, program("print('never')"))
    assert code == 2
    assert "options has started this process as one" in err


def remote_nodes(folder: Path) -> list[psutil.Process]:
    """Processes that ssh has started for jobs with this runtime folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_node = any(REMOTE in word for word in process.cmdline()) and process.name() != "ssh"
            if is_node and process.environ().get("FASTRT_RUNTIME_DIR") == str(folder):
                found.append(process)
    return found


class Job:
    """Starts `fastrt run --hosts` on the host ctl."""

    def __init__(self, machines, sshds, command, runtime_dir):
        self.machines, self.sshds, self._command, self.runtime_dir = machines, sshds, command, runtime_dir
        self._env = {**command.env, "PATH": sshds.path, "RES_OPTIONS": "timeout:1 attempts:1"}
        self._started = []

    def start(self, *words):
        return self.spawn([*FASTRT, "run", "--num-workers", "1", *words])

    def spawn(self, words):
        process = subprocess.Popen(
            [*self.machines.within("ctl"), *words],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=90)
        assert not remote_nodes(self.runtime_dir), err  # all nodes are gone when the command ends
        return process.returncode, out, err

    def close(self):
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def job(machines, command, runtime_dir, tmp_path):
    needs(*PROGRAMS)
    folder = tmp_path / "ssh"
    folder.mkdir()
    names = ("FASTRT_RUNTIME_DIR", "FASTRT_OBJECT_STORE_MEMORY", "FASTRT_SPILL_DIR")
    sshds = Sshds(folder, machines, ["n1", "n2"], {name: command.env[name] for name in names})
    made = Job(machines, sshds, command, runtime_dir)
    yield made
    made.close()
    sshds.close()


@long
def test_job_is_one_cluster_whose_exit_code_is_the_programs(job, program):
    for code in (0, 9):
        ended, out, err = job.run("--hosts", "n1,root@n2:22", program(APP), str(code))
        assert ended == code, err
        about = json.loads(out)
        assert about["names"] == ["ctl", "n1", "n2:22"]
        assert sorted(row[0] for row in about["hosts"]) == ["n1", "n2"]


@long
def test_program_that_raises_ends_the_job_with_its_traceback(job, program):
    code, _, err = job.run("--hosts", "n1", program("import fastrt\nfastrt.init()\nraise ValueError('wrong')\n"))
    assert code == 1
    assert "ValueError: wrong" in err


@long
def test_hosts_that_cannot_be_used_are_named_with_the_reason_and_end_the_job_in_time(job, program):
    job.sshds.stop("n2")
    (_, n1), _ = [line.split(" ", 1) for line in job.sshds.known_hosts.read_text().splitlines()]
    job.sshds.known_hosts.write_text(f"n1 {n1}\nctl {n1}\n")
    path = program("print('never')")
    code, out, err = job.run("--patience", "1", "--timeout", "15", "--hosts", "n1,n2,nowhere", path)
    assert (code, out) == (1, ""), err
    for host, why in (("n2", "Connection refused"), ("nowhere", "Could not resolve hostname")):
        assert re.search(rf"^fastrt: {host}: ssh: .*{why}.*; ssh tries again$", err, re.M), err
        assert re.search(rf"^  {host}: (ssh: .*{why}|ssh has not connected yet)", err, re.M), err


@long
def test_wrong_host_key_ends_the_job_at_once(job, program):
    lines = job.sshds.known_hosts.read_text().splitlines()
    keys = [line.split(" ", 1)[1] for line in lines]
    job.sshds.known_hosts.write_text(f"n1 {keys[1]}\nn2 {keys[1]}\n")
    code, out, err = job.run("--hosts", "n1,n2", program("print('never')"))
    assert (code, out) == (1, ""), err
    assert "3 nodes are wanted, and these cannot come:" in err
    assert re.search(r"^  n1: .*Host key verification failed", err, re.M), err
    assert "ssh tries again" not in err


@long
def test_host_that_nothing_is_known_about_is_not_trusted(job, program):
    job.sshds.known_hosts.write_text("")
    code, out, err = job.run("--hosts", "n1", program("print('never')"))
    assert (code, out) == (1, ""), err
    assert "Host key verification failed" in err
    assert job.sshds.known_hosts.read_text() == ""


@long
def test_python_that_is_missing_or_has_no_fastrt_is_named(job, program, tmp_path):
    path = program("print('never')")
    code, _, err = job.run("--python", "/nowhere/python", "--hosts", "n1", path)
    assert code == 1
    assert "  n1: there is no /nowhere/python that can be run; give the path of Python on the hosts by --python" in err
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    code, _, err = job.run("--python", str(tmp_path / "bare/bin/python"), "--hosts", "n1", path)
    assert code == 1
    assert "bare/bin/python has no fastrt there; install it" in err


@long
def test_other_version_is_refused_with_a_table(job, program, tmp_path):
    other = tmp_path / "python"
    code = "import sys, fastrt; fastrt.__version__ = '0.0.1'; sys.argv[0:1] = []; exec(sys.argv[1])"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    other.chmod(0o755)
    code, out, err = job.run("--python", str(other), "--hosts", "n1", program("print('never')"))
    assert (code, out) == (1, ""), err
    assert re.search(r"^  n1: its versions differ; install the same ones on all machines:$", err, re.M), err
    assert re.search(rf"! fastrt +{re.escape(fastrt.__version__)} +0\.0\.1$", err, re.M), err


@long
def test_node_that_is_killed_leaves_and_the_program_goes_on(job, program, wait_until, tmp_path):
    process = job.start("--hosts", "n1", program(f"{SLOW}    print(len(hosts), flush=True)\n"))
    assert process.stdout.readline() == "up\n"
    (node,) = remote_nodes(job.runtime_dir)
    kill_all(node)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "40\n"), err
    assert "node n1 has left: 1 of 2 are there" in err
    wait_until(lambda: is_swept(job.runtime_dir, tmp_path), "the sessions to be swept")


@long
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill"])
def test_end_of_the_command_ends_the_program_and_all_nodes(job, program, wait_until, tmp_path, how):
    path = program(WAIT)
    process = job.start("--hosts", "n1,n2", path)
    assert process.stdout.readline() == "up 3\n"
    assert len(remote_nodes(job.runtime_dir)) == 2
    number = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -number, err
    wait_until(lambda: not rest_of(path) and not remote_nodes(job.runtime_dir), "all processes of the job to end", 30)
    wait_until(lambda: is_swept(job.runtime_dir, tmp_path), "the sessions to be swept")


@long
def test_cut_connection_of_ssh_ends_the_node_there(job, program, wait_until):
    process = job.start("--hosts", "n1", program(WAIT))
    assert process.stdout.readline() == "up 2\n"
    (node,) = remote_nodes(job.runtime_dir)
    login = node.parent()
    assert login.name() == "sshd"
    login.kill()
    wait_until(lambda: not remote_nodes(job.runtime_dir), "the node to end", 30)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert "n1: ssh has lost its connection, and the node ends" in err


@long
def test_host_that_comes_late_joins(job, program):
    job.sshds.stop("n2")
    process = job.start("--hosts", "n1,n2", "--patience", "1", program(APP), "0")
    for line in process.stderr:
        if line.startswith("  n2: "):
            break
    job.sshds.start("n2")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert json.loads(out)["names"] == ["ctl", "n1", "n2"]


@long
def test_working_folder_that_is_not_there_is_named(job, program, tmp_path):
    """The folder is on a file system that only the host ctl sees."""
    path, folder = program(APP), tmp_path / "only"
    folder.mkdir()
    inner = f'mount -t tmpfs none {folder} && mkdir {folder}/here && cd {folder}/here && exec "$@"'
    words = ["sh", "-c", inner, "sh", *FASTRT, "run", "--num-workers", "1", "--hosts", "n1", path, "0"]
    process = job.spawn(words)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert f"[n1] the working folder {folder}/here cannot be entered here (No such file or directory): " in err


@long
def test_nothing_readable_goes_over_the_network_and_the_token_is_in_no_command_line(job, program, tmp_path):
    needs("tcpdump")
    text = MARKED + WAIT
    capture = tmp_path / "capture.pcap"
    with captured(job.machines, "n1", capture):
        process = job.start("--hosts", "n1", program(text))
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "True\n"
        assert process.stdout.readline() == "up 2\n"
        (token,) = {path.read_text().strip() for path in job.runtime_dir.glob("*/token")}
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert token not in " ".join([*one.cmdline(), *one.environ().values()])
        process.terminate()
        process.communicate(timeout=60)
    seen = capture.read_bytes()
    assert len(seen) > 2_000_000  # the large value went there and back
    assert b"SSH-2.0-" in seen  # the capture works: ssh greets in the clear
    secrets = ("marker-of-a-value-4711", "large-marker-", token, "fastrt1-", "echo", "cloudpickle", "__main__")
    for secret in (*secrets, "fastrt.launch", str(tmp_path)):
        assert secret.encode() not in seen, secret


@long
def test_tasks_of_all_hosts_meet_at_the_coordinator_for_jax(job, program):
    code, out, err = job.run("--jax", "--hosts", "n1,n2", program(MEMBERS))
    assert (code, out) == (0, "[(0, '3', 3), (1, '3', 3), (2, '3', 3)] 0 127.0.0.1:0\n"), err


@long
def test_jax_of_two_hosts_sums_over_both(job, program):
    if not (ENVS / VERSION / "whole").exists():
        pytest.skip(f"the environment with JAX {VERSION} is not there; `make check` makes it")
    code, out, err = job.run("--jax", "--hosts", "n1", program(JAX_APP), str(python_of(VERSION)), JAX)
    assert (code, out) == (0, "['28', '28']\n"), err


@long
def test_commands_of_the_page_run(job, tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "launching.md").read_text()
    (app,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    commands = re.findall(r"^\$ fastrt run (.*--hosts [^#\n]*)", text, re.M)
    assert commands
    (tmp_path / "app.py").write_text(app)
    for words in map(str.split, commands):
        path = [str(tmp_path / word) if word == "app.py" else word for word in words]
        code, out, err = job.run(*path)
        assert (code, out) == (0, "328350\n"), err
