"""The short form of the kill campaign, among the long tests; `make chaos` runs the long form."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    spec = importlib.util.spec_from_file_location("mutants", HERE / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.timeout(600)  # it compiles the core with failpoints
def test_kill_at_every_point_of_the_core_loses_nothing() -> None:
    # Other tests have the other cores; and what lanes have in common each does again: 74 s of CPU, not 53.
    command = [sys.executable, str(HERE / "chaos.py"), "--short", "--lanes", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_mutant_still_applies(mutants: ModuleType, tmp_path: Path) -> None:
    core = mutants.variant.ROOT / "src" / "fastrt" / "_core"
    for mutant in mutants.MUTANTS:
        (source,) = core.rglob(mutant.file)
        shutil.copy(source, tmp_path)
        mutants.apply(mutant, tmp_path)
        assert (tmp_path / mutant.file).read_text() != source.read_text()
    assert len(mutants.MUTANTS) >= 20
