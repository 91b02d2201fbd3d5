"""Where settings come from, what is refused, and what the machine's limits make of the defaults."""

import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastrt import config
from fastrt.config import Config, parse_bytes, size_text
from fastrt.errors import ConfigError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for field in dataclasses.fields(Config):
        monkeypatch.delenv(f"FASTRT_{field.name.upper()}", raising=False)


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Empty cgroup hierarchies of both versions, in which the process is below the root; a function that writes a
    control file into them."""
    monkeypatch.setattr(config, "_CGROUP_DIR", tmp_path)
    monkeypatch.setattr(config, "_OWN_CGROUPS", tmp_path / "self")
    (tmp_path / "self").write_text("5:memory:/slurm/job_7\n3:cpu,cpuacct:/slurm/job_7\n1:name=systemd:/x\n0::/a/b\n")

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2g", 2_000_000_000),
        ("1KiB", 1024),
        ("3tib", 3 << 40),
        ("10 B", 10),
    ],
)
def test_sizes_are_read_with_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (60 << 20, "60.0 MiB"), (3 << 40, "3,072.0 GiB"), (0.4, "0 B")],
)
def test_size_is_written_for_people(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 MiB extra", "1e9", "0x10", "ten", "1..5g"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_defaults_are_what_the_documentation_says():
    settings = Config.load(object_store_memory="64MiB")
    assert settings.num_workers == min(config.cpu_count(), 254)
    assert settings.object_store_memory == 64 << 20
    assert (settings.objects_max, settings.tasks_max) == (1 << 22, 1 << 21)
    free = min(level.limit - level.used for level in config.memory_levels())
    assert 0 <= settings.memory <= free + (1 << 30)
    assert (settings.memory % (1 << 20), settings.memory_threshold) == (0, 0.95)
    assert (settings.spin_us, settings.log_to_driver, settings.trace) == (100, True, False)


@pytest.mark.parametrize(("workers", "slots"), [(1, 64), (16, 64), (17, 128), (254, 256)])
def test_objects_have_bits_for_twice_the_workers_from_the_start(workers, slots):
    settings = Config.load(num_workers=workers)
    assert (settings.clients_dense, settings.clients_max) == (slots, 4096)
    assert Config.load(num_workers=workers, clients_max=256).clients_dense == 256


def test_client_table_does_not_grow_where_the_address_space_is_limited():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, -1));"
        "from fastrt.config import Config; print(Config.load(num_workers=2).clients_max)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "64\n"


def test_settings_never_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.load().num_workers = 3


def test_keyword_beats_environment_beats_default(monkeypatch):
    monkeypatch.setenv("FASTRT_NUM_WORKERS", "7")
    assert Config.load().num_workers == 7
    assert Config.load(num_workers=3).num_workers == 3
    assert Config.load(num_workers=None).num_workers == 7
    monkeypatch.setenv("FASTRT_NUM_WORKERS", "")
    assert Config.load().num_workers == min(config.cpu_count(), 254)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("no", False), ("TRUE", True), (" off ", False)])
def test_flags_are_words(monkeypatch, text, value):
    monkeypatch.setenv("FASTRT_TRACE", text)
    assert Config.load().trace is value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_workers", -1, "from 0 to"),
        ("num_workers", -(2**70), "from 0 to"),
        ("num_workers", "two", "whole number"),
        ("num_workers", 2.0, "whole number"),
        ("num_workers", True, "whole number"),
        ("object_store_memory", "lots", "is not a size"),
        ("object_store_memory", 1, "must be from"),
        ("object_store_memory", 1 << 60, "must be from"),
        ("memory", "much", "is not a size"),
        ("memory_threshold", 1.5, "from 0 to 1"),
        ("memory_threshold", "high", "number from 0 to 1"),
        ("clients_max", 8193, "from 3 to 8192"),
        ("objects_max", 1, "must be from"),
        ("tasks_max", [], "whole number"),
        ("spin_us", -1, "from 0 to"),
        ("numa", "near", "interleave or local"),
        ("trace", "maybe", "true or false"),
        ("debugger", "gdb", "pdb, debugpy, or debugpy:PORT"),
        ("debugger", "debugpy:", "pdb, debugpy, or debugpy:PORT"),
        ("debugger", "debugpy:65536", "port from 1 to 65535"),
        ("debugger", 5678, "pdb, debugpy, or debugpy:PORT"),
        ("log_to_driver", 1, "true or false"),
        ("start_timeout_s", 0, "more than 0"),
        ("start_timeout_s", "nan", "more than 0"),
        ("start_timeout_s", "soon", "number of seconds"),
        ("logging", "LOUD", "'LOUD': must be a level"),
        ("logging", True, "must be a level"),
        ("logging", "{", "must be a level"),
        ("logging", {}, "'version': 1"),
        ("logging", {"version": 1, "handlers": {"x": {"class": object}}}, "travels to workers as JSON"),
        ("logging", {"version": 1, "formatters": {"x": {"format": "x" * 20_000}}}, "more than 16384"),
        ("runtime_dir", 7, "must be a path"),
        ("runtime_dir", "/" + "x" * 60, "60 bytes"),
    ],
)
def test_bad_value_is_refused_by_name(name, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Config.load(**{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("given", "read"),
    [("debug", "10"), (30, "30"), ("JSON", "json"), ("", ""), ({"version": 1}, '{"version": 1}'),
     ('{"version": 1}', '{"version": 1}')],
)  # fmt: skip
def test_logging_is_a_level_json_or_a_dictionary(given, read):
    assert Config.load(logging=given).logging == read


def test_bad_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("FASTRT_SPIN_US", "fast")
    with pytest.raises(ConfigError, match="FASTRT_SPIN_US='fast'"):
        Config.load()


def test_unknown_setting_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'workers'.*num_workers"):
        Config.load(workers=2)


def test_more_workers_than_client_slots_is_refused():
    with pytest.raises(ConfigError, match="raise clients_max or lower num_workers"):
        Config.load(num_workers=8, clients_max=9)


@pytest.fixture
def folder():
    """A folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="f") as name:
        yield Path(name)


