"""kvdock's log lines go where vLLM's go and look like them, each behind the word kvdock."""

from __future__ import annotations

import copy
import logging

OURS, THEIRS = logging.getLogger("kvdock"), logging.getLogger("vllm")


class _AmongTheirs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # a line that does not fit its arguments ends nobody's thread
            self.handleError(record)
            return
        said = copy.copy(record)
        said.msg, said.args = text if text.startswith("kvdock") else f"kvdock: {text}", None
        for handler in THEIRS.handlers:
            if said.levelno >= handler.level:
                handler.handle(said)


def log_among_theirs() -> None:
    """Changes nothing where somebody has configured kvdock's logger, or where vLLM was told to configure none."""
    if THEIRS.handlers and not OURS.handlers and OURS.level == logging.NOTSET:
        OURS.addHandler(_AmongTheirs())
        OURS.setLevel(THEIRS.getEffectiveLevel())
        OURS.propagate = False
