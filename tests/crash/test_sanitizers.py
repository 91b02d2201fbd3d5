"""What `make asan` says where the sanitizers are not; where they are, it runs them itself."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def sanitizers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(HERE))
    spec = importlib.util.spec_from_file_location("sanitizers", HERE / "sanitizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("variant", None)


@pytest.mark.parametrize("kind", ["address", "fuzzer", "thread"])
def test_absent_runtime_library_is_named(sanitizers, kind, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sanitizers.RUNTIMES, kind, ("libnobody-has-this.so",))
    with pytest.raises(SystemExit) as ended:
        sanitizers.environment(kind, tmp_path / "report")
    assert ended.value.code == sanitizers.ABSENT
    assert "libnobody-has-this.so are not here" in capsys.readouterr().err


def test_absent_compiler_is_no_runtime_library(sanitizers, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitizers.runtime("libasan.so") == ""
