"""`fastrt profile transfer` on small sizes: the table, the figures for machines, the plot and the trace."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from fastrt.cli.main import main
from fastrt.net.grpc.identity import new_token
from fastrt.observe import profile as measured
from fastrt.scheduler import Scheduler, SchedulerClient, SchedulerOptions


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measured, "_ROW_S", 0.0)
    return


# grpc opens now what it keeps open for good.
with Scheduler(SchedulerOptions()) as _scheduler, SchedulerClient(_scheduler.address) as _client:
    _client.register_store("127.0.0.1:9")
del _scheduler, _client


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", "transfer", *map(str, arguments)])


def test_table_plot_and_trace_of_one_run(tmp_path):
    plot, trace = tmp_path / "plot.html", tmp_path / "trace.json"
    result = run("--size", "4KiB", "--plot", plot, "--trace", trace)
    assert result.exit_code == 0, result.output
    for text in ("1 KiB", "4 KiB", "plain TCP", "same node", "native", "grpc", "of limit", "serialize"):
        assert text in result.output
    assert plot.read_text().startswith("<!doctype html>")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def test_json_has_every_row_and_nothing_beside_it():
    result = run("--size", "1KiB", "--plane", "native", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {row["path"] for row in rows} == {"memcpy", "plain TCP", "put", "get", "same node", "native"}
    assert all(row["GB_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--size", "100"), "--size must be 1 KiB or more"),
        (("--size", "much"), "'much' is not a size"),
        (("--chunk", "8MiB"), "--chunk from 1 KiB to 7 MiB"),
        (("--plot", "plot.pdf"), "a plot's name must end with .html or .png"),
        (("--plot", "/nowhere/plot.html"), "/nowhere is no folder where a file can be written"),
        (("--trace", "/nowhere/trace.json"), "/nowhere is no folder where a file can be written"),
        (("--trace", "/"), "is a directory"),
        (("--address", "127.0.0.1:1"), "set FASTRT_TOKEN_FILE"),
        (("--plane", "carrier pigeon"), "Invalid value"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments, text, monkeypatch):
    monkeypatch.delenv("FASTRT_TOKEN_FILE", raising=False)
    result = run(*arguments)
    assert result.exit_code != 0
    assert text in result.output


def test_store_that_does_not_answer_is_an_error_that_names_it(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text(new_token())
    token.chmod(0o600)
    monkeypatch.setenv("FASTRT_TOKEN_FILE", str(token))
    result = run("--size", "1KiB", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1 says" in result.output
