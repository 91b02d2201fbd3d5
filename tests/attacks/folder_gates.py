"""The folders of a cluster. Only those that this user alone can change are used."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
from gates import Door
from scene import MAIN


class Folder(Door):
    """A folder that fastrt makes, or finds: only one that this user alone can change is used."""

    _reason = "a folder has no port: nothing can be said to it"
    impossible: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("no secret", "wrong secret", "right secret replayed"), "a folder is guarded by its owner"),
        **dict.fromkeys(("squatted port", "silent", "slow", "flood", "garbage"), _reason),
        **dict.fromkeys(("oversized", "deep nesting"), "files of a checked folder are the user's own: see 'other uid'"),
    }

    def process(self) -> psutil.Process:
        """See `Door`: nothing listens; this process stands in for one that does."""
        return psutil.Process()

    def start(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Have fastrt use this folder."""
        raise NotImplementedError

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A short life of a session, or a service."""
        environment = {**os.environ, **self.scene.environment, **env}
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)

    def squatted_folder(self, uid: int | None) -> str:
        """See `Door`: another user's folder, a link to one, and one that others may write to are refused."""
        said = ""
        for kind in ("owned by another user", "a link", "writable by others"):
            with tempfile.TemporaryDirectory(prefix="frt-") as name:
                folder, real = Path(name, "f"), Path(name, "real")
                real.mkdir(mode=0o700)
                if kind == "a link":
                    folder.symlink_to(real)
                else:
                    real.rename(folder)
                    if kind == "writable by others":
                        folder.chmod(0o777)
                    elif uid is not None:
                        os.chown(folder, uid, uid)
                    else:
                        continue
                done = self.start(folder)
                assert done.returncode != 0, f"{self.name}: a folder is used that is {kind}"
                assert name in done.stderr, f"{self.name}: the error does not name the folder:\n{done.stderr}"
                assert not list(folder.iterdir()), f"{self.name}: something was written into a folder that is {kind}"
                said = done.stderr.strip().splitlines()[-1]
        return f"refused: {said[:80]}"

    def other_uid(self, attack: Callable[..., Any], uid: int) -> str:
        """Another user can neither list the folder nor read a file in it."""
        code = """
try: report["listed"] = os.listdir(given["folder"])
except OSError as error: report["refused"] = error.strerror
for path in given["files"]:
    try: report["read"] = open(path, "rb").read(10).hex()
    except OSError: pass
"""
        folder = self.folder
        files = [str(path) for path in folder.rglob("*") if path.is_file()]
        report = attack(code, uid=uid, folder=str(folder), files=files).finish()
        assert report == {"refused": "Permission denied"}, report
        return f"permission denied, for {len(files)} files in it too"

    @property
    def folder(self) -> Path:
        """One that is in use."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """See `Door`."""
        return str(self.folder)


SESSION = "import fastrt\nwith fastrt.init(1, '64MiB'): pass\n"


class RuntimeFolder(Folder):
    """Of sockets, tokens and notes of sessions."""

    name = "runtime folder"

    def start(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """See `Folder`."""
        return self.run(sys.executable, "-c", SESSION, FASTRT_RUNTIME_DIR=str(folder))

    @property
    def folder(self) -> Path:
        """See `Folder`."""
        assert self.scene.head_node
        return self.scene.runtime_dir


class SpillFolder(Folder):
    """Of values that were moved out of the arena."""

    name = "spill folder"

    def begin(self) -> None:
        """See `Door`."""
        self.run(sys.executable, "-c", SPILLING).check_returncode()

    def start(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """See `Folder`."""
        return self.run(sys.executable, "-c", SPILLING, FASTRT_SPILL_DIR=str(folder))

    @property
    def folder(self) -> Path:
        """See `Folder`."""
        assert self.scene.head_node
        return self.scene.spill_dir


SPILLING = """
import fastrt
with fastrt.init(1, "16MiB"):
    refs = [fastrt.put(bytes(2 << 20)) for _ in range(12)]
    assert fastrt.get(refs[0]) == bytes(2 << 20)
"""


class StateFolder(Folder):
    """Of a coordinator's durable state."""

    name = "state folder"

    def start(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """See `Folder`."""
        words = ["coordinator", "--num-tasks", "1", "--address", "127.0.0.1:0", "--state-dir", str(folder)]
        with subprocess.Popen(
            [*MAIN, *words], env={**os.environ, **self.scene.environment}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as one:  # fmt: skip
            assert one.stdout is not None
            if one.stdout.readline():  # it serves
                one.terminate()
                return subprocess.CompletedProcess(words, 0, *one.communicate(timeout=20))
            out, err = one.communicate(timeout=20)
            return subprocess.CompletedProcess(words, one.returncode, out, err)

    @property
    def folder(self) -> Path:
        """See `Folder`."""
        assert self.scene.head_node
        return self.scene.state_dir


FOLDERS: list[type[Door]] = [RuntimeFolder, SpillFolder, StateFolder]
