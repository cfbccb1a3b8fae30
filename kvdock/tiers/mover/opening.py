"""Opens the tiers that the settings name, each in a thread of its own, so one that cannot be opened delays no other."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.tiers.mover.namespaces import PoolMemory
from kvdock.tiers.tier import Deadline, Tier, TierError
from kvdock.tiers.urls import TierUrlError

log = logging.getLogger("kvdock.tiers")

OPEN_S = 10.0
"""How long a tier may take to open."""
RETRY_S = 5.0

OPENING = "it is being opened"
UNOPENED = "it cannot be opened"
WRONG_SETTING = "its setting is wrong"


class _Opener(NamedTuple):
    """`setting`: the path or URL; empty: the tier is not wanted. `open_tier` imports what the tier needs when it is
    called."""

    name: str
    setting: str
    open_tier: Callable[[], Tier]


class OpeningTiers:
    """`memory`: registers the pool's segments with each tier that wants it, before the tier is used; None: none
    does."""

    def __init__(self, config: MoverConfig, memory: PoolMemory | None) -> None:
        openers = [opener for opener in _openers(config) if opener.setting]
        self._memory = memory
        self._opened: queue.SimpleQueue[Tier] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.order = [opener.name for opener in openers]
        """The names of the tiers in the order in which they are asked: the quickest first."""
        self.unopened: dict[str, tuple[str, str]] = dict.fromkeys(self.order, (OPENING, ""))
        """Tiers that are not open yet: why not, and the error."""
        for opener in openers:
            threading.Thread(
                target=self._open, args=(opener,), name=f"kvdock-open-{opener.name}", daemon=True
            ).start()

    def take_opened(self) -> list[Tier]:
        """Those that have been opened since the last call."""
        found = []
        while not self._opened.empty():
            found.append(self._opened.get())
            del self.unopened[found[-1].name]
        return found

    def close(self) -> None:
        self._closed.set()

    def _open(self, opener: _Opener) -> None:
        logged = ""
        while not self._closed.is_set():
            try:
                tier = opener.open_tier()
                if self._memory is not None:
                    self._memory.use(tier)
                self._opened.put(tier)
                return
            except TierUrlError as error:
                self.unopened[opener.name] = (WRONG_SETTING, str(error))
                log.error("the tier %s is not used: %s", opener.name, error)
                return
            except TierError as error:
                if (why := str(error)) != logged:
                    log.warning("the tier %s is not used yet: %s", opener.name, why)
                logged = why
                self.unopened[opener.name] = (UNOPENED, error.why)
            self._closed.wait(RETRY_S)


def registers_memory(config: MoverConfig) -> bool:
    """Whether a tier that the settings name wants to know the pool's memory (Registers): Mooncake over RDMA."""
    if not config.mooncake_url:
        return False
    from kvdock.tiers.mooncake.settings import MooncakeSettings

    try:
        return MooncakeSettings.parse(config.mooncake_url).registers_memory
    except TierUrlError:  # the tier is not opened, and OpeningTiers reports why
        return False


def _openers(config: MoverConfig) -> list[_Opener]:
    """One for each tier, the quickest first."""

    def disk() -> Tier:
        from kvdock.tiers.disk.tier import DiskTier

        return DiskTier.open(Path(config.disk_path), config.disk_bytes)

    def mooncake() -> Tier:
        from kvdock.tiers.mooncake.tier import open_tier

        return open_tier(config.mooncake_url, Deadline(OPEN_S))

    def redis() -> Tier:
        from kvdock.tiers.redis import open_tier

        return open_tier(config.redis_url, Deadline(OPEN_S), os.environ)

    def objects() -> Tier:
        from kvdock.tiers.objects import open_tier

        return open_tier(config.objects_url, Deadline(OPEN_S))

    return [
        _Opener("disk", config.disk_path, disk), _Opener("mooncake", config.mooncake_url, mooncake),
        _Opener("redis", config.redis_url, redis), _Opener("objects", config.objects_url, objects),
    ]
