"""Variables of launchers, as they were seen in processes of real ones, and the places they mean."""

import pytest

from fastrt.errors import ConfigError
from fastrt.launch.detect import Place, detect, override
from fastrt.launch.hostlist import counts, expand

SLURM = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "830537729",
    "PMIX_RANK": "2",
}
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "PMI_FD": "8",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job1",
}
POD = {"JOB_COMPLETION_INDEX": "1", "FASTRT_SIZE": "2", "FASTRT_SERVICE": "count"}

slurm_job = "slurm test 7 0 "
torch_job = "torchrun job1 a1:29500 0"


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, Place()),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Place()),  # a batch script without srun
        (SLURM, Place("Slurm", 1, 2, 0, 1, slurm_job, "n1", hosts=("n1", "n2"))),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
            Place("Slurm", 1, 4, 1, 2, slurm_job, "n1"),
        ),
        (
            {**SLURM, "PMI_FD": "5", "PMI_RANK": "1", "PMI_SIZE": "2"},
            Place("Slurm", 1, 2, 0, 1, slurm_job, "n1", hosts=("n1", "n2")),
        ),
        (OPEN_MPI, Place("Open MPI", 2, 4, 0, 2, "mpirun 830537729", meets="pmix")),
        (
            {**SLURM, **OPEN_MPI},
            Place("Open MPI", 2, 4, 0, 2, "mpirun 830537729", meets="pmix"),
        ),  # mpirun in a Slurm job
        (HYDRA, Place("MPICH", 1, 2, 1, 2, "mpiexec", meets="pmi")),
        ({**SLURM, **HYDRA}, Place("MPICH", 1, 2, 1, 2, "mpiexec", meets="pmi")),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "x"}, Place("PMIx", 1, 0, job="pmix x", meets="pmix")),
        (TORCHRUN, Place("torchrun", 3, 4, 1, 2, torch_job, "a1")),
        ({**SLURM, **TORCHRUN}, Place("torchrun", 3, 4, 1, 2, torch_job, "a1")),
        (
            POD,
            Place(
                "Kubernetes",
                1,
                2,
                job="kubernetes count.count",
                head="count-0.count",
                hosts=("count-0.count", "count-1.count"),
            ),
        ),
        ({**POD, **TORCHRUN}, Place("torchrun", 3, 4, 1, 2, torch_job, "a1")),
        ({"JOB_COMPLETION_INDEX": "1"}, Place()),  # a Job whose pods have nothing to do with each other
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place()),  # variables that programs set for themselves, too
    ],
)
def test_variables_of_a_launcher_give_the_place_in_its_job(variables, place):
    assert detect(variables, "count-1") == place


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({**SLURM, "SLURM_PROCID": "2"}, "rank 2 of 2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "no list of hosts"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE=''"),
        ({**TORCHRUN, "LOCAL_RANK": "5"}, "5 of 2"),
        ({**POD, "JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX"),
    ],
)
def test_variables_that_cannot_be_read_are_refused_with_their_name(variables, error):
    with pytest.raises(ConfigError, match=None) as caught:
        detect(variables, "count-1")
    assert error in str(caught.value)


def test_options_win_over_the_launchers_variables():
    place = override(detect(SLURM, "n2"), 0, 3, "10.0.0.1:7000", "mine")
    assert place == Place("options", 0, 3, job="options mine", head="10.0.0.1", port=7000)
    assert override(detect(SLURM, "n2"), None, None, "other", None).head == "other"
    assert override(detect(OPEN_MPI, "n2"), None, None, "other", None).meets == "port"


def test_size_that_a_pod_has_by_its_variable_needs_no_rank():
    place = detect(POD, "count-1")
    assert override(place, None, 2, None, None) == place


@pytest.mark.parametrize(
    ("rank", "size", "head", "error"),
    [
        (0, None, None, "go together"),
        (1, 2, None, "need --head"),
        (2, 2, "a", "contradict"),
        (0, 2, "a:b", "HOST:PORT"),
        (1, 2, "[::1]:7000", "--head is '[::1]:7000'; ranks meet by IPv4"),
        (1, 2, "::1", "--head is '::1'; ranks meet by IPv4"),
        (1, 2, "a b", "--head is 'a b'; it must be HOST or HOST:PORT"),
        (1, 2, "", "--head is ''; it must be HOST or HOST:PORT"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(rank, size, head, error):
    with pytest.raises(ConfigError) as caught:
        override(Place(), rank, size, head, None)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,m2", ["n1", "m2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10]-ib,x", ["n08-ib", "n09-ib", "n10-ib", "x"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
    ],
)
def test_host_list_is_expanded_as_slurm_does(text, hosts):
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n[1-]", "n]1[", "n[2-1]", "n[1-999999999]", "a,,b", "n[a]", "r[0-999]n[0-999]"]
)
def test_wrong_host_list_is_refused(text):
    with pytest.raises(ConfigError):
        expand(text)


def test_tasks_of_each_host_are_counted():
    assert counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(ConfigError):
        counts("2(x)")
