"""Folders that only this user may change; as root, the other user is a real one (a forked child with another uid)."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastrt import folders
from fastrt.folders import UnsafeFolderError

STRANGER = 40001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which takes root")


def as_stranger(do: Callable[[], object]) -> bool:
    """Run something in a child of another uid; whether it raised nothing."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder like /tmp: every user may make entries, and remove only their own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    above = [parent for parent in folder.parents if parent.stat().st_uid == os.geteuid() and parent != Path("/")]
    modes = [parent.stat().st_mode for parent in above]
    for parent, mode in zip(above, modes, strict=True):
        parent.chmod(stat.S_IMODE(mode) | 0o011)
    yield folder
    for parent, mode in zip(above, modes, strict=True):
        parent.chmod(stat.S_IMODE(mode))


def test_a_new_folder_and_those_above_it_are_for_this_user_only(tmp_path: Path) -> None:
    folder = folders.private_folder(tmp_path / "a" / "b", "a test folder")
    assert folder == tmp_path / "a" / "b"
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder.parent)] == [0o700, 0o700]
    assert folders.private_folder(folder, "a test folder") == folder


def test_a_folder_that_is_not_there_is_not_made_by_a_look(tmp_path: Path) -> None:
    assert not folders.has_private_folder(tmp_path / "a" / "b", "a test folder")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o1777])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UnsafeFolderError, match="chmod 700"):
        folders.private_folder(tmp_path / "open", "a test folder")


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafeFolderError, match="it is a link"):
        folders.private_folder(tmp_path / "link", "a test folder")


def test_a_link_of_this_user_above_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("x/../real")
    (tmp_path / "x").mkdir()
    assert folders.private_folder(tmp_path / "link" / "folder", "a test folder") == tmp_path / "real" / "folder"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UnsafeFolderError, match="is a link"):
        folders.private_folder(tmp_path / "a" / "folder", "a test folder")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsafeFolderError, match="it is not a folder"):
        folders.private_folder(tmp_path / "file", "a test folder")


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UnsafeFolderError, match=f"others may write to {tmp_path}/open, which has mode {mode:o}"):
        folders.private_folder(tmp_path / "open" / "folder", "a test folder")
    assert not (tmp_path / "open" / "folder").exists()


@needs_root
def test_a_folder_that_a_group_could_replace_is_refused_unless_the_group_is_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    folders.private_folder(tmp_path / "open" / "folder", "a test folder")  # root's own group
    os.chown(tmp_path / "open", -1, 1)  # daemon, on every Linux
    with pytest.raises(UnsafeFolderError, match="others may write"):
        folders.private_folder(tmp_path / "open" / "folder", "a test folder")
    os.chown(tmp_path / "open", -1, STRANGER)
    with pytest.raises(UnsafeFolderError, match="others may write"):
        folders.private_folder(tmp_path / "open" / "folder", "a test folder")


@needs_root
def test_a_folder_of_another_user_is_refused(shared: Path) -> None:
    assert as_stranger(lambda: (shared / "taken").mkdir(mode=0o700))
    with pytest.raises(UnsafeFolderError, match=f"it belongs to uid {STRANGER}, not to uid 0"):
        folders.private_folder(shared / "taken", "a test folder")
    with pytest.raises(UnsafeFolderError, match=f"taken belongs to uid {STRANGER}"):
        folders.private_folder(shared / "taken" / "below", "a test folder")
    assert not (shared / "taken" / "below").exists()


@needs_root
def test_a_link_of_another_user_is_not_followed(shared: Path, tmp_path: Path) -> None:
    assert as_stranger(lambda: (shared / "link").symlink_to(tmp_path))
    with pytest.raises(UnsafeFolderError, match=f"link is a link of uid {STRANGER}"):
        folders.private_folder(shared / "link" / "below", "a test folder")


@needs_root
def test_a_taken_name_makes_all_processes_agree_on_another(shared: Path) -> None:
    assert folders.default_folder(shared, "fastrt-0") == shared / "fastrt-0"
    assert not (shared / "fastrt-0").exists()
    assert as_stranger(lambda: (shared / "fastrt-0").mkdir(mode=0o777))
    assert as_stranger(lambda: (shared / "fastrt-0-0000000000000000").mkdir(mode=0o777))
    other = folders.default_folder(shared, "fastrt-0")
    assert other.name.startswith("fastrt-0-")
    assert other.name != "fastrt-0-0000000000000000"
    assert folders.private_folder(other, "a test folder") == other
    assert folders.default_folder(shared, "fastrt-0") == other
    (shared / "fastrt-0").rmdir()
    assert folders.default_folder(shared, "fastrt-0") == other  # where the running sessions are


