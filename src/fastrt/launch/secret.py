"""The token of one job, which its processes derive each for itself from a key file of the user that all machines see.

The processes of a job start separately, and must have one secret that no other user can read. Launchers do not carry
secrets: srun, mpirun and mpiexec send the environment of a job, and the entries of PMI, between machines in the clear.
So the secret does not travel with the job at all. The user's home folder, which clusters share between their machines,
holds a key of mode 0600, and the token of a job is derived from the key and the job's name.

Another user of the machines cannot read the file. A stranger on the network sees nothing of it, as far as the shared
file system protects its own traffic, on which the user's ssh keys depend as well. The token of one job says nothing
about the key or the token of another job.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from fastrt.errors import ConfigError, FastrtError
from fastrt.folders import UnsafeFolderError, private_folder, read_secret
from fastrt.net.grpc.identity import job_token

_KEY_BYTES = 32
_FOLDER = "the folder of the key of `fastrt run` (FASTRT_KEY_FILE)"


def key_file() -> Path:
    """Return the path of this user's key: FASTRT_KEY_FILE, else `fastrt/key` in the user's folder for settings."""
    given = os.environ.get("FASTRT_KEY_FILE")
    if given:
        return Path(given)
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "fastrt" / "key"


def token_of_job(job: str, path: Path | None = None) -> str:
    """Derive a job's token from the user's key, which is made first if there is none.

    Args:
        job: the job's name, the same in all its processes.
        path: of the key; None: the default.
    Raises:
        FastrtError: the key cannot be made or read, or others could read it.
    """
    path = key_file() if path is None else path
    try:
        text = _read(path)
        if text is None:
            _make(path)
            text = _read(path)
        key = bytes.fromhex(text or "")
        if len(key) != _KEY_BYTES:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{path} does not hold the key of `fastrt run`: remove it, and the next job makes one"
        ) from None
    except (OSError, UnsafeFolderError) as exc:
        raise FastrtError(
            f"the key of `fastrt run` cannot be used: {exc}. Name a file in a folder of yours that all machines of the "
            "job see by FASTRT_KEY_FILE, or a file with a token by FASTRT_TOKEN_FILE"
        ) from None
    return job_token(key, job)


def _read(path: Path) -> str | None:
    try:
        return read_secret(path)
    except FileNotFoundError:
        return None


def _make(path: Path) -> None:
    """Make the key, unless another process makes it first: a hard link appears whole, and only once, on NFS too."""
    folder = private_folder(path.parent, _FOLDER)
    working = folder / f".key.{os.getpid()}.{secrets.token_hex(8)}"
    fd = os.open(working, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())  # the other machines must not read an empty file
        with contextlib.suppress(FileExistsError):
            os.link(working, folder / path.name)
    finally:
        os.unlink(working)
