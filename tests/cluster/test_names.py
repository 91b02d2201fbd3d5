"""The cluster under the name that users of parameter servers look for."""

import fastrt.cluster
import fastrt.ps.cluster


def test_everything_public_is_there_under_both_names() -> None:
    for name in fastrt.cluster.__all__:
        assert getattr(fastrt.ps.cluster, name) is getattr(fastrt.cluster, name)
