"""What the conformance suite of tiers does to a tier's storage from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from tier_helpers import patient

from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Tier


class TierSubject:
    """One tier's storage under test. The suite makes one for each module, in an empty folder of its own, and calls
    reset() before each test. What needs a package that is absent says pytest.skip in __init__.

    What changes a stored record from outside may be called while a Tier is open.
    """

    name: ClassVar[str]
    limit_bytes: ClassVar[int] = 0
    """What the tiers that open() makes may use; at most some tens of MiB. 0: this tier knows no limit."""
    has_server: ClassVar[bool] = False
    """Whether stop, resume, kill and restart work."""
    is_shared: ClassVar[bool] = False
    """Whether two Tiers may be open at the same time over the same storage."""
    forgets_at_once: ClassVar[bool] = True
    """Whether exists() finds nothing while the server is lost: not where another one keeps the names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self) -> None:
        """Empties the storage; the server, if there is one, runs afterwards."""
        raise NotImplementedError

    def open(self) -> Tier:
        """Over what is stored already."""
        raise NotImplementedError

    def corrupt_header(self, name: PartName) -> None:
        """Changes a byte of the stored record's header."""
        raise NotImplementedError

    def corrupt_body(self, name: PartName) -> None:
        """Changes a byte of the stored part."""
        raise NotImplementedError

    def truncate(self, name: PartName) -> None:
        """Cuts the stored record off in the middle of its part."""
        raise NotImplementedError

    def misplace(self, name: PartName, other: PartName) -> None:
        """Puts what is stored of `other` (of the same length) where `name` is looked for."""
        raise NotImplementedError

    def exhausted(self) -> AbstractContextManager[None]:
        """The storage takes (nearly) nothing more, whatever the tier's own limit is."""
        raise NotImplementedError

    def stop(self) -> None:
        """The server hangs (SIGSTOP)."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        """Kills the server (SIGKILL); what it stored may be lost."""
        raise NotImplementedError

    def restart(self) -> None:
        """Where it was, after kill()."""
        raise NotImplementedError

    def end(self) -> None:
        """Stops and removes what was started."""


@contextmanager
def opened(subject: TierSubject) -> Iterator[Tier]:
    """The subject's tier, closed at the end."""
    tier = subject.open()
    try:
        yield tier
    finally:
        tier.close(patient())
