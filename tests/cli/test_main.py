"""The command group: quick to list, clear about what it does not know."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from fastrt.cli.main import main


def test_help_lists_every_command():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("bench", "coordinator", "demo", "profile", "status"):
        assert f"\n  {name} " in result.output


@pytest.mark.parametrize("words", [["--help"], ["ps", "scheduler", "--help"]])
def test_help_imports_neither_rich_nor_numpy(words):
    code = f"import sys; from fastrt.cli.main import main; main({words}, standalone_mode=False); "
    code += "print([name for name in ('rich', 'numpy', 'grpc', 'asyncio', 'pytest') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_unknown_command_is_refused():
    result = CliRunner().invoke(main, ["fly"])
    assert result.exit_code == 2
    assert "fly" in result.output
