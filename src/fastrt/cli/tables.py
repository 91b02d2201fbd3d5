"""The console on which commands print their tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Wider than any table, so that output to a pipe or a file is neither wrapped nor cut.
_PIPED_WIDTH = 10_000


def table_console() -> Console:
    """Standard output for tables: as wide as the terminal, or unlimited when it is piped."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
