"""The stores that tests with whole servers put below their pools: each can be frozen, and is shared by servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.error import HTTPError

from api_helpers import eventually
from mooncake_servers import PEER_BYTES, MooncakeServers
from mover_steps import HUNG
from objects_subject import KEYS, S3Server, environment
from redis_server import RedisServer
from tier_helpers import patient
from tier_subject import StoreProcess

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.protocol.reports import TierView
from kvdock.tiers.record import PartName
from kvdock.tiers.stores import objects, redis
from kvdock.tiers.stores.mooncake import tier as mooncake
from kvdock.tiers.tier import PAGE_BYTES, Tier


class Store(Protocol):
    """`settings`, `environment`: of a server that uses it."""

    name: str
    settings: dict[str, object]
    environment: dict[str, str]

    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class SharedStore(Store, Protocol):
    """What several servers use. `limit_bytes`: how much it keeps at most; 0: there is no limit."""

    def open(self) -> Tier:
        """As the mover of one more server does."""

    def damage(self, name: PartName) -> None:
        """Changes the last byte of the record, if it is there."""


AnyStore = TypeVar("AnyStore", bound=Store)


class ServedStore:
    """Its bytes are with a process."""

    _server: StoreProcess

    def stop(self) -> None:
        self._server.stop()

    def resume(self) -> None:
        self._server.resume()

    def end(self) -> None:
        self._server.kill()


class RedisStore(ServedStore):
    name = "redis"
    _server: RedisServer

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        limit = ("maxmemory-policy allkeys-random", f"maxmemory {limit_bytes}") if limit_bytes else ()
        self._server = RedisServer(folder, str(folder / "sock"), *limit)
        self.settings: dict[str, object] = {"redis_url": f"unix://{self._server.address}"}
        self.environment: dict[str, str] = {}

    @contextmanager
    def client(self) -> Iterator[Any]:
        """redis-py's own."""
        import redis

        with redis.Redis(unix_socket_path=str(self._server.address)) as client:
            yield client

    def open(self) -> Tier:
        return redis.open_tier(str(self.settings["redis_url"]), patient(), {})

    def damage(self, name: PartName) -> None:
        with self.client() as client:
            last = client.strlen(name.text()) - 1
            for byte in client.getrange(name.text(), last, last) if last >= 0 else b"":  # Redis evicts meanwhile
                client.setrange(name.text(), last, bytes([byte ^ 1]))


class S3Store(ServedStore):
    name = "objects"
    _server: S3Server

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._server = self.server = S3Server(folder, limit_bytes)
        self.settings: dict[str, object] = {"objects_url": self._server.url}
        self.environment = KEYS

    def open(self) -> Tier:
        with environment(KEYS):
            return objects.open_tier(self._server.url, patient())

    def damage(self, name: PartName) -> None:
        path = f"/a/prefix/{name.text()}"
        with suppress(HTTPError):  # it is not there
            data = bytearray(self._server.call("GET", path))
            data[-1] ^= 1
            self._server.call("PUT", path, bytes(data))


class MooncakeStore:
    """stop() freezes the client that has the bytes; the master goes on, and does not take the client for dead."""

    name = "mooncake"

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        evicts = ("--eviction_ratio=0.1", "--default_kv_lease_ttl=1000") if limit_bytes else ()
        self._servers = MooncakeServers(folder, 600, limit_bytes or PEER_BYTES, *evicts)
        self.settings: dict[str, object] = {"mooncake_url": self._servers.url("stall_s=1&master_s=1")}
        self.environment: dict[str, str] = {}

    def open(self) -> Tier:
        return mooncake.open_tier(str(self.settings["mooncake_url"]), patient())

    def damage(self, name: PartName) -> None:
        if data := bytearray(self._servers.client.get(name.text())):
            data[-1] ^= 1
            self._servers.client.remove(name.text(), True)
            self._servers.client.put(name.text(), bytes(data))  # unless a server has put it back already

    def stop(self) -> None:
        self._servers.peer.stop()

    def resume(self) -> None:
        self._servers.peer.resume()

    def end(self) -> None:
        self._servers.end()


class DiskStore:
    """After stop(), calls do not return, as in a mounted file system whose server does not answer."""

    name = "disk"

    def __init__(self, folder: Path) -> None:
        self._hung, self.folder = folder / "hung", folder / "disk"
        self.settings: dict[str, object] = {"disk_path": str(self.folder), "disk_bytes": 256 << 20}
        self.environment = {HUNG: str(self._hung)}

    def stop(self, kinds: str = "read") -> None:
        """`kinds`: those of mover_steps.put_hangs()."""
        new = self._hung.with_suffix(".new")
        new.write_text(kinds)
        new.rename(self._hung)

    def resume(self) -> None:
        self._hung.unlink()

    def end(self) -> None:
        self._hung.unlink(missing_ok=True)


SHARED = (RedisStore, S3Store, MooncakeStore)
STORES = (DiskStore, *SHARED)


@contextmanager
def opened(kind: Callable[[Path], AnyStore], folder: Path) -> Iterator[AnyStore]:
    store = kind(folder)
    try:
        yield store
    finally:
        store.end()


def wait_until_written(address: str, share: float = 1.0) -> None:
    """`share` of what was stored in the pool is in the tiers; what was loaded counts as stored in the pool again."""
    with Client(address) as client:

        def is_written() -> bool:
            status = client.status()  # names no tier before the mover's first report
            moved = sum(_moved_bytes(tier) for tier in status.tiers)
            is_queued = any(tier.queued_bytes for tier in status.tiers)
            return not is_queued and moved >= share * status.counters["stored_bytes"] > 0

        eventually(is_written, 60.0)


def _moved_bytes(tier: TierView) -> int:
    """At least what the pool counts for the parts that the tier stored and loaded: it rounds each up to a page."""
    records = sum(tier.counters.get(name, 0) for name in ("store_done", "load_done"))
    return sum(tier.counters.get(name, 0) for name in ("stored_bytes", "loaded_bytes")) + records * PAGE_BYTES


def clear_once_written(address: str, share: float = 1.0) -> None:
    """Leaves what was stored in the tier alone."""
    wait_until_written(address, share)
    clear_pool(address)


def clear_pool(address: str) -> None:
    """Evicts all that it has, and leaves the tier as it is."""
    with Client(address) as client:

        def is_empty() -> bool:
            client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))
            return client.status().chunks.ready == 0

        eventually(is_empty, 30.0)  # what is leased cannot go yet


def has_state(address: str, state: str) -> None:
    """The server's only tier gets there."""
    with Client(address) as client:
        eventually(lambda: [tier.state for tier in client.status().tiers] == [state], 30.0)
