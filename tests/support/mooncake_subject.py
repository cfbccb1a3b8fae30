"""The tier on Mooncake Store under test: over one library of its client, with the master lost or with the peer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from mooncake_servers import MooncakeServers
from tier_helpers import patient
from tier_subject import TierSubject

from kvdock.tiers.record import HEADER_BYTES, PartName
from kvdock.tiers.stores.mooncake.library import Library, MooncakeSettings
from kvdock.tiers.stores.mooncake.tier import MooncakeTier
from kvdock.tiers.tier import Tier


class KeptLibrary(Library):
    """Stays open for the next tier of the module: closing it takes up to a second."""

    kept: ClassVar[list[KeptLibrary]] = []

    def close(self) -> None:
        self.kept.append(self)

    @classmethod
    def end(cls) -> None:
        while cls.kept:
            Library.close(cls.kept.pop())


class MooncakeSubject(TierSubject):
    """The server is the master; the bytes are with a peer, a process of its own."""

    name = "mooncake"
    has_server = True
    is_shared = True
    byte_of_body = HEADER_BYTES + 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.servers = MooncakeServers(folder)

    def reset(self) -> None:
        self.servers.reset()

    def open(self) -> Tier:
        settings = MooncakeSettings.parse(self.servers.url("stall_s=1&master_s=1"))
        library = KeptLibrary.kept.pop() if KeptLibrary.kept else KeptLibrary.open(settings, patient())
        return MooncakeTier(settings, library, patience_s=3)

    def flip(self, name: PartName, at: int) -> None:
        data = bytearray(self.servers.get(name.text()))
        data[at] ^= 1
        self.servers.put(name.text(), bytes(data))

    def truncate(self, name: PartName) -> None:
        self.servers.put(name.text(), self.servers.get(name.text())[: HEADER_BYTES + 100])

    def misplace(self, name: PartName, other: PartName) -> None:
        self.servers.put(name.text(), self.servers.get(other.text()))

    def exhausted(self) -> AbstractContextManager[None]:
        return self.servers.filled()

    def stop(self) -> None:
        self.servers.master.stop()

    def resume(self) -> None:
        self.servers.master.resume()

    def kill(self) -> None:
        self.servers.master.kill()

    def restart(self) -> None:
        self.servers.start_master()

    def end(self) -> None:
        KeptLibrary.end()
        self.servers.end()


class MooncakePeerSubject(MooncakeSubject):
    """The server is the peer."""

    name = "mooncake-peer"
    forgets_at_once = False

    def stop(self) -> None:
        self.servers.peer.stop()

    def resume(self) -> None:
        self.servers.peer.resume()

    def kill(self) -> None:
        self.servers.peer.kill()

    def restart(self) -> None:
        self.servers.start_peer()
