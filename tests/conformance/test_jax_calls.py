"""Every call of jaxlib's client, against jaxlib's own service and against fastrt's, in one run.

0.10.2 must agree to the letter: values, status codes, messages, payloads. Older versions must agree in values and
status codes; their services' words differ from version to version.
"""

import json
import re
from typing import Any

import pytest

# 0.4.38's own client dies of a segmentation fault in the calls that return bytes.
CASES = [
    ("0.10.2", {}, True),
    ("0.6.2", {}, True),
    ("0.4.38", {"skip": "bytes"}, False),
    ("0.4.13", {"coordination": True}, False),
    ("0.4.13", {"coordination": False}, False),
]


def tidied(outcome: Any, to_the_letter: bool) -> Any:
    """An outcome without what differs from call to call: times, ports, the order of unordered things."""
    if isinstance(outcome, list):
        return [tidied(item, to_the_letter) for item in outcome]
    if not (isinstance(outcome, dict) and "error" in outcome):
        return outcome
    words = outcome["error"]
    if not to_the_letter:
        return {"error": words.partition(":")[0]}
    words = re.sub(r"\{grpc_\w+:.*?\"\}|\{grpc_message:.*?\}|\{\"created\".*\}", "{...}", words)
    payloads = re.findall(r" \[type\.googleapis\.com/[^ ]*\]", words)
    return {"error": [re.sub(r" \[type\.googleapis\.com/[^ ]*\]", "", words), sorted(payloads)]}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("version", "options", "to_the_letter"), CASES, ids=lambda value: json.dumps(value))
def test_every_call_comes_out_as_with_jaxlibs_own_service(
    services: Any, spawn: Any, version: str, options: dict[str, Any], to_the_letter: bool
) -> None:
    ports = services(version, 2, options)
    runs = [spawn(version, "calls", port, options) for port in ports]
    (code, theirs, errors), (our_code, ours, our_errors) = [run.ended(100) for run in runs]
    assert code == 0, errors
    assert our_code == 0, our_errors
    assert len(theirs) > (10 if options.get("coordination") is False else 20)
    for (name, expected), (our_name, got) in zip(theirs, ours, strict=True):
        assert name == our_name
        outcomes = [tidied(got, to_the_letter), tidied(expected, to_the_letter)]
        if name == "get of a missing key" and options.get("coordination") is False:
            # This client gives up by itself at the moment at which the service answers: one of the two is first.
            assert all(one in ({"error": "NOT_FOUND"}, {"error": "DEADLINE_EXCEEDED"}) for one in outcomes), outcomes
        else:
            assert outcomes[0] == outcomes[1], name
