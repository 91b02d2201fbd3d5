"""Options of `fastrt start` that are wrong: told before any process is started, with the exit code of wrong use."""

import os
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

from fastrt.cli.start import start
from fastrt.runtime.nodefile import nodes_here


def refusal(runtime_dir, *words, **variables):
    result = CliRunner().invoke(start, words, env={"FASTRT_RUNTIME_DIR": str(runtime_dir), **variables})
    assert result.exit_code == 2, result.output
    assert nodes_here(runtime_dir) == []
    return result.output


@pytest.mark.parametrize("how", ["option", "variable"])
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--num-workers", "-1", "num_workers=-1: must be from 0"),
        ("--resources", "{", "must be JSON such as"),
        ("--object-store-memory", "1x", "'1x' is not a size"),
        ("--token", "nonsense", "not a cluster's token"),
        ("--port", "many", "--port"),
        ("--heartbeat-timeout", "long", "--heartbeat-timeout"),
        ("--durability", "none", "--durability"),
    ],
)
def test_wrong_value_is_told_whichever_way_it_is_given(runtime_dir, how, option, value, told):
    if how == "option":
        assert told in refusal(runtime_dir, "--head", option, value)
    else:
        assert told in refusal(runtime_dir, "--head", **{f"FASTRT_{option[2:].replace('-', '_').upper()}": value})


@pytest.mark.parametrize("words", [(), ("--head", "--address", "127.0.0.1:1")])
def test_a_node_is_the_head_or_joins_one(runtime_dir, words):
    assert "Give either --head, or --address" in refusal(runtime_dir, *words)
    if words:
        assert "Give either --head, or --address" in refusal(runtime_dir, *words[1:], FASTRT_HEAD="1")


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", ":5", "127.0.0.1:99999", "127.0.0.1:0"])
def test_address_without_a_host_or_a_port_is_refused(runtime_dir, address):
    assert f"--address '{address}' is no address" in refusal(runtime_dir, "--address", address)


def test_detached_node_that_neither_starts_nor_ends_is_killed_and_reported(tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import os, threading\n"
        "from fastrt.cli import main, start\n"
        "if start._DETACHED in os.environ:\n"
        "    os.close(int(os.environ[start._DETACHED]))\n"
        "    threading.Event().wait()\n"
        "start._DETACH_S = 0.05\n"
        "main.main()\n"
    )
    words = [sys.executable, str(tmp_path / "stuck.py"), "start", "--head", "--detach"]
    with tempfile.TemporaryDirectory(prefix="frt-") as folder:  # keeps the log, and short: sockets have short names
        variables = {**os.environ, "FASTRT_RUNTIME_DIR": folder}
        ended = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: the node did not start; see "), ended.stderr


def test_every_option_is_also_a_variable():
    names = {option.opts[0]: option.envvar for option in start.params}
    assert names == {name: "FASTRT_" + name[2:].replace("-", "_").upper() for name in names}


def test_files_that_make_no_certificate_are_told_and_nothing_starts_in_the_clear(runtime_dir, tmp_path):
    for name in ("one", "two"):
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        subprocess.run(
            [*words, "-subj", "/CN=node", "-keyout", f"{name}.key", "-out", f"{name}.pem"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    (tmp_path / "junk").write_text("junk")
    cert, key, other, junk = (str(tmp_path / name) for name in ("one.pem", "one.key", "two.key", "junk"))
    for words, told in (
        (("--tls-ca", cert), "--tls-ca needs --tls-cert and --tls-key"),
        (("--tls-key", key), "go together"),
        (("--tls-cert", cert, "--tls-key", other), "KEY_VALUES_MISMATCH"),
        (("--tls-cert", junk, "--tls-key", junk), "cannot be used"),
        (("--tls-cert", cert, "--tls-key", key, "--tls-ca", junk), f"certificates of authorities {junk} cannot be"),
    ):
        assert told in refusal(runtime_dir, "--head", "--port", "0", *words), words
