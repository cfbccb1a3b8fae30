"""The texts that processes of this project write for people: the lines of their logs, sizes and times."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CONSOLE: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
EVENT: Final = "event"
"""The attribute of a log record that holds its event, a struct."""
_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: the time, the level, the logger, the message, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage().encode(errors="backslashreplace").decode(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if (event := getattr(record, EVENT, None)) is not None:
            fields["event"] = event
        return msgspec.json.encode(fields).decode()


def size(size_bytes: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 has it: text from a command line, the environment or a file name may have other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def percent(share: float | None, digits: int | None = None) -> str:
    """0.7824 → 78 %, 0.0782 → 7.8 %; None, which is not measured, is a dash. 0 % and 100 % are exactly that. The page
    writes shares in the same way (`share` in kvdock/web/format.js). `digits`: as many after the point, and no more."""
    if share is None:
        return "-"
    if digits is not None:
        return f"{100 * share:.{digits}f} %" if share < 0.9995 else "100 %"
    if 0 < share < 0.001:
        return "<0.1 %"
    of_100 = min(100 * share, 99.9) if share < 1 else 100 * share
    is_whole = of_100 == 0 or 9.95 <= of_100 < 99 or share >= 1
    return f"{of_100:.{0 if is_whole else 1}f} %"


def exact_bytes(size_bytes: int) -> str:
    """The size in the largest unit that divides it: 4294967296 → 4GiB, 1000 → 1000."""
    for unit, factor in _UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def duration(seconds: float) -> str:
    """The two largest units: 3725 → 1 h 2 min."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""]
    given = [part for part in [*parts, f"{whole % 60} s"] if part]
    return " ".join(given[:2])


def span(seconds: float) -> str:
    """A time that may be short: 0.0123 → 12.3 ms, 2.34 → 2.3 s, and from a minute on as `duration` has it."""
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
