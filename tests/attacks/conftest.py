"""What the attacks of this folder share: hostile processes as another user, and a scene of services to attack."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.attacks.attacker import OTHER_UID, Attacker
from support.attacks.scene import Scene


@pytest.fixture(scope="session")
def other_uid() -> int:
    """The uid of another user of this machine; needs root."""
    if os.getuid() != 0:
        pytest.skip("attacks as another Unix user need root, which can become any user")
    return OTHER_UID


@pytest.fixture
def attack() -> Iterator[Callable[..., Attacker]]:
    """Start hostile processes, see `Attacker`; those that still run at the test's end are killed."""
    started: list[Attacker] = []

    def start(code: str, **given: object) -> Attacker:
        started.append(Attacker(code, **given))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Scene]:
    """Services of a cluster, with honest users of them: a `Scene`. The name says that it grows while tests run."""
    with tempfile.TemporaryDirectory(prefix="frt-") as folder:  # short: sockets have short names
        os.chmod(folder, 0o755)  # another user may come as far as the folders that are to keep him out
        made = Scene(Path(folder))
        try:
            yield made
        finally:
            made.close()
        assert "Traceback" not in made.errors()
