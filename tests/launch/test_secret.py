"""The key of a user, and the tokens of jobs that are derived from it."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastrt.errors import FastrtError
from fastrt.launch.secret import key_file, token_of_job
from fastrt.net.grpc.identity import Identity


def test_token_is_the_same_in_all_processes_of_a_job_and_another_one_in_other_jobs(tmp_path):
    path = tmp_path / "keys" / "key"
    with ThreadPoolExecutor(8) as pool:  # as the ranks of a user's first job: all find no key, and one makes it
        tokens = set(pool.map(lambda k: token_of_job("slurm x 1 0", path), range(8)))
    assert len(tokens) == 1
    assert token_of_job("slurm x 1 1", path) not in tokens
    assert Identity.from_token(tokens.pop()).name
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["key"]


def test_key_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "keys" / "key"
    token_of_job("one", path)
    path.chmod(0o640)
    with pytest.raises(FastrtError, match="chmod 600"):
        token_of_job("one", path)


def test_file_that_holds_no_key_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text("short\n")
    path.chmod(0o600)
    with pytest.raises(FastrtError, match="does not hold the key"):
        token_of_job("one", path)


def test_key_is_in_the_users_folder_for_settings(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTRT_KEY_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert key_file() == tmp_path / "fastrt" / "key"
    monkeypatch.setenv("FASTRT_KEY_FILE", "/shared/key")
    assert str(key_file()) == "/shared/key"
