"""Tells the next server that this one crashed while it used a pool that it had taken over.

Only a crash of the server itself counts: SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGABRT. Its signal handler (Python's
faulthandler) writes which it was into a file beside the pool. A process that is killed, by an operator or for want of
memory, writes nothing, and its end says nothing about the pool.
Invariant: while an adopted pool is used and not yet trusted, the file is there, and empty until a crash.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdock.api.pool.kept_object import KeptObject

TRUSTED_S: Final = 600.0
"""After that long an adopted pool is trusted, and a crash is not held against it. By then engines have come back or are
given up, their leases have ended, and the table was read as a whole many times: what adoption missed has been met."""
HEADING: Final = "Fatal Python error: "
"""With it faulthandler begins."""
log = logging.getLogger("kvdock.api")


class CrashMark:
    """The file at `path`. `now_s`: a clock that nobody sets."""

    def __init__(self, path: Path, now_s: Callable[[], float]) -> None:
        self._path, self._now_s = path, now_s
        self._trusted_at_s = 0.0
        self._fd = -1
        self._had_handler = False

    def read(self) -> str:
        """How the last server that used the pool without trusting it crashed, like `Segmentation fault`; '': it did
        not."""
        lines = KeptObject(self._path, "the mark of a crash").read().decode(errors="replace").splitlines()
        return lines[0].removeprefix(HEADING) if lines else ""

    def begin(self, *, catches_signals: bool) -> None:
        """From now on a crash is written down. `catches_signals`: whether this process's signals are the server's to
        catch; without, nothing is done."""
        if not catches_signals:
            return
        try:
            self._path.unlink(missing_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.warning("a crash will not be held against the pool: %s", error)
            return
        self._trusted_at_s = self._now_s() + TRUSTED_S
        self._had_handler = faulthandler.is_enabled()
        faulthandler.enable(self._fd, all_threads=False)

    def end_when_due(self) -> None:
        if self._fd >= 0 and self._now_s() >= self._trusted_at_s:
            self.end()

    def end(self) -> None:
        """The pool is trusted, or is not used any more: the file is removed."""
        if self._fd < 0:
            return
        if self._had_handler:
            faulthandler.enable()
        else:
            faulthandler.disable()
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
