"""The terminal of a live view: keys without Return, the other screen, and everything as it was at the end.

Ctrl-C, SIGTERM and SIGHUP end the view as `q` does. Ctrl-Z gives the terminal back until the view goes on. When
the window's size changes, the picture is drawn anew at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO

ENTER = "\x1b[?1049h\x1b[?25l"
"""The other screen, without a cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """While `held`, the screen is the view's."""

    def __init__(self, out: IO[str]) -> None:
        """`out`: the terminal. Keys are read from standard input, if that is a terminal as well."""
        self._out = out
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._saved = None if self._keys is None else termios.tcgetattr(self._keys)
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._ended = False

    @contextmanager
    def held(self) -> Iterator[None]:
        numbers = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)
        handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self._enter()
            yield
        finally:
            self._leave()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for fd in (self._wakes, self._wake):
                os.close(fd)

    @property
    def ended(self) -> bool:
        """A signal has ended the view."""
        return self._ended

    def draw(self, picture: str) -> None:
        """The picture from the screen's first line on. Lines that it does not have become empty."""
        lines = picture.replace("\n", "\x1b[K\n")  # in this mode the terminal itself adds what brings it to the left
        self._out.write(f"\x1b[H{lines}\x1b[K\x1b[J")
        self._out.flush()

    def key(self, patience_s: float) -> str:
        """The next key; empty when the time is over, or the view is to be drawn anew. Whoever presses keys does not
        shorten the time for others: ask again with what is left of it."""
        if self._ended:
            return ""
        watched = [self._wakes] if self._keys is None else [self._wakes, self._keys]
        ready, _, _ = select.select(watched, [], [], max(0.0, patience_s))
        if self._wakes in ready:
            os.read(self._wakes, 4096)
        if self._keys in ready and self._keys is not None:
            typed = os.read(self._keys, 64)
            if not typed:  # nobody is there any more
                self._ended = True
            return typed.decode(errors="replace")
        return ""

    def _enter(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys)
        self._out.write(ENTER)
        self._out.flush()

    def _leave(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            self._out.write(LEAVE)
            self._out.flush()
            if self._keys is not None and self._saved is not None:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._stop()
        elif number in _ENDING:
            self._ended = True
        with suppress(BlockingIOError):  # many have not been read yet: one is enough
            os.write(self._wake, b"\0")

    def _stop(self) -> None:
        """As the shell expects it of a program that knows nothing of Ctrl-Z."""
        self._leave()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # it returns when the shell lets this process go on
        signal.signal(signal.SIGTSTP, before)
        self._enter()