@pytest.fixture
def temporary(monkeypatch):
    """Set TMPDIR, which Python reads once in a process."""

    def temporary(path):
        monkeypatch.setenv("TMPDIR", str(path))
        monkeypatch.setattr(tempfile, "tempdir", None)

    return temporary


def test_runtime_dir_follows_xdg_then_the_temporary_folder(monkeypatch, folder, temporary):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert Config.load().runtime_dir == folder / "fastrt"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    temporary(folder)
    assert Config.load().runtime_dir == folder / f"fastrt-{os.getuid()}"


@pytest.mark.parametrize("what", ["is gone", "is relative", "is a file", "is long", "may not be written to"])
def test_runtime_dir_passes_over_a_stale_xdg_folder(monkeypatch, folder, temporary, what):
    temporary(folder)
    xdg = folder / "xdg" / ("x" * 60 if what == "is long" else "0")
    xdg.parent.mkdir()
    if what == "is a file":
        xdg.touch()
    elif what != "is gone":
        xdg.mkdir()
    if os.geteuid() != 0:
        xdg.chmod(0o500) if what == "may not be written to" else None
    elif what == "may not be written to":
        os.chown(xdg, 40001, -1)  # root may write anywhere, but does not in a folder of another user
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative" if what == "is relative" else str(xdg))
    assert Config.load().runtime_dir == folder / f"fastrt-{os.getuid()}"


def test_long_or_missing_tmpdir_gives_a_short_runtime_dir_under_tmp(monkeypatch, tmp_path, folder, temporary):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    long = tmp_path / ("x" * 60)
    long.mkdir()
    for path in (long, folder / "missing"):
        temporary(path)
        found = Config.load().runtime_dir
        assert found.parent == Path("/tmp")
        assert len(os.fsencode(found)) <= 60


def test_no_writable_temporary_folder_is_an_error_that_says_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can get a byte, for root, too
    try:
        with pytest.raises(ConfigError, match=r"No usable temporary directory.*Set FASTRT_RUNTIME_DIR to a folder"):
            config.default_runtime_dir()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_long_or_missing_tmpdir_gives_a_spill_dir_under_var_tmp(monkeypatch, tmp_path, folder):
    long = tmp_path / ("x" * 180)
    long.mkdir()
    for path in (long, folder / "missing"):
        monkeypatch.setenv("TMPDIR", str(path))
        assert Config.load().spill_dir.parent == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    assert Config.load().spill_dir.parent == folder


def test_amounts_are_rounded_down_to_whole_parts():
    assert [config.read_amount("x", amount) for amount in (1 / 3, 2 / 3, 1 / 6, 1e6, 7)] == [
        0.3333,
        0.6666,
        0.1666,
        1e6,
        7,
    ]
    assert all(config.read_amount("x", parts / 10_000) == parts / 10_000 for parts in range(20_001))
    with pytest.raises(ConfigError, match="the smallest part of a resource is"):
        config.read_amount("x", 0.00009)


def test_cpus_are_the_affinity_without_a_quota(cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert config.cpu_count() == 6


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"a/b/cpu.max": "max 100000"}, 6),
        ({"a/b/cpu.max": "150000 100000"}, 2),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ({"a/b/cpu.max": "1000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 6),
        (
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/slurm/job_7/cpu.cfs_period_us": "100000",
            },
            3,
        ),
    ],
)
def test_cpus_follow_the_tightest_quota(cgroup, monkeypatch, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name, text in files.items():
        cgroup(name, text)
    assert config.cpu_count() == cpus


def machine(monkeypatch, available, free):
    monkeypatch.setattr(config, "_meminfo_bytes", lambda field: available)

    class Shm:
        f_bavail, f_frsize = free // 4096, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Shm)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "free", "limit", "store"),
    [
        (10 * GIB, 100 * GIB, None, 3 * GIB),
        (100 * GIB, 10 * GIB, None, 8 * GIB),
        (100 * GIB, 100 * GIB, 2 * GIB, 1 * GIB),
    ],
)
def test_store_is_the_smallest_of_the_three_shares(cgroup, monkeypatch, available, free, limit, store):
    machine(monkeypatch, available, free)
    if limit:
        cgroup("a/memory.max", str(limit))
        cgroup("a/b/memory.max", "max")
    assert config.default_store_bytes() == store


