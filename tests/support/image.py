"""Follow a Dockerfile without a container engine: its instructions run in a chroot with namespaces of their own.

The base image is replaced by Debian's own packages (`debootstrap`) of the release that the image's tag names, with
Debian's Python in `/usr/local`, where the image has its own. Layers, the network of a build, seccomp and cgroups are
not there. All mounts are in namespaces that end with the process that runs in them, however it ends.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

# Debian's releases have these Pythons.
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
# `python` and `pip` of the base image install into /usr/local, and refuse nothing. So does an environment there.
PYTHON = "python3 -m venv /usr/local"
OF_BASE = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
WHEELS = "/mnt"  # where pip in the chroot looks, and nowhere else
SHM = "64m"  # of /dev/shm, as container engines give
NAMESPACES = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
ENTER = f"""set -e
root=$1 wheels=$2 user=$3
shift 3
ip link set lo up
mount -t proc none "$root/proc"
mount -t tmpfs -o mode=755 none "$root/dev"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777,size={SHM} none "$root/dev/shm"
for name in null zero full random urandom tty
do : > "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s /proc/self/fd "$root/dev/fd"
mount --bind -o ro "$wheels" "$root/mnt"
exec chroot --userspec="$user" "$root" env -i "$@"
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile and what follows them, without comments and with lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", "").splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


def words_of(rest: str) -> list[str]:
    """The words of an instruction in its form of a list; the other form is for a shell."""
    return [str(word) for word in json.loads(rest)] if rest.startswith("[") else ["/bin/sh", "-c", rest]


class Image:
    """An image under construction, and then what runs in it.

    Args:
        root: the folder of its file system; made here. The caller removes it.
        context: the folder of the files that COPY names.
        wheels: the folder of the packages that pip finds there, in place of those on the network.
        cache: keeps the packages of Debian for the next time.
    """

    def __init__(self, root: Path, context: Path, wheels: Path, cache: Path) -> None:
        self.root = root
        self._context, self._wheels, self._cache = context, wheels, cache
        self.user, self.folder, self.env = "0", "/", dict(OF_BASE)
        self.entry: list[str] = []
        self.command: list[str] = []

    def follow(self, text: str) -> None:
        """Follow all instructions of a Dockerfile.

        Raises:
            ValueError: one of them is not known here.
            AssertionError: a command failed; the message is its output.
        """
        for name, rest in instructions(text):
            follow = getattr(self, f"_{name.lower()}", None)
            if follow is None:
                raise ValueError(f"{name} {rest}: this instruction is not known here")
            follow(rest)

    def run(self, words: Sequence[str], timeout_s: float = 60.0, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a command as the image's user in its folder and its environment; it is process 1 there."""
        variables = {"HOME": self._home(), **self.env, **env}
        inside = ["-C", self.folder, *[f"{name}={value}" for name, value in variables.items()], *words]
        enter = ["sh", "-c", ENTER, "sh", str(self.root), str(self._wheels), self.user]
        return subprocess.run([*NAMESPACES, *enter, *inside], capture_output=True, text=True, timeout=timeout_s)

    def start(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run what a container of the image runs: its entry point with these words, or with those of CMD."""
        return self.run([*self.entry, *(words or self.command)], **env)

    def _home(self) -> str:
        for line in (self.root / "etc/passwd").read_text().splitlines():
            name, _, uid, _, _, home, _ = line.split(":")
            if self.user in (name, uid):
                return home
        raise ValueError(f"USER {self.user}: there is no such user")

    def _from(self, rest: str) -> None:
        tag = re.fullmatch(r"python:([0-9.]+)-slim-([a-z]+)", rest)
        if tag is None or RELEASES.get(tag[1]) != tag[2]:
            raise ValueError(f"FROM {rest}: no release of Debian with its own Python stands for it")
        self._cache.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", f"--cache-dir={self._cache}"]
        made = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", *command, tag[2], str(self.root)],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout + made.stderr
        self._run(PYTHON)

    def _run(self, rest: str) -> None:
        about = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}
        done = self.run(words_of(rest), timeout_s=240, **about)
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout}{done.stderr}"

    def _copy(self, rest: str) -> None:
        *sources, to = shlex.split(rest)
        target = self._inside(to)
        if to.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        for source in sources:
            found = list(self._context.glob(source))
            if not found:
                raise ValueError(f"COPY {rest}: {source} is not in the context")
            for path in found:
                shutil.copy(path, target)

    def _inside(self, path: str) -> Path:
        return self.root / f"{self.folder}/{path}".lstrip("/") if not path.startswith("/") else self.root / path[1:]

    def _workdir(self, rest: str) -> None:
        self.folder = rest
        self._inside(rest).mkdir(parents=True, exist_ok=True)

    def _env(self, rest: str) -> None:
        self.env.update(word.split("=", 1) for word in shlex.split(rest))

    def _user(self, rest: str) -> None:
        self.user = rest

    def _cmd(self, rest: str) -> None:
        self.command = words_of(rest)

    def _entrypoint(self, rest: str) -> None:
        self.entry = words_of(rest)
