"""What kvdock's vLLM connector warns of while a scenario runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """It hears them also where SchedEngine has told vLLM to log nothing but errors."""
    log, heard = logging.getLogger("kvdock.vllm"), _Heard()
    log.addHandler(heard)
    log.setLevel(logging.WARNING)
    try:
        yield heard.lines
    finally:
        log.removeHandler(heard)
        log.setLevel(logging.NOTSET)
