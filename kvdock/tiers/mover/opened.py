"""Opens the tiers that the settings name, each in a thread of its own: one that cannot be opened delays no other."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.tiers.tier import Deadline, Tier, TierError
from kvdock.tiers.urls import TierUrlError

log = logging.getLogger("kvdock.tiers")

OPEN_S = 10.0
"""How long a tier may take to open."""
RETRY_S = 5.0

OPENING = "it is being opened"
UNOPENED = "it cannot be opened"
WRONG_SETTING = "its setting is wrong"


class OpeningTiers:
    def __init__(self, config: MoverConfig) -> None:
        self._opened: queue.SimpleQueue[Tier] = queue.SimpleQueue()
        self._ended = threading.Event()
        self.order = [name for name, wanted, _ in _ways(config) if wanted]
        """The names of the tiers, quickest first: as they are asked."""
        self.closed: dict[str, tuple[str, str]] = dict.fromkeys(self.order, (OPENING, ""))
        """Those that are not open yet: why, and the error."""
        for name, wanted, open_ in _ways(config):
            if wanted:
                threading.Thread(target=self._open, args=(name, open_), name=f"kvdock-open-{name}", daemon=True).start()

    def opened(self) -> list[Tier]:
        """Those that have been opened since the last call."""
        found = []
        while not self._opened.empty():
            found.append(self._opened.get())
            del self.closed[found[-1].name]
        return found

    def close(self) -> None:
        self._ended.set()

    def _open(self, name: str, open_: Callable[[], Tier]) -> None:
        said = ""
        while not self._ended.is_set():
            try:
                self._opened.put(open_())
                return
            except TierUrlError as error:
                self.closed[name] = (WRONG_SETTING, str(error))
                log.error("the tier %s is not used: %s", name, error)
                return
            except TierError as error:
                if (why := str(error)) != said:
                    log.warning("the tier %s is not used yet: %s", name, why)
                said = why
                self.closed[name] = (UNOPENED, error.why)
            self._ended.wait(RETRY_S)


def _ways(config: MoverConfig) -> list[tuple[str, str, Callable[[], Tier]]]:
    """(name, setting, how the tier is opened), quickest tier first. What a tier needs is imported when it is opened."""

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
        ("disk", config.disk_path, disk), ("mooncake", config.mooncake_url, mooncake),
        ("redis", config.redis_url, redis), ("objects", config.objects_url, objects),
    ]
