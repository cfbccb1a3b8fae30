"""Stores that freeze in the midst of what they are asked for, when some of it has come already."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Protocol

import s3_process
from api_helpers import MIB, eventually
from halving_proxy import HalvingProxy
from mover_steps import BEGUN, COPYING, SteppedServer
from tier_stores import DiskStore, MooncakeStore, RedisStore, S3Store, Store

PATIENCE_S = 30.0


class MidwayStore(Store, Protocol):
    """`part_bytes`: of what is stored. `returns`: whether a load ends at its deadline while the store is frozen."""

    part_bytes: ClassVar[int]
    returns: ClassVar[bool]

    def arm(self, server: SteppedServer) -> None:
        """It freezes in the next load."""

    def freezes(self, server: SteppedServer) -> None:
        """Waits until it has."""


class RedisMidway(RedisStore):
    part_bytes, returns = 4 * MIB, True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / "proxy"
        self._proxy = HalvingProxy(path, folder / "sock")
        self.settings = {"redis_url": f"unix://{path}"}

    def arm(self, server: SteppedServer) -> None:
        self._proxy.freeze()

    def freezes(self, server: SteppedServer) -> None:
        eventually(lambda: self._proxy.is_frozen, PATIENCE_S)

    def resume(self) -> None:
        self._proxy.thaw()

    def end(self) -> None:
        self._proxy.close()
        super().end()


class S3Midway(S3Store):
    part_bytes, returns = 4 * MIB, True

    def arm(self, server: SteppedServer) -> None:
        self._server.half.touch()

    def freezes(self, server: SteppedServer) -> None:
        """All of it: no question is answered either."""
        eventually(self._server.half.with_suffix(s3_process.BEGUN).exists, PATIENCE_S)
        self.stop()

    def resume(self) -> None:
        self._server.half.unlink()
        super().resume()


class DiskMidway(DiskStore):
    part_bytes, returns = 4 * MIB, False

    def arm(self, server: SteppedServer) -> None:
        self.stop("half")

    def freezes(self, server: SteppedServer) -> None:
        eventually(self._hung.with_suffix(BEGUN).exists, PATIENCE_S)


class MooncakeMidway(MooncakeStore):
    part_bytes, returns = 32 * MIB, True

    def arm(self, server: SteppedServer) -> None:
        server.armed.write_text(COPYING)

    def freezes(self, server: SteppedServer) -> None:
        mover = server.stands(COPYING)
        self.stop()
        mover.send_signal(signal.SIGCONT)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.resume()
        super().end()


MIDWAY = (DiskMidway, RedisMidway, S3Midway, MooncakeMidway)
