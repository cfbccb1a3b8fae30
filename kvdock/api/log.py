"""The server's log: one line for each message, whatever callers have put into it, and not too many lines.

Callers choose labels, ids, paths and more. `shown` shortens such text where a message has it; the handler escapes
characters that would end a line, move the cursor or turn the text around, in every message. Of the messages with one
template it writes a few a minute, then how many more there were.
"""

from __future__ import annotations

import logging
import unicodedata
from typing import Final

from kvdock.api.access.peer import AUDIT
from kvdock.protocol.readable import CONSOLE, JsonFormatter, LogFormat, LogLevel

SHOWN_CHARACTERS: Final = 64
MESSAGES: Final = 20
"""At most this many of one template are written within PERIOD_S."""
PERIOD_S: Final = 60.0
TEMPLATES: Final = 256
"""Further templates share one count, so that templates made of text from callers do not fill memory."""
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of Unicode: control and format characters, the bidirectional ones among them, and line separators."""


def shown(text: str) -> str:
    """Text that a caller chose, in quotes, escaped, at most SHOWN_CHARACTERS of it."""
    cut = text[:SHOWN_CHARACTERS]
    return f"'{escaped(cut)}'" + ("…" if len(text) > len(cut) else "")


def escaped(text: str) -> str:
    """On one line, without a character that has no shape: newline becomes \\n, U+202E becomes \\u202e."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii") if unicodedata.category(char) in _HIDDEN else char
        for char in text
    )


class LineFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """The lines of a traceback, which may quote a caller, are indented, so that none looks like a message."""
        first, *more = super().format(record).split("\n")
        return "\n".join((first, *(f"    {escaped(line)}" for line in more)))


class ServerLog(logging.StreamHandler):  # type: ignore[type-arg]  # its stream is standard error
    """The handler of the server's process."""

    def __init__(self, formatter: logging.Formatter | None = None) -> None:
        super().__init__()
        self.setFormatter(formatter or LineFormatter(CONSOLE))
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, template) → (when its period began, messages since)."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == AUDIT and record.levelno == logging.INFO:  # an operator's call: none is left out
            super().emit(record)
            return
        for key, (began_s, count) in tuple(self._counts.items()):
            if record.created - began_s >= PERIOD_S:
                del self._counts[key]
                if count > MESSAGES:
                    self._write_count(key, count - MESSAGES)
        template = record.msg if isinstance(record.msg, str) else ""
        if record.name == AUDIT and isinstance(record.args, tuple) and record.args:
            template = f"{record.args[0]}: {template}"  # so that one caller's refusals hide no other caller's
        key = (record.name, template)
        if key not in self._counts and len(self._counts) >= TEMPLATES:
            key = ("", "")
        began_s, count = self._counts.get(key, (record.created, 0))
        self._counts[key] = (began_s, count + 1)
        if count < MESSAGES:
            super().emit(record)

    def close(self) -> None:
        for key, (_, count) in self._counts.items():
            if count > MESSAGES:
                self._write_count(key, count - MESSAGES)
        self._counts.clear()
        super().close()

    def _write_count(self, key: tuple[str, str], count: int) -> None:
        name, template = key
        text = f"… {count} more like this: {shown(template)}"
        super().emit(logging.LogRecord(name, logging.WARNING, "", 0, text, None, None))


def set_up(level: LogLevel, format: LogFormat) -> None:
    """This process's log, from now on."""
    set_level(level)
    set_format(format)


def set_level(level: LogLevel) -> None:
    logging.getLogger().setLevel(level.upper())


def set_format(format: LogFormat) -> None:
    root = logging.getLogger()
    formatter = JsonFormatter() if format == "json" else LineFormatter(CONSOLE)
    handler = next((one for one in root.handlers if isinstance(one, ServerLog)), None)
    if handler is None:
        root.addHandler(ServerLog(formatter))
    else:
        handler.setFormatter(formatter)
