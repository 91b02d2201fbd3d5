"""The record of a build."""

import json

from fastrt.observe.build import this_build


def test_record_of_a_build_is_shown(tmp_path):
    file = tmp_path / "build.json"
    file.write_text(json.dumps({"commit": "0123456789abcdef+", "layout": 5, "flags": ["-O2", "hardened"]}))
    first, second, third = this_build("1.2.3", file).lines()
    assert first == "fastrt, version 1.2.3 (commit 0123456789ab+)"
    assert second.startswith("Python 3.")
    assert third == "core: layout 5, -O2, hardened"


def test_build_without_a_record_says_so(tmp_path):
    first, _, third = this_build("1.2.3", tmp_path / "build.json").lines()
    assert first == "fastrt, version 1.2.3"
    assert "without a record" in third
