"""The standard streams of a command: some may be closed, and what is written to the others may be lost."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(Exception):
    """Standard output has not taken what was written. It takes whatever is written later, and drops it. No OSError:
    libraries end the program in ways of their own when a pipe is closed."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.is_unread = error.errno == errno.EPIPE
        """Its reader has closed it."""
        self.why = error.strerror


class _Output(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_null(self.fileno())  # what is still buffered, Python writes when it exits
            raise OutputLost(error) from error


class _Errors(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        """Drops what cannot be written, since there is no other place to say so. Later messages are tried again."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def open_standard_streams() -> None:
    """Opens those of the three standard streams that are closed, on /dev/null: otherwise the next sockets and files
    would get their numbers, and whatever a library prints would be written into them. From now on what is written to
    standard output raises OutputLost if it is lost, and what is written to standard error is dropped then. A character
    that the terminal cannot show is replaced in both."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_null(number)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = _text(_Output(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Errors(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: object) -> io.TextIOWrapper:
    """A stream of text, of the encoding that the one before it has; each line is written at once if that one did so."""
    encoding, at_once = None, False
    if isinstance(before, io.TextIOWrapper):
        encoding, at_once = before.encoding, before.line_buffering or before.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors="replace", line_buffering=at_once)


def _open_null(number: int) -> None:
    """Makes /dev/null the file of this number, for processes that are started, too."""
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)
