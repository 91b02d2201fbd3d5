"""`fastrt token`: it shows what a cluster has, and issues certificates."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fastrt.cli.main import main
from fastrt.net.grpc.identity import Identity, new_token


def run(*words: str, **env: str) -> Result:
    clean = {"FASTRT_TOKEN": None, "FASTRT_TOKEN_FILE": None}
    return CliRunner().invoke(main, ["token", *words], env={**clean, **env})


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(0o600)
    return str(path)


def test_new_token_is_that_of_a_new_cluster() -> None:
    first, second = run("--new").output, run("--new").output
    assert Identity.from_token(first).name != Identity.from_token(second).name


def test_token_of_a_file_or_variable_is_shown(token_file: str) -> None:
    text = Path(token_file).read_text()
    assert run("--token-file", token_file).output.strip() == text
    assert run(FASTRT_TOKEN=text).output.strip() == text


def test_bearer_is_not_the_secret(token_file: str) -> None:
    shown = run("--token-file", token_file, "--bearer").output.strip()
    assert shown == Identity.from_token(Path(token_file).read_text()).key("bearer").hex()
    assert shown not in Path(token_file).read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--new", "--bearer"), "Give one of --new, --pem, --bearer and --metrics"),
        (("--address", "127.0.0.1:1"), "no node of '127.0.0.1:1' runs on this machine"),
        (("--token-file", "/nonexistent"), "Cannot read the token file"),
    ],
)
def test_mistakes_are_told_in_words(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    result = run(*words, FASTRT_RUNTIME_DIR=str(tmp_path))
    assert result.exit_code != 0
    assert told in result.output


def test_damaged_token_is_refused(token_file: str, tmp_path: Path) -> None:
    Path(token_file).write_text(Path(token_file).read_text()[:-1])
    result = run("--token-file", token_file, "--pem", str(tmp_path / "pem"))
    assert "not a cluster's token" in result.output
    assert not (tmp_path / "pem").exists()
