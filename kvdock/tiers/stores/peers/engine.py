"""Mooncake's Transfer Engine, with which nodes read each other's pools. This was tested with 0.3.13.post1 over TCP."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from kvdock.client.transport import Address
from kvdock.protocol.errors import without_password
from kvdock.tiers.stores.peers.gate import Gate, own_sockets
from kvdock.tiers.stores.urls import existing_file, read_url, some_text, whole
from kvdock.tiers.tier import NotInstalled, TierError, TierUrlError

TIER: Final = "peers"
INSTALL: Final = "pip install 'kvdock[mooncake]', and libibverbs1 of the distribution"


# --------------------------------------------------------------------------- the settings

@dataclass(frozen=True, slots=True)
class PeersSettings:
    """`servers`: the other nodes' servers, as HOST:PORT. `token_file`: has the access token that they know.
    `local_host`: the address at which they reach this node; empty: the one that faces the first of them. `stall_s`: a
    read without progress for this long is cancelled."""

    servers: tuple[str, ...]
    token_file: Path
    local_host: str = ""
    stall_s: int = 2

    @staticmethod
    def parse(url: str) -> PeersSettings:
        """Raises TierUrlError, which names what was found and what is wanted."""
        parts, options = read_url(url, ("peers",), _OPTIONS)
        servers = tuple(parts.netloc.split(","))
        try:
            is_right = all(urlsplit(f"//{one}").port and Address.parse(one) for one in servers)
        except ValueError:
            is_right = False
        if not is_right or parts.path not in ("", "/"):
            raise TierUrlError(
                f"found {without_password(url)!r}, wanted peers://HOST:PORT,HOST:PORT with the servers of other nodes"
            )
        if len(set(servers)) < len(servers):
            raise TierUrlError(f"found {url!r}, wanted each server once")
        if "token_file" not in options:
            raise TierUrlError("peers: found no token_file, wanted the file that has the access token of the peers")
        return PeersSettings(servers, **options)

    def address(self) -> str:
        """The address at which peers reach this node. Raises OSError if the first one's host is unknown."""
        if self.local_host:
            return self.local_host
        at = Address.parse(self.servers[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as facing:
            facing.connect((at.host, at.port))  # a datagram socket: nothing is sent
            return str(facing.getsockname()[0])


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "token_file": existing_file,
    "local_host": some_text,
    "stall_s": whole(1, 20),
}


# --------------------------------------------------------------------------- the library

class Engine:
    """The engine of this process. `name`: by which others open it. `address`: from which it reads. Thread-safe."""

    def __init__(self, library: Any, address: str, listening: Sequence[socket.socket]) -> None:
        """`library`: a TransferEngine that listens on these sockets, and has no memory yet. Raises OSError."""
        self._library, self.address = library, address
        self.name = f"{address}:{library.get_rpc_port()}"
        self._gate = Gate(listening, time.monotonic)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, settings: PeersSettings) -> Self:
        """Raises NotInstalled and other TierErrors; TierUrlError if strangers cannot be kept from the engine."""
        stall = str(settings.stall_s)
        os.environ.update(
            MC_TCP_PROGRESS_TIMEOUT_SEC=stall, MC_TCP_STATUS_TIMEOUT_SEC=stall, MC_HANDSHAKE_CONNECT_TIMEOUT=stall,
            MC_TCP_ADMISSION_TIMEOUT_MS=str(1000 * settings.stall_s),
        )
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise it logs each step of its work
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise NotInstalled(TIER, f"the Transfer Engine is not installed ({error}), wanted: {INSTALL}") from error
        try:
            address = settings.address()
        except OSError as error:
            raise TierError(TIER, f"the address that faces {settings.servers[0]} is not known: {error}") from error
        before = _ports()
        library = TransferEngine()
        if library.initialize(address, "P2PHANDSHAKE", "tcp", ""):
            raise TierError(TIER, f"the Transfer Engine does not start at {address}")
        listening = [one for one in own_sockets(is_listening=True) if one.getsockname()[1] not in before]
        try:
            return cls(library, address, listening)
        except OSError as error:
            raise TierUrlError(f"the kernel does not keep strangers from the Transfer Engine: {error}") from error

    def admit(self, address: str) -> None:
        """The node there may read registered memory. Raises ValueError: it is no IP address."""
        self._gate.admit(address)

    def register(self, address: int, length: int) -> None:
        """Raises TierError."""
        self._gate.end_strangers()
        with self._lock:
            if code := self._library.register_memory(address, length):
                raise TierError(TIER, f"{length} bytes of memory could not be registered (code {code})")

    def unregister(self, address: int) -> None:
        with self._lock:
            self._library.unregister_memory(address)

    def read(self, engine: str, address: int, there: int, length: int) -> bool:
        """Reads memory of another engine to `address`. False: it has failed. In both cases nothing is written any more
        once it returns. That holds for one piece of memory a call: of several, the library does not wait for all."""
        return bool(self._library.transfer_sync_read(engine, address, there, length) == 0)

    def close(self) -> None:
        self._gate.close()


def _ports() -> set[int]:
    """Those at which this process listens."""
    found = set()
    for one in own_sockets(is_listening=True):
        with one:
            found.add(one.getsockname()[1])
    return found