def test_a_known_name_of_this_user_is_used(tmp_path: Path) -> None:
    (tmp_path / "fastrt-0").mkdir(mode=0o700)
    (tmp_path / "fastrt-0-0000000000000000").mkdir(mode=0o700)
    assert folders.default_folder(tmp_path, "fastrt-0") == tmp_path / "fastrt-0"


def test_files_are_made_for_this_user_and_never_through_a_link(tmp_path: Path) -> None:
    folder = folders.private_folder(tmp_path / "folder", "a test folder")
    fd = folders.open_private(folder, "new", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"one")
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    os.close(fd)
    with pytest.raises(FileExistsError):
        folders.open_private(folder, "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fd = folders.open_private(folder, "new", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"two")
    os.close(fd)
    assert folders.read_private(folder, "new") == b"onetwo"
    os.close(folders.open_private(folder, "new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    assert folders.read_private(folder, "new") == b""

    (tmp_path / "victim").write_bytes(b"content")
    (folder / "link").symlink_to(tmp_path / "victim")
    (folder / "hard").hardlink_to(tmp_path / "victim")
    os.mkfifo(folder / "fifo")
    for name in ("link", "hard", "fifo"):
        with pytest.raises((UnsafeFolderError, OSError)):
            folders.open_private(folder, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with pytest.raises(UnsafeFolderError):
            folders.read_private(folder, name)
    assert (tmp_path / "victim").read_bytes() == b"content"
    with pytest.raises(ValueError, match="is not a file name"):
        folders.open_private(folder, "../victim", os.O_RDONLY)


def test_a_folder_that_was_opened_to_others_since_is_refused(tmp_path: Path) -> None:
    folder = folders.private_folder(tmp_path / "folder", "a test folder")
    folder.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="lets other users in"):
        folders.open_private(folder, "new", os.O_WRONLY | os.O_CREAT)


def test_replacing_a_file_swaps_a_link_and_leaves_what_it_pointed_to(tmp_path: Path) -> None:
    folder = folders.private_folder(tmp_path / "folder", "a test folder")
    (tmp_path / "victim").write_bytes(b"content")
    (folder / "note").symlink_to(tmp_path / "victim")
    folders.replace_private(folder, "note", b"new")
    assert folders.read_private(folder, "note") == b"new"
    assert (tmp_path / "victim").read_bytes() == b"content"
    assert [path.name for path in folder.iterdir()] == ["note"]


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    folder = folders.private_folder(tmp_path / "folder", "a test folder")
    folders.replace_private(folder, "note", b"x" * 11)
    assert folders.read_private(folder, "note", bytes_max=11) == b"x" * 11
    with pytest.raises(UnsafeFolderError, match="larger than 10 bytes"):
        folders.read_private(folder, "note", bytes_max=10)


def test_a_secret_is_read_from_a_file_of_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(" secret\n")
    file.chmod(0o600)
    (tmp_path / "link").symlink_to("token")  # a volume of Kubernetes has its files so
    assert folders.read_secret(file) == folders.read_secret(tmp_path / "link") == "secret"
    file.chmod(0o640)
    with pytest.raises(UnsafeFolderError, match="Other users may read"):
        folders.read_secret(file)
    with pytest.raises(FileNotFoundError):
        folders.read_secret(tmp_path / "missing")
    with pytest.raises(UnsafeFolderError, match="not a regular file"):
        folders.read_secret("/dev/null")


@needs_root
def test_a_secret_that_another_user_wrote_or_could_replace_is_refused(shared: Path, tmp_path: Path) -> None:
    def plant() -> None:
        (shared / "token").touch(mode=0o600)
        (shared / "link").symlink_to(tmp_path / "token")

    assert as_stranger(plant)
    (tmp_path / "token").touch(mode=0o600)
    with pytest.raises(UnsafeFolderError, match=f"belongs to uid {STRANGER}"):
        folders.read_secret(shared / "token")
    with pytest.raises(UnsafeFolderError, match="another user could replace it"):
        folders.read_secret(shared / "link")


def test_files_are_for_this_user_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with folders.private_files():
            (tmp_path / "inside").touch()
        (tmp_path / "outside").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("inside", "outside")]
    assert modes == [0o600, 0o666]
