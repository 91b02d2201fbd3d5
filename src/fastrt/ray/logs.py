"""`ray.LoggingConfig`: how a program writes its log."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_ENCODINGS = ("TEXT", "JSON")


@dataclass
class LoggingConfig:
    """How the program's process writes its log. Workers write theirs as their code configures it.

    Attributes:
        encoding: "TEXT" or "JSON".
        log_level: of the root logger.
        additional_log_standard_attrs: further attributes of records that each line has.
    Raises:
        ValueError: another encoding.
    """

    encoding: str = "TEXT"
    log_level: str = "INFO"
    additional_log_standard_attrs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.encoding not in _ENCODINGS:
            raise ValueError(f"encoding is {self.encoding!r}; it must be one of {', '.join(_ENCODINGS)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> LoggingConfig:
        """Make one of the dict that `to_dict` returns."""
        return cls(**d)

    def apply(self) -> None:
        """Configure the root logger of this process."""
        root = logging.getLogger()
        root.setLevel(self.log_level)
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter(self))
        root.handlers[:] = [handler]


class _Formatter(logging.Formatter):
    """Writes records as lines of text or JSON."""

    def __init__(self, config: LoggingConfig) -> None:
        super().__init__("%(asctime)s\t%(levelname)s %(filename)s:%(lineno)s -- %(message)s")
        self._config = config

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        more = {name: getattr(record, name, None) for name in self._config.additional_log_standard_attrs}
        if self._config.encoding == "TEXT":
            return " ".join([text, *(f"{name}={value}" for name, value in more.items())])
        about = {
            "asctime": record.asctime, "levelname": record.levelname, "message": record.getMessage(),
            "filename": record.filename, "lineno": record.lineno, "process": record.process,
        }  # fmt: skip
        if record.exc_info:
            about["exc_text"] = self.formatException(record.exc_info)
        return json.dumps({**about, **more}, default=str)
