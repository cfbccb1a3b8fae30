"""How a command ends: its exit status and, if it failed, one sentence; with `--json` also one object.

Scripts rely on these exit statuses:

    0    success
    1    failure: no server, an error from it, a problem found
    2    usage error: an unknown name, a value out of range
    130  interrupted by Ctrl-C
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from kvdock.api.errors import SettingsError, StartupError
from kvdock.protocol.errors import CODES, ApiError, KvdockError, ServerUnavailable

DONE: Final = 0
FAILED: Final = 1
WRONG: Final = 2
INTERRUPTED: Final = 130

TITLES: Final = {
    "failed": "The command failed",
    "usage": "The command line is wrong",
    "wrong_setting": "A setting is wrong",
    "cannot_start": "The server cannot start",
    "no_server": "No server answers",
    "interrupted": "The command was interrupted",
}
"""Titles of the problems that do not come from a server, by code. `cannot_start` is for all codes of StartupError."""


class CommandError(Exception):
    """One sentence for the user, and the exit status."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class CommandProblem(msgspec.Struct, kw_only=True):
    """What `--json` prints when a command fails: problem details as in RFC 9457, and the exit status."""

    type: str = "about:blank"
    """For a refusal of the server, its entry on the /docs page."""
    title: str
    status: int | None = None
    """The HTTP status of the answer; None: no server answered."""
    detail: str
    """The sentence on standard error."""
    code: str
    instance: str = ""
    found: Any = None
    wanted: Any = None
    exit_status: int


def problem_of_command(error: BaseException, sentence: str, exit_status: int) -> CommandProblem:
    """The code and title are those of `error`, or of the error that caused it. `sentence` becomes the detail."""
    cause = error.__cause__ if isinstance(error, CommandError) else error
    if isinstance(cause, ApiError):
        title = CODES[cause.code].title if cause.code in CODES else cause.code
        return CommandProblem(
            type=f"/docs#{cause.code}", title=title, status=cause.status, detail=sentence, code=cause.code,
            found=cause.found, wanted=cause.wanted, exit_status=exit_status,
        )
    if isinstance(cause, StartupError):
        return CommandProblem(
            title=TITLES["cannot_start"], detail=sentence, code=cause.code, exit_status=exit_status
        )
    code = _code_of(cause, exit_status)
    return CommandProblem(title=TITLES[code], detail=sentence, code=code, exit_status=exit_status)


def _code_of(error: BaseException | None, exit_status: int) -> str:
    kinds: dict[type[KvdockError], str] = {ServerUnavailable: "no_server", SettingsError: "wrong_setting"}
    named = [code for kind, code in kinds.items() if isinstance(error, kind)]
    by_status = {WRONG: "usage", INTERRUPTED: "interrupted"}
    return named[0] if named else by_status.get(exit_status, "failed")


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even if it cannot be parsed."""
    options = list(arguments)
    return "--json" in (options[: options.index("--")] if "--" in options else options)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Holds SIGINT back during a long import, in which a KeyboardInterrupt can become another exception."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
