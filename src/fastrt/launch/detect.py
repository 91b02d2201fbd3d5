"""Which process of a job this one is, by the variables that its launcher has set. Pure: no I/O, no clock.

A job may be inside of another one (mpirun in a Slurm job, torchrun in a pod), so the variables of several launchers are
there at once. The order of `_READERS` is from the inner to the outer ones, and the first that recognises its variables
answers. A variable that is there and cannot be read is an error: to guess would start a second job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fastrt.errors import ConfigError
from fastrt.launch.hostlist import counts, expand
from fastrt.net.address import is_host, split_address

RANKS_MAX = 1 << 16
_INDEX = re.compile(r"\d{1,6}")
Env = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """The place of this process in its job.

    Attributes:
        launcher: "Slurm", "Open MPI", "MPICH", "PMIx", "torchrun", "Kubernetes", "options", or "" for a single process.
        rank: of this process, from 0.
        size: processes of the job; 0: PMIx knows it.
        local_rank, local_size: the same among the processes on this machine.
        job: a text that is the same in all processes of the job and in no other job of the user.
        head: host of rank 0; empty: the processes learn it by `meets`.
        port: of the meeting on rank 0; 0: one of those that the job's token gives.
        meets: "port": at a port of `head`; "pmi" or "pmix": rank 0 publishes its addresses by that interface.
        hosts: the host of each rank; empty where the launcher does not say it.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    job: str = ""
    head: str = ""
    port: int = 0
    meets: str = "port"
    hosts: tuple[str, ...] = ()

    def check(self) -> Place:
        """Return this place.

        Raises:
            ConfigError: its numbers contradict each other.
        """
        if not 0 <= self.rank < (self.size or RANKS_MAX) <= RANKS_MAX or not 0 <= self.local_rank < self.local_size:
            raise ConfigError(
                f"{self.launcher} says rank {self.rank} of {self.size}, on this machine {self.local_rank} of "
                f"{self.local_size}: these numbers contradict each other. Give --rank and --size"
            )
        return self

    def host_of(self, rank: int) -> str:
        """Name a rank for people: by its host where the launcher says it."""
        if not self.hosts:
            return f"rank {rank}"
        host = self.hosts[rank]
        return host if self.hosts.count(host) == 1 else f"rank {rank} on {host}"


def detect(env: Env, hostname: str) -> Place:
    """Find the place of this process by its variables.

    Args:
        env: the environment.
        hostname: of this machine; a pod of an indexed Job is named JOB-INDEX.
    Raises:
        ConfigError: variables of a launcher are there, and cannot be read.
    """
    for reader in _READERS:
        place = reader(env, hostname)
        if place is not None:
            return place.check()
    return Place()


