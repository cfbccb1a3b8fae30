"""How this project's processes write their logs: lines for people, or JSON objects for programs."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CONSOLE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EVENT: Final = "event"
"""The attribute of a record that has the event, a struct, of which it tells."""


class JsonFormatter(logging.Formatter):
    """One object a line: when, how grave, which logger, the sentence, and the fields of its event."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage().encode(errors="backslashreplace").decode(),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        if (event := getattr(record, EVENT, None)) is not None:
            said["event"] = event
        return msgspec.json.encode(said).decode()
