"""How a command ends: its exit status, and one sentence when something went wrong.

Scripts rely on the exit statuses:

    0    success
    1    failure: no server, an error from it, a problem found
    2    usage error: an unknown name, a value out of range
    130  interrupted by Ctrl-C
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

DONE: Final = 0
FAILED: Final = 1
WRONG: Final = 2
INTERRUPTED: Final = 130


class CommandError(Exception):
    """One sentence for the person at the terminal, and the exit status."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """For long imports: a KeyboardInterrupt in the midst of one can become another exception."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
