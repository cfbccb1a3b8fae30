"""Opens the tiers that the settings name, in the order in which they are asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvdock.protocol.mover_schemas import MoverConfig
from kvdock.tiers.tier import Tier, TierError

log = logging.getLogger("kvdock.tiers")

RETRY_S = 5.0


class OpeningTiers:
    """A tier that cannot be opened is tried again; the others are used meanwhile."""

    def __init__(self, config: MoverConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = [open_ for wanted, open_ in _ways(config) if wanted]
        self._next_s = clock()
        self.failures: dict[str, str] = {}
        """By tier, why it is not open."""

    def opened(self) -> list[Tier]:
        """Those that have been opened by this call."""
        if not self._left or self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + RETRY_S
        found, left = [], []
        for open_ in self._left:
            try:
                found.append(open_())
            except TierError as error:
                if self.failures.get(error.tier) != error.why:
                    log.warning("the tier %s is not used: %s", error.tier, error.why)
                self.failures[error.tier] = error.why
                left.append(open_)
        self._left = left
        for tier in found:
            self.failures.pop(tier.name, None)
        return found


def _ways(config: MoverConfig) -> list[tuple[str, Callable[[], Tier]]]:
    """(setting, how its tier is opened), quickest tier first."""

    def disk() -> Tier:
        from kvdock.tiers.disk.tier import DiskTier

        return DiskTier.open(Path(config.disk_path), config.disk_bytes)

    return [(config.disk_path, disk)]
