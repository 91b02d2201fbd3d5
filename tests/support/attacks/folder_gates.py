"""The folders of a cluster. Only those that this user alone can change are used."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

import fastrt
from fastrt.durable import Journal
from fastrt.errors import FastrtError
from support.attacks.gates import Door


class Folder(Door):
    """A folder that fastrt makes, or finds: only one that this user alone can change is used."""

    _reason = "a folder has no port: nothing can be said to it"
    impossible: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("no secret", "wrong secret", "right secret replayed"), "a folder is guarded by its owner"),
        **dict.fromkeys(("squatted port", "silent", "slow", "flood", "garbage"), _reason),
        **dict.fromkeys(("oversized", "deep nesting"), "files of a checked folder are the user's own: see 'other uid'"),
    }

    def process(self) -> psutil.Process:
        """This process, in place of one that listens: nothing does."""
        return psutil.Process()

    def start(self, folder: Path) -> None:
        """Have fastrt use this folder. Raises FastrtError."""
        raise NotImplementedError

    def squatted_folder(self, uid: int | None) -> str:
        """Check that another user's folder, a link, and a folder that others may write to are refused."""
        said = ""
        for kind in ("owned by another user", "a link", "writable by others"):
            with tempfile.TemporaryDirectory(prefix="frt-") as name:
                folder, real = Path(name, "f"), Path(name, "real")
                real.mkdir(mode=0o700)
                if kind == "a link":
                    folder.symlink_to(real)
                    if uid is not None:
                        os.chown(folder, uid, uid, follow_symlinks=False)
                else:
                    real.rename(folder)
                    if kind == "writable by others":
                        folder.chmod(0o777)
                    elif uid is not None:
                        os.chown(folder, uid, uid)
                    else:
                        continue
                with pytest.raises(FastrtError) as refused:
                    self.start(folder)
                said = str(refused.value)
                assert name in said, f"{self.name}: the error does not name the folder: {said}"
                assert not list(folder.iterdir()), f"{self.name}: something was written into a folder that is {kind}"
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
        """The path of the folder."""
        return str(self.folder)


def fill(**folders: Path) -> None:
    """Live through a short session that has to spill."""
    with fastrt.init(1, "16MiB", **folders):
        refs = [fastrt.put(bytes(2 << 20)) for _ in range(12)]
        assert fastrt.get(refs[0]) == bytes(2 << 20)


class RuntimeFolder(Folder):
    """Of sockets, tokens and notes of sessions."""

    name = "runtime folder"

    def start(self, folder: Path) -> None:
        """Start a session with this runtime folder."""
        fastrt.init(1, "16MiB", runtime_dir=folder, spill_dir=self.scene.spill_dir)

    @property
    def folder(self) -> Path:
        """The runtime folder of the scene, with a node in it."""
        assert self.scene.head_node
        return self.scene.runtime_dir


class SpillFolder(Folder):
    """Of values that were moved out of the arena."""

    name = "spill folder"

    def start(self, folder: Path) -> None:
        """Run a session that spills into this folder."""
        fill(runtime_dir=self.scene.runtime_dir, spill_dir=folder)

    @property
    def folder(self) -> Path:
        """The spill folder of the scene, after a session has spilled into it."""
        fill(runtime_dir=self.scene.runtime_dir, spill_dir=self.scene.spill_dir)
        return self.scene.spill_dir


class StateFolder(Folder):
    """Of a coordinator's durable state."""

    name = "state folder"

    def start(self, folder: Path) -> None:
        """Open and close a journal in this folder."""
        Journal(folder).close()

    @property
    def folder(self) -> Path:
        """The state folder of the scene, with a coordinator that uses it."""
        assert self.scene.head_node
        return self.scene.state_dir


FOLDERS: list[type[Door]] = [RuntimeFolder, SpillFolder, StateFolder]
