"""The setting `logging`: the module `logging` in workers and actors, before they run user code."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import sys
import traceback
from collections.abc import Callable

from fastrt.foreign_text import read_json
from fastrt.tasks.marks import Source

_TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """Makes a JSON object of one line from each record.

    Its fields: time (seconds since 1970), level, logger, message, pid and node; name and task_id inside a task or call;
    actor inside an actor; exception, the traceback as text.
    """

    def __init__(self, source: Callable[[], Source]) -> None:
        super().__init__()
        self._source = source
        self._node = os.uname().nodename

    def format(self, record: logging.LogRecord) -> str:
        """Make the line of a record."""
        row = {
            "time": record.created, "level": record.levelname, "logger": record.name, "message": record.getMessage(),
            "pid": record.process, "node": self._node,
        }  # fmt: skip
        try:
            source = self._source()
        except Exception:  # in a forked child, or after the end of the session
            source = Source()
        if source.name:
            row["name"] = source.name
        if source.path:
            row["task_id"] = f"{source.path:016x}"
        if source.actor:
            row["actor"] = source.actor
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def apply(setting: str, source: Callable[[], Source]) -> None:
    """Set up `logging` in this process; a setting that cannot be applied is reported on stderr.

    Args:
        setting: `Config.logging`, not empty.
        source: returns the task or actor on this thread.
    """
    try:
        if setting == "json":
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(JsonFormatter(source))
            logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
        elif setting.isdecimal():
            logging.basicConfig(level=int(setting), stream=sys.stderr, format=_TEXT_FORMAT, force=True)
        else:
            logging.config.dictConfig(read_json(setting, "FASTRT_LOGGING", own=True))
    except Exception:  # such as a handler whose file cannot be opened on this node
        sys.stderr.write(f"fastrt: the setting logging could not be applied in a worker:\n{traceback.format_exc()}")
