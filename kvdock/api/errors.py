"""Errors of the server process itself: what keeps it from starting. The command line prints them as one sentence.

    KvdockError                  kvdock/protocol/errors.py
    ├── SettingsError            a setting is unknown or out of range; nothing was started
    ├── StartupError             the server cannot start: address in use, pool too large for the machine
    ├── AccessFileError          the file of access tokens cannot be used
    └── AdoptionError            the pool that an earlier server left cannot be taken over
        └── OtherFormat          another release, or another build, made it in a form that this one cannot read
"""

from __future__ import annotations

from kvdock.protocol.errors import KvdockError


class SettingsError(KvdockError):
    """A setting that is unknown or out of range; the message names it, the value and what was wanted."""


class StartupError(KvdockError):
    """The server cannot start here; the message names the reason."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        """`access_file`, `address_in_use`, `socket_in_use`, `bad_address`, `no_shared_memory`, `not_adoptable`,
        `no_name`, `not_installed`, `pool_too_small`."""


class AccessFileError(KvdockError):
    """The file of access tokens cannot be read, or has a content that is not allowed."""


class AdoptionError(KvdockError):
    """The pool is damaged or has another version; the message names what was found."""


class OtherFormat(AdoptionError):
    """The pool is as its own release made it, as far as this one can tell. The message names both formats."""
