"""The campaign against doors that are not gRPC, in its short form: fewer hostile connections, and no bar on times.

`bench/campaign_ports.py` measures 2,000 connections, and times.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import campaign_ports


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", campaign_ports.DOORS)
def test_door_under_hostile_connections_serves_and_gives_all_back(door):
    for kind, found in campaign_ports.campaign(door, campaign_ports.KINDS, 300, calls=20):
        assert found["failures"] == [], kind
        assert set(campaign_ports.misses(found)) <= {"p99"}, (kind, found)