def _torchrun(env: Env, hostname: str) -> Place | None:
    """Source: "Environment Variables" of torch.distributed.run."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} <= env.keys():
        return None
    run = f"{env['TORCHELASTIC_RUN_ID']} {env['MASTER_ADDR']}:{env.get('MASTER_PORT', '')}"
    return Place(
        "torchrun",
        *(_number(env, "RANK"), _number(env, "WORLD_SIZE")),
        *(_number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1)),
        job=f"torchrun {run} {env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        head=env["MASTER_ADDR"],
    )


def _open_mpi(env: Env, hostname: str) -> Place | None:
    """Source: `mpirun(1)` of Open MPI, "Environment variables"; PMIx names the job."""
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    return Place(
        "Open MPI",
        *(_number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")),
        *(_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)),
        job=f"mpirun {env.get('PMIX_NAMESPACE', '')}",
        meets="pmix",
    )


def _mpich(env: Env, hostname: str) -> Place | None:
    """Source: the Hydra process manager of MPICH and of Intel MPI: PMI-1 over a descriptor that it passes."""
    if "PMI_FD" not in env or ("HYDI_CONTROL_FD" not in env and "SLURM_STEP_ID" in env):
        return None
    return Place(
        "MPICH",
        *(_number(env, "PMI_RANK"), _number(env, "PMI_SIZE")),
        *(_number(env, "MPI_LOCALRANKID", 0), _number(env, "MPI_LOCALNRANKS", 1)),
        job="mpiexec",  # the name of its key-value space is added when it is known
        meets="pmi",
    )


def _slurm(env: Env, hostname: str) -> Place | None:
    """Source: `srun(1)`, "OUTPUT ENVIRONMENT VARIABLES". A batch script without srun is a single process."""
    if not {"SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= env.keys():
        return None
    nodes = expand(env["SLURM_STEP_NODELIST"])
    tasks = counts(env.get("SLURM_STEP_TASKS_PER_NODE", f"1(x{len(nodes)})"))
    node, local = _number(env, "SLURM_NODEID"), _number(env, "SLURM_LOCALID", 0)
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    hosts: tuple[str, ...] = ()
    if len(tasks) == len(nodes) and sum(tasks) == size and max(tasks) == 1:
        hosts = nodes  # with more of them the order depends on --distribution
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Place(
        "Slurm",
        *(_number(env, "SLURM_PROCID"), size),
        *(local, tasks[node] if node < len(tasks) else 1),
        job="slurm " + " ".join(env.get(name, "") for name in names),
        head=nodes[0],
        hosts=hosts,
    )


def _pmix(env: Env, hostname: str) -> Place | None:
    """Other launchers of the PMIx standard, such as prun. They set no variable for the size: PMIx is asked for it."""
    if not {"PMIX_RANK", "PMIX_NAMESPACE"} <= env.keys():
        return None
    return Place("PMIx", _number(env, "PMIX_RANK"), 0, job=f"pmix {env['PMIX_NAMESPACE']}", meets="pmix")


def _kubernetes(env: Env, hostname: str) -> Place | None:
    """Source: "Indexed Job" of Kubernetes: the index in a variable, and pods named JOB-INDEX.

    A Job does not say its number of pods or the headless service: `fastrt manifest` writes them into FASTRT_SIZE and
    FASTRT_SERVICE.
    """
    if "JOB_COMPLETION_INDEX" not in env or "FASTRT_SIZE" not in env:
        return None
    rank, size = _number(env, "JOB_COMPLETION_INDEX"), _number(env, "FASTRT_SIZE")
    job = hostname.partition(".")[0].removesuffix(f"-{rank}")
    service = env.get("FASTRT_SERVICE", job)
    hosts = tuple(f"{job}-{k}.{service}" for k in range(size))
    return Place("Kubernetes", rank, size, job=f"kubernetes {job}.{service}", head=hosts[0], hosts=hosts)


_READERS: tuple[Callable[[Env, str], Place | None], ...] = (
    *(_torchrun, _open_mpi, _mpich, _slurm, _pmix, _kubernetes),
)
# Variables of a process of the job that its children must not take for their own: a program that calls MPI_Init would
# speak for this process.
PRIVATE = ("PMI_", "PMIX_", "OMPI_", "HYDI_", "MPI_LOCAL", "FASTRT_RANK", "FASTRT_SIZE", "FASTRT_JOB", "FASTRT_TOKEN")


def override(place: Place, rank: int | None, size: int | None, head: str | None, job: str | None) -> Place:
    """Apply the options of `fastrt run`, which win over the launcher's variables.

    Args:
        place: by the variables.
        rank, size: of this process and of the job; both or none.
        head: host of rank 0, or host:port of its meeting.
        job: a name of the job; needed where no launcher gives one, unless a token is given.
    Raises:
        ConfigError: they do not fit together.
    """
    if rank is None and size == place.size:
        size = None  # the variable FASTRT_SIZE gives it to `_kubernetes`, too
    if (rank is None) != (size is None):
        raise ConfigError("--rank and --size go together")
    if rank is not None and size is not None:
        place = Place("options", rank, size, job=place.job)
        if size > 1 and head is None:
            raise ConfigError("--rank and --size need --head, the host of rank 0")
    if job is not None:
        place = replace(place, job=f"options {job}")
    if head is not None:
        if head.count(":") > 1:
            raise ConfigError(f"--head is {head!r}; ranks meet by IPv4: give an IPv4 address of rank 0, or its name")
        if ":" not in head and not is_host(head):
            raise ConfigError(f"--head is {head!r}; it must be HOST or HOST:PORT")
        host, port = split_address(head) if ":" in head else (head, 0)
        place = replace(place, head=host, port=port, meets="port")
    return place.check()


def _number(env: Env, name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _INDEX.fullmatch(text):
        raise ConfigError(f"{name}={text!r} is set by a launcher and is no number; unset it, or give --rank and --size")
    return int(text)
