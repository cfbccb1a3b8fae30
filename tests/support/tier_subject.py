"""What the conformance suite of tiers does to a tier's storage from outside."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

from frozen import send
from tier_helpers import KIB, patient

from kvdock.tiers.record import HEADER_BYTES, PartName
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

    byte_of_body: ClassVar[int] = HEADER_BYTES + 1
    """Where a byte of the part lies in what is stored."""

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
        self.flip(name, HEADER_BYTES // 2)

    def corrupt_body(self, name: PartName) -> None:
        """Changes a byte of the stored part."""
        self.flip(name, self.byte_of_body)

    def flip(self, name: PartName, at: int) -> None:
        """Flips the lowest bit of a byte of the stored record."""
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


class StoreProcess:
    """A server of a store, in a process that start() starts."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        raise NotImplementedError

    def send(self, what: signal.Signals) -> None:
        assert self.process is not None
        send(self.process.pid, what)

    def stop(self) -> None:
        """It hangs."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            with self.process:  # closes its pipes
                self.process.kill()
            self.process = None


class ServedSubject(TierSubject):
    """One whose storage is a process."""

    has_server = True
    server: StoreProcess

    def stop(self) -> None:
        self.server.stop()

    def resume(self) -> None:
        self.server.resume()

    def kill(self) -> None:
        self.server.kill()

    def restart(self) -> None:
        self.server.start()

    def end(self) -> None:
        self.server.kill()


@contextmanager
def files_of_64_kib() -> Iterator[None]:
    """No file of this process may grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def opened(subject: TierSubject) -> Iterator[Tier]:
    """The subject's tier, closed at the end."""
    tier = subject.open()
    try:
        yield tier
    finally:
        tier.close(patient())
