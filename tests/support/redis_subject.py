"""A redis-server under the conformance suite of tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from tier_helpers import patient
from tier_subject import ServedSubject

from kvdock.tiers.record import PartName
from kvdock.tiers.stores.redis import RedisTier, open_tier
from kvdock.tiers.tier import Tier


@contextmanager
def opened(url: str, environment: dict[str, str] | None = None) -> Iterator[RedisTier]:
    tier = open_tier(url, patient(), environment or {})
    try:
        yield tier
    finally:
        tier.close(patient())


class RedisSubject(ServedSubject):
    name = "redis"
    server: RedisServer
    is_shared = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        redis: Any = pytest.importorskip("redis")
        self.server = RedisServer(folder / "redis", str(folder / "redis.sock"))
        self.client = redis.Redis(unix_socket_path=self.server.address)

    def reset(self) -> None:
        self.client.flushall()

    def open(self) -> Tier:
        return open_tier(f"unix://{self.server.address}", patient(), {})

    def flip(self, name: PartName, at: int) -> None:
        (byte,) = self.client.getrange(name.text(), at, at)
        self.client.setrange(name.text(), at, bytes([byte ^ 1]))

    def truncate(self, name: PartName) -> None:
        value = self.client.get(name.text())
        self.client.set(name.text(), value[: len(value) // 2])

    def misplace(self, name: PartName, other: PartName) -> None:
        assert self.client.copy(other.text(), name.text(), replace=True)

    @contextmanager
    def exhausted(self) -> Iterator[None]:
        self.client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self.client.config_set("maxmemory", 0)

    def end(self) -> None:
        self.client.close()
        super().end()