def test_version_1_cgroup_without_limit_is_no_limit(cgroup, monkeypatch):
    machine(monkeypatch, 10 * GIB, 100 * GIB)
    cgroup("memory/memory.limit_in_bytes", "9223372036854771712")
    assert config.default_store_bytes() == 3 * GIB


@pytest.mark.parametrize("where", ["memory", "memory/slurm", "memory/slurm/job_7"])
def test_store_honours_a_version_1_limit_of_any_cgroup_above_the_process(cgroup, monkeypatch, where):
    machine(monkeypatch, 100 * GIB, 100 * GIB)
    for folder in ("memory", "memory/slurm", "memory/slurm/job_7", "memory/slurm/job_8"):
        cgroup(f"{folder}/memory.limit_in_bytes", "9223372036854771712")
    cgroup("memory/slurm/job_8/memory.limit_in_bytes", str(1 * GIB))
    cgroup(f"{where}/memory.limit_in_bytes", str(4 * GIB))
    assert config.default_store_bytes() == 2 * GIB


def test_half_of_memory_and_of_each_limit_stays_free(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")

    write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 12582912 kB")
    assert config.spare_memory(tmp_path) == 4 * GIB
    assert config.spare_memory(tmp_path, share=0.375) == 2 * GIB
    write("proc/self/cgroup", "0::/a")
    write("sys/fs/cgroup/a/memory.max", "max")
    assert config.spare_memory(tmp_path) == 4 * GIB
    write("sys/fs/cgroup/a/memory.max", str(4 * GIB))
    write("sys/fs/cgroup/a/memory.current", str(3 * GIB))
    assert config.spare_memory(tmp_path) == 0
    write("sys/fs/cgroup/a/memory.stat", f"anon {GIB}\ninactive_file {2 * GIB}")
    assert config.spare_memory(tmp_path) == GIB
    write("proc/self/cgroup", "4:memory:/b")
    write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", str(6 * GIB))
    write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", str(2 * GIB))
    assert config.spare_memory(tmp_path) == GIB


def test_full_shm_says_how_to_enlarge_it(cgroup, monkeypatch):
    machine(monkeypatch, 10 * GIB, 1 << 20)
    with pytest.raises(ConfigError, match="shm-size"):
        config.default_store_bytes()


def test_own_cgroup_and_all_above_it_are_looked_at():
    folders = config._cgroup_dirs("")
    assert not folders or folders[-1] == Path("/sys/fs/cgroup")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", {}),
        ("{}", {}),
        ('{"gpu": 1, "seat": 0.5, "none": 0}', {"GPU": 1.0, "seat": 0.5}),
        ({"Gpu": 2}, {"GPU": 2.0}),
    ],
)
def test_resources_are_read_from_json_and_mappings(given, read, monkeypatch):
    monkeypatch.setenv("FASTRT_DETECT_DEVICES", "0")
    assert Config.load(object_store_memory="64MiB", resources=given or None).resources == read
    if isinstance(given, str):
        monkeypatch.setenv("FASTRT_RESOURCES", given)
        assert Config.load(object_store_memory="64MiB").resources == read


@pytest.mark.parametrize(
    "given", ["1", "[1]", "gpu", '{"gpu": "two"}', '{"gpu": -1}', '{"cpu": 1}', '{"a": 1e-5}', {1: 2}]
)
def test_what_is_no_resource_is_refused(given):
    with pytest.raises(ConfigError, match="resources"):
        Config.load(object_store_memory="64MiB", resources=given)


def test_a_node_without_workers_has_resources_and_lineage_may_keep_nothing():
    assert Config.load(object_store_memory="64MiB", num_workers=0, resources={"pen": 1}).resources == {"pen": 1}
    assert Config.load(object_store_memory="64MiB", lineage_bytes=0).lineage_bytes == 0
    with pytest.raises(ConfigError, match="lineage_bytes"):
        Config.load(object_store_memory="64MiB", lineage_bytes=-1)


def test_lineage_may_keep_as_much_as_on_ray_and_less_beside_a_small_store():
    assert Config.load(object_store_memory="2GiB").lineage_bytes == 1 << 30
    assert Config.load(object_store_memory="64MiB").lineage_bytes == 128 << 20
