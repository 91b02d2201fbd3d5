"""The programs of docs/peers.md, which know nothing of fastrt but what `fastrt protos` and `fastrt token` write."""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastrt.net.grpc.auth import read_token
from fastrt.net.grpc.identity import Identity
from fastrt.scheduler import SchedulerClient
from support.go_env import go_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/peers.md").read_text()
FASTRT = [sys.executable, "-c", "from fastrt.cli.main import main; main(prog_name='fastrt')"]
PATIENCE_S = 30.0

pytestmark = pytest.mark.timeout(240)


def block(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)[number]


def fastrt(*words, cwd, env):
    result = subprocess.run([*FASTRT, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory, runtime_dir):
    """A folder with the page's files, beside a cluster that runs its commands: folder, scheduler, servers' name."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "work.py").write_text(block("python"))
    environment = {**os.environ, "FASTRT_RUNTIME_DIR": str(runtime_dir), "FASTRT_OBJECT_STORE_MEMORY": "64MiB"}
    environment["FASTRT_SPILL_DIR"] = str(runtime_dir.parent / "spill")
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    commands = [line[2:].split("#")[0].split()[1:] for line in block("console").splitlines()]
    start, *others = commands
    start[start.index("6466")] = "0"
    process = subprocess.Popen(
        [*FASTRT, *[word for word in start if word != "--detach"], "--port", "0", "--num-workers", "1"],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("use it:"):
                break
        scheduler = re.search(r"^scheduler: +(\S+)", said, re.M)[1]
        identity = Identity.from_token(read_token(re.search(r"--token-file (\S+)", said)[1])).for_programs()
        printed = [fastrt(*words, cwd=folder, env=environment) for words in others]
        yield folder, scheduler, re.search(r"servers' name: (\S+)", printed[-1])[1], identity
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def peer(place, wait_until):
    """Run a program of the page against the cluster; what it printed."""
    folder, scheduler, name, identity = place
    with SchedulerClient(scheduler, identity=identity) as client:
        wait_until(lambda: "work.square" in client.info().function_table, "the function is exported", PATIENCE_S)

    def peer(*words, **variables):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
        words = [*words, scheduler, name]
        result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return peer


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_python_peer_of_the_page_calls_a_function(place, peer):
    folder = place[0]
    (command,) = (line[2:] for line in block("console", 1).splitlines())
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=folder, check=True, timeout=60)
    (folder / "peer.py").write_text(block("python", 1))
    assert "import fastrt" not in block("python", 1)
    assert peer(sys.executable, "peer.py") == "144\n"


@pytest.fixture(scope="module")
def modules():
    """The packages from the npm registry, kept between runs in .cache, as those of tests/scheduler/test_node.py."""
    wanted = (ROOT / "tests/scheduler/node/package.json").read_bytes()
    folder = ROOT / ".cache" / f"node-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(wanted)
        words = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        npm = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)
        if npm.returncode != 0:
            pytest.skip(f"npm cannot install @grpc/grpc-js here: {npm.stderr.strip()[-300:]}")
        (folder / "done").touch()
    return folder / "node_modules"


@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="Node.js with npm is not here")
def test_javascript_peer_of_the_page_calls_a_function(place, peer, modules):
    (place[0] / "peer.js").write_text(block("javascript"))
    assert peer("node", "peer.js", NODE_PATH=str(modules)) == "144\n"


@pytest.mark.skipif(go_environment() is None, reason="tests/support/go_env.py was not run")
@pytest.mark.timeout(900)
def test_go_peer_of_the_page_calls_a_function(place, peer):
    folder, variables = place[0] / "go", go_environment()
    folder.mkdir()
    for name in ("protos", "client"):
        (folder / name).symlink_to(place[0] / name)
    (folder / "peer.go").write_text(block("go"))
    script = "\n".join(line[2:] for line in block("console", 2).splitlines())
    script = script.replace("protoc ", f"{shlex.quote(sys.executable)} -m grpc_tools.protoc ")
    # Without the Go proxy there are no modules: the generated package is found in GOPATH.
    script = re.sub(r"^go mod.*\n?", "", script, flags=re.M)
    environment = {**os.environ, **variables}
    subprocess.run(["sh", "-ec", script], cwd=folder, env=environment, check=True, timeout=60)
    (folder / "path/src").mkdir(parents=True)
    (folder / "path/src/peer").symlink_to(folder)
    environment["GOPATH"] += f":{folder / 'path'}"
    build = subprocess.run(["go", "build", "-o", "peer", "peer.go"], cwd=folder, env=environment, capture_output=True)
    assert build.returncode == 0, build.stderr
    assert peer(str(folder / "peer")) == "144\n"


def test_protos_are_written_whole_and_replaced_only_by_force(tmp_path):
    environment = dict(os.environ)
    said = fastrt("protos", "out", cwd=tmp_path, env=environment)
    written = {path.relative_to(tmp_path / "out"): path.read_bytes() for path in tmp_path.rglob("*.proto")}
    assert written == {p.relative_to(ROOT / "protos"): p.read_bytes() for p in (ROOT / "protos").rglob("*.proto")}
    assert f"{len(written)} files" in said
    fastrt("protos", "out", cwd=tmp_path, env=environment)
    (tmp_path / "out/ray/types.proto").write_text("changed")
    refused = subprocess.run([*FASTRT, "protos", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "types.proto would change" in refused.stderr
    assert (tmp_path / "out/ray/types.proto").read_text() == "changed"
    fastrt("protos", "out", "--force", cwd=tmp_path, env=environment)
    assert (tmp_path / "out/ray/types.proto").read_bytes() == written[Path("ray/types.proto")]
