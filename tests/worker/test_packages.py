"""Archives of packages: made alike from equal files, and unpacked only if every entry stays inside."""

import hashlib
import stat
import types
import zipfile

import pytest

from fastrt.errors import ConfigError
from fastrt.folders import private_folder
from fastrt.tasks import packages as made
from fastrt.tasks.runtime_env import Environment, Package, environment_of
from fastrt.worker import packages


@pytest.fixture
def store(tmp_path):
    """Where a session's files would be: packages are made and unpacked without its arena."""
    session = private_folder(tmp_path / "session", "a session")
    return types.SimpleNamespace(
        socket_path=str(session / "node.sock"),
        client=types.SimpleNamespace(segment=types.SimpleNamespace(session="a" * 32)),
    )


def archive(store, *entries):
    """Write an archive of (name, type of file, data), and return its package."""
    folder = made.folder_of(store)
    with zipfile.ZipFile(folder / "made", "w", zipfile.ZIP_DEFLATED) as out:
        for name, kind, data in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (kind | 0o600) << 16
            out.writestr(entry, data)
    (folder / "made").chmod(0o600)
    digest = hashlib.sha256((folder / "made").read_bytes()).hexdigest()
    (folder / "made").rename(folder / f"{digest}.zip")
    return Package("/gone", digest, "b" * 32)


@pytest.mark.parametrize("name", ["../outside", "/outside", "inner/../../outside", "..", "a\\..\\..\\outside"])
def test_entry_that_leads_out_is_refused(store, tmp_path, name):
    package = archive(store, ("fine", stat.S_IFREG, "x"), (name, stat.S_IFREG, "x"))
    with pytest.raises(ConfigError, match="is no file inside of it"):
        packages.localized(store, Environment(working_dir="/gone", packages=(package,)))
    assert not list(tmp_path.rglob("outside*"))
    assert not (made.folder_of(store) / package.digest).exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFDIR])
def test_entry_that_is_no_file_is_refused(store, kind):
    package = archive(store, ("link", kind, "/etc/passwd"))
    with pytest.raises(ConfigError, match="is no file inside of it"):
        packages.localized(store, Environment(working_dir="/gone", packages=(package,)))


def test_too_much_data_is_refused(store, monkeypatch):
    monkeypatch.setattr(packages, "BYTES_MAX", 1000)
    package = archive(store, ("large", stat.S_IFREG, b"0" * 1001))
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        packages.localized(store, Environment(working_dir="/gone", packages=(package,)))


def test_archive_that_is_none_is_refused(store):
    package = archive(store)
    (made.folder_of(store) / f"{package.digest}.zip").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="not a zip file"):
        packages.localized(store, Environment(working_dir="/gone", packages=(package,)))


@pytest.mark.parametrize("digest", ["", "../../token", "A" * 64, "0" * 63, "0" * 63 + "/"])
def test_part_of_something_else_than_a_package_is_refused(store, tmp_path, digest):
    with pytest.raises(ValueError, match="is no digest of a package"):
        made.read_part(tmp_path / "session", digest, 0)


def test_equal_files_make_equal_archives_and_large_ones_none(store, tmp_path, monkeypatch):
    (tmp_path / "session" / "peer.sock").touch()
    digests = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "b.txt").write_text("b")
        (folder / "a.txt").write_text("a")
        (folder / "skipped.csv").write_text(name)
        given = environment_of({"working_dir": folder, "excludes": ["*.csv"]})
        (package,) = made.packed(store, given).packages
        digests.append(package.digest)
    assert digests[0] == digests[1]
    monkeypatch.setattr(made, "FILES_MAX", 1)
    (package,) = made.packed(store, environment_of({"working_dir": folder})).packages
    assert not package.digest
    with pytest.raises(ConfigError, match="exclude what tasks do not need by excludes="):
        packages.localized(store, Environment(working_dir="/gone", packages=(Package("/gone", "", "b" * 32),)))


def test_modules_are_given_as_objects_too():
    import support

    assert environment_of({"py_modules": [support]}) == environment_of({"py_modules": [support.__path__[0]]})


@pytest.mark.parametrize("excludes", ["*.csv", [5], ["/"], ["!a"]])
def test_wrong_excludes_are_refused(excludes):
    with pytest.raises((TypeError, ConfigError), match="excludes"):
        environment_of({"excludes": excludes})
