"""The cluster under the name that users of parameter servers look for."""

import fastrt.membership
import fastrt.ps.cluster


def test_everything_public_is_there_under_both_names() -> None:
    for name in fastrt.membership.__all__:
        assert getattr(fastrt.ps.cluster, name) is getattr(fastrt.membership, name)
