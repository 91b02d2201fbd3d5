"""`fastrt demo` on small folders, good and bad; its exit code; what it leaves out."""

import os
import re

import pytest
from click.testing import CliRunner

from fastrt.cli import demo as demo_module
from fastrt.cli.main import main


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FASTRT_OBJECT_STORE_MEMORY", "64MiB")

    def run(*arguments):
        return CliRunner().invoke(main, ["demo", "--workers", "2", *map(str, arguments)])

    return run


@pytest.fixture
def sources(tmp_path):
    for k in range(40):
        folder = tmp_path / f"part{k % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{k}.py").write_text(f"def name{k}(x):\n    return x + {k}  # shared shared\n" * (k + 1))
    return tmp_path


def row(output, name):
    return re.search(rf"^ *{name} {{2,}}(.+?) *$", output, re.M)[1]


def test_demo_counts_a_folder_equally_in_both_ways(run, sources):
    result = run(sources)
    assert result.exit_code == 0, result.output
    assert row(result.output, "results") == "equal"
    assert row(result.output, "files") == "40"
    assert row(result.output, "bytes") == f"{sum(path.stat().st_size for path in sources.rglob('*.py')):,}"
    # 40 files, 3 + 1 merges, 1 part of the matrix, 1 slice of its terms.
    assert row(result.output, "tasks run") == "46 in 2 workers"
    assert "in one process" in result.output


def test_demo_takes_files_that_are_empty_binary_or_oddly_named(run, tmp_path):
    (tmp_path / "empty.py").touch()
    (tmp_path / "binary.py").write_bytes(b"\0\1\2")
    (tmp_path / "latin.c").write_bytes("int caf\xe9;".encode("latin-1"))
    (tmp_path / "text.py").write_text("alpha beta alpha [/red] [bold]")
    with open(os.path.join(os.fsencode(tmp_path), b"odd\xff.py"), "w") as file:
        file.write("gamma")
    os.mkfifo(tmp_path / "pipe.py")  # reading it would never end
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert row(result.output, "files") == "4, 1 skipped: binary.py (binary)"
    assert row(result.output, "results") == "equal"


def test_demo_takes_a_single_file_whatever_its_name(run, tmp_path):
    (tmp_path / "notes.unknown").write_text("one two two")
    result = run(tmp_path / "notes.unknown")
    assert result.exit_code == 0, result.output
    assert row(result.output, "words") == "3, 2 different"


def test_demo_of_files_without_a_word_ends_well(run, tmp_path):
    (tmp_path / "a.py").write_text("...")
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert row(result.output, "results") == "equal"


def test_demo_of_a_folder_without_sources_says_so(run, tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 1
    assert f"there are no source files below {tmp_path}; give another PATH" in result.output


def test_demo_of_a_missing_path_says_so(run, tmp_path):
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_demo_that_cannot_start_says_why(run, sources, monkeypatch):
    monkeypatch.setenv("FASTRT_OBJECT_STORE_MEMORY", "many")
    result = run(sources)
    assert result.exit_code == 1
    assert "FASTRT_OBJECT_STORE_MEMORY" in result.output
    assert "Traceback" not in result.output


def test_demo_fails_when_the_results_differ(run, sources, monkeypatch):
    honest = demo_module.run_single

    def dishonest(*arguments):
        outcome = honest(*arguments)
        outcome.total.words["name1"] += 1
        return outcome

    monkeypatch.setattr(demo_module, "run_single", dishonest)
    result = run(sources)
    assert result.exit_code == 1
    assert row(result.output, "results") == "different"
    assert "the two results differ" in result.output
