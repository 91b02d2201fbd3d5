"""Makes the helpers of this folder, and of those beside it, importable; and starts nodes for its tests."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrt.node.daemon import sweep_sessions

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from cluster import RunningNode


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Callable[..., RunningNode]]:
    """Start nodes that are stopped at the end of the test: `start(*options)`."""
    with contextlib.ExitStack() as stack:

        def start_one(*options: str) -> RunningNode:
            node = RunningNode(runtime_dir, *options)
            stack.callback(node.stop)
            return node

        yield start_one
    sweep_sessions(runtime_dir, runtime_dir.parent / "spill")  # what was killed is removed by the next that starts


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Options by name: of two authorities, each with certificates for 127.0.0.1, for elsewhere, and from the past."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    options: dict[str, list[str]] = {}
    for name in ("ours", "foreign"):
        key, request = f"{name}.key", f"{name}.csr"
        new = ["req", "-newkey", "rsa:2048", "-nodes", "-subj"]
        openssl(*new, "/CN=ca", "-x509", "-days", "2", "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem")
        openssl(*new, "/CN=node", "-keyout", key, "-out", request)
        for called, days, host in ((name, "2", 1), (f"old-{name}", "-1", 1), (f"elsewhere-{name}", "2", 9)):
            (folder / "names").write_text(f"subjectAltName=IP:127.0.0.{host}")
            signed = ["-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key", "-CAcreateserial", "-days", days]
            certificate = f"{called}.pem"
            openssl("x509", "-req", "-in", request, *signed, "-extfile", "names", "-out", certificate)
            files = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": f"{name}-ca.pem"}
            options[called] = [word for option, file in files.items() for word in (option, str(folder / file))]
    return options
