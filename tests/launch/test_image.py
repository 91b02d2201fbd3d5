"""The Dockerfile: its instructions are followed in a chroot, and a job's pod runs in it as the user that it names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastrt.launch import manifest
from fastrt.net.grpc.identity import new_token
from support.image import RELEASES, Image
from support.jobs import needs

ROOT = Path(__file__).resolve().parents[2]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
# One pod of a Job, that asks its own probe.
APP = """
import os, subprocess, sys
import fastrt

@fastrt.remote
def double(x):
    return 2 * x, os.getuid()

with fastrt.init():
    found = fastrt.get([double.remote(k) for k in range(10)])
    probe = subprocess.run(sys.argv[2:], capture_output=True, text=True)
    print(sum(one for one, _ in found), {uid for _, uid in found}, probe.returncode, os.getcwd(), flush=True)
sys.exit(int(sys.argv[1]))
"""


def with_this_python(text: str) -> str:
    """The Dockerfile for the Python that runs the tests, whose wheel is here, and for Debian's release with it."""
    (version, release), *_ = re.findall(r"^FROM python:([0-9.]+)-slim-([a-z]+)$", text, re.M)
    assert RELEASES[version] == release
    text = text.replace(f":{version}-slim-{release}", f":{VERSION}-slim-{RELEASES[VERSION]}")
    return text.replace(f"cp{version.replace('.', '')}", f"cp{VERSION.replace('.', '')}")


@pytest.fixture
def image(tmp_path):
    needs("debootstrap", "unshare", "chroot", "ip")
    if os.getuid() != 0:
        pytest.skip("only root can make a file system for another root")
    if VERSION not in RELEASES:
        pytest.skip(f"no release of Debian has Python {VERSION} as its own")
    pip = [sys.executable, "-m", "pip", "wheel", "-q"]
    wheelhouse, wheels, root = tmp_path / "wheelhouse", tmp_path / "wheels", tmp_path / "root"
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", str(wheelhouse), str(ROOT)], check=True)
    subprocess.run([*pip, "-w", str(wheels), *map(str, wheelhouse.iterdir())], check=True)
    yield Image(root, tmp_path, wheels, ROOT / ".cache" / "debian")
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_image_of_the_dockerfile_runs_a_job_as_its_user(image, tmp_path):
    text = (ROOT / "Dockerfile").read_text()
    image.follow(with_this_python(text))
    doctor = image.start()  # CMD
    assert (doctor.returncode, "fastrt" in doctor.stdout) == (0, True), doctor.stdout + doctor.stderr

    (tmp_path / "app.py").write_text(APP)
    (added,) = re.findall(r"^#   FROM fastrt\n((?:#   .*\n)+)", text, re.M)  # the comment about a program's image
    image.follow(added.replace("#", ""))
    options = manifest.ManifestOptions("job", 1, "image", ["--num-workers", "1", "app.py", "7"], new_token())
    (container,) = manifest.objects(options)[2]["spec"]["template"]["spec"]["containers"]
    env = {one["name"]: one.get("value", "") for one in container["env"]} | {"FASTRT_TOKEN": options.token}
    probe = container["readinessProbe"]["exec"]["command"]
    ran = image.start(*container["command"], *probe, **env, JOB_COMPLETION_INDEX="0")
    assert (ran.returncode, ran.stdout) == (7, "90 {1000} 0 /home/fastrt\n"), ran.stderr

    with pytest.raises(AssertionError, match="nonesuch: not found"):
        image.follow("RUN nonesuch \\\n  --x")


def test_instruction_that_is_not_known_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="ONBUILD"):
        Image(tmp_path, tmp_path, tmp_path, tmp_path).follow("# a comment\nONBUILD RUN x \\\n  y\n")
