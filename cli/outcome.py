"""How a command ends: its exit status, and the one sentence that says why when something went wrong.

Exit statuses are stable, scripts decide by them:

    0    done
    1    it could not be done: no server, a refusal, a problem found
    2    it was asked for wrongly: an unknown name, a value out of range
    130  stopped by Ctrl-C
"""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
WRONG: Final = 2
INTERRUPTED: Final = 130


class Refused(Exception):
    """One sentence for the person at the terminal, and the exit status."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
