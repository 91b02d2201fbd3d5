"""The table that a notebook shows for a session, and the file by which it finds the dashboard."""

import os
import signal

import pytest

from fastrt.runtime.dashboards import this_process
from support.dashboard import Dashboard


def test_notebook_shows_the_command_and_then_the_link(rt, runtime_dir):
    with Dashboard(runtime_dir, "--session", "zzz"):  # of another session
        assert f"<code>fastrt dashboard --session {rt.session[:8]}</code>" in rt._repr_html_()
    with Dashboard(runtime_dir) as other:
        assert f'href="{other.url}"' in rt._repr_html_()
        status, headers, body = other.request(other.url.partition(str(other.port))[2])
        assert (status, headers["set-cookie"].endswith("HttpOnly; SameSite=Strict; Path=/")) == (200, True)
        assert b'content="" data-key' not in body
        second = other.next_url()
        assert second != other.url
        assert f'href="{second}"' in rt._repr_html_()
    assert not list(runtime_dir.glob("dashboard-*"))


@pytest.mark.parametrize("is_removed_by", ["notebook", "next dashboard"])
def test_killed_dashboard_leaves_a_file_that_is_ignored_and_removed(rt, runtime_dir, is_removed_by):
    dash = Dashboard(runtime_dir)
    os.kill(dash.process.pid, signal.SIGKILL)
    dash.process.communicate()
    left = list(runtime_dir.glob("dashboard-*"))
    assert len(left) == 1
    if is_removed_by == "notebook":
        assert "<code>fastrt dashboard" in rt._repr_html_()
    else:
        mine = this_process("http://127.0.0.1:1", "code", "token", "")
        mine.write(runtime_dir)
        assert [path != left[0] for path in runtime_dir.glob("dashboard-*")] == [True]
        mine.remove(runtime_dir)
    assert not list(runtime_dir.glob("dashboard-*"))
