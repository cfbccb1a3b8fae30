"""A program on a pseudo-terminal of its own: keys for it, and what its screen shows. Enough of a terminal for programs
that draw whole screens from the first line on."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

TIMEOUT_S = 30.0
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
_STYLE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class PtyProgram:
    """`with PtyProgram(command, environ) as program`: killed at the end, if it still runs."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], columns: int = 80, rows: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        self._text = ""
        self._theirs = os.dup(theirs)
        """Kept open, so that its settings can be read after the program has ended."""
        self.before = termios.tcgetattr(self._theirs)
        self._size(columns, rows)
        self.process = subprocess.Popen(
            command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=control_terminal,
        )
        os.close(theirs)

    def resize(self, columns: int, rows: int) -> None:
        self._size(columns, rows)
        self.process.send_signal(signal.SIGWINCH)

    def _size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    @property
    def text(self) -> str:
        """All that it has written so far."""
        while select.select([self._ours], [], [], 0.0)[0]:
            try:
                self._text += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:  # nobody has the other side open
                break
        return self._text

    def screen(self) -> list[str]:
        """The lines of the newest picture that is whole."""
        pictures = self.text.split("\x1b[H")
        whole = [picture.partition("\x1b[J")[0] for picture in pictures if "\x1b[J" in picture]
        return [_STYLE.sub("", line) for line in whole[-1].split("\r\n")] if whole else []

    def pictures(self) -> int:
        return self.text.count("\x1b[J")

    def wait_for(self, claim: Callable[[list[str]], bool]) -> list[str]:
        """Waits until the claim is true of the screen, and returns that screen."""
        until = time.monotonic() + TIMEOUT_S
        while not claim(shown := self.screen()):
            last = ["it was never shown; the last screen:", *shown, self._text[-500:]]
            assert time.monotonic() < until, "\n".join(last)
            time.sleep(0.02)  # between two looks
        return shown

    def ended(self) -> int:
        """Its exit status."""
        return self.process.wait(TIMEOUT_S)

    def settings(self) -> object:
        """The terminal's, as termios has them."""
        return termios.tcgetattr(self._theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        for fd in (self._ours, self._theirs):
            os.close(fd)


def control_terminal() -> None:
    """Standard input becomes the terminal of the session, so that Ctrl-C typed there is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
