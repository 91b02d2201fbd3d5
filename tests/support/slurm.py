"""A real Slurm on one machine: slurmctld and two slurmd, each on a host of `Machines`, without munge and systemd."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from .machines import Machines

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo", "ip", "unshare")
_UP_S = 30.0
_CONF = """
ClusterName=test
SlurmctldHost=ctl({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
GresTypes=gpu
NodeName=n1 NodeAddr={n1} CPUs=4 Gres=gpu:3 State=UNKNOWN
NodeName=n2 NodeAddr={n2} CPUs=4 Gres=gpu:3 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Slurm:
    """A cluster of the nodes n1 and n2; `srun` runs on the host ctl.

    Args:
        folder: for its state and logs.
        machines: with the hosts ctl, n1 and n2.
    """

    def __init__(self, folder: Path, machines: Machines) -> None:
        self.machines = machines
        self._folder = folder
        conf = folder / "slurm.conf"
        addresses = {name: machines.address(name) for name in ("ctl", "n1", "n2")}
        conf.write_text(_CONF.format(folder=folder, **addresses))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # GPUs that do not exist: Slurm wants a device file of each, and says which of them a step has by their numbers.
        (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/tty[0-2]\n")
        (folder / "state").mkdir()
        self.env = {**os.environ, "SLURM_CONF": str(conf)}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._start("ctl", "slurmctld", "-D")
        for name in ("n1", "n2"):
            (folder / f"spool.{name}").mkdir()
            self._start(name, "slurmd", "-D", "-N", name)
        self._wait()

    def srun(self, *words: str, **about: Any) -> "subprocess.Popen[str]":
        """Start srun on the host ctl."""
        return subprocess.Popen([*self.machines.within("ctl"), "srun", *words], env=self.env, text=True, **about)

    def output(self, process: "subprocess.Popen[str]", patience_s: float = 90.0) -> tuple[str, str]:
        """Wait for the end of what `srun` started; its output and error output.

        Raises:
            AssertionError: it did not end in time; the message has what it printed, and Slurm's logs.
        """
        try:
            return process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            words = [*self.machines.within("ctl"), "scancel", "--user=root", "--signal=KILL"]
            subprocess.run(words, env=self.env, check=True, timeout=60)
            out, err = process.communicate(timeout=60)
            raise AssertionError(
                f"srun did not end in {patience_s:g} s; it printed:\n{out}\n{err}\n{self._logs()}"
            ) from None

    def close(self) -> None:
        """End the daemons, once the processes of the last step have reported its end: without slurmctld they wait."""
        until = time.monotonic() + _UP_S
        while self._has_steps() and time.monotonic() < until:
            threading.Event().wait(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _has_steps(self) -> bool:
        """Whether a step runs in a network of these hosts; its title may have overwritten its variables."""
        networks = {os.readlink(f"/proc/{daemon.pid}/ns/net") for daemon in self._daemons if daemon.poll() is None}
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error, OSError):
                if process.name() == "slurmstepd" and os.readlink(f"/proc/{process.pid}/ns/net") in networks:
                    return True
        return False

    def _start(self, host: str, *words: str) -> None:
        with open(self._folder / f"{words[0]}.{host}.out", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*self.machines.within(host), *words],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _wait(self) -> None:
        until = time.monotonic() + _UP_S
        words = [*self.machines.within("ctl"), "sinfo", "-h", "-o", "%T %D"]
        while "idle 2" not in subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60).stdout:
            if time.monotonic() > until:
                logs = self._logs()
                self.close()
                raise AssertionError(f"Slurm did not start:\n{logs}")
            threading.Event().wait(0.1)

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in self._folder.glob("*.log"))
