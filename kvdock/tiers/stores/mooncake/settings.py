"""The settings of the tier on Mooncake Store, read from its URL: mooncake://HOST:PORT?protocol=tcp&contribute=8GiB."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvdock.tiers.stores.urls import read_url, some_bytes, some_text, whole, yes_or_no
from kvdock.tiers.tier import TierUrlError


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """`contribute_bytes`: memory of this process in which all clients may store; 0: none. `device`: RDMA devices,
    separated by commas; empty: all. `local_host`: the address at which peers reach this process; empty: the local
    address of a connection to the master. `stall_s`: a copy without progress for this long is cancelled. `master_s`:
    how long the master may take to answer. `threads`: how many batches are in progress at once. `direct`: whether bytes
    are copied directly from and to the slots."""

    host: str
    port: int
    protocol: str = "tcp"
    device: str = ""
    local_host: str = ""
    contribute_bytes: int = 0
    replicas: int = 1
    threads: int = 4
    stall_s: int = 5
    master_s: int = 5
    direct: bool = True

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def registers_memory(self) -> bool:
        """Whether the tier registers memory with the client. It does not over TCP, where every host that reaches the
        client's port can read and write registered memory."""
        return self.protocol == "rdma"

    @staticmethod
    def parse(url: str) -> MooncakeSettings:
        """Raises TierUrlError, which names what was found and what is wanted."""
        parts, options = read_url(url, ("mooncake",), _OPTIONS)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port or parts.username is not None or parts.path not in ("", "/"):
            raise TierUrlError(f"found {url!r}, wanted mooncake://HOST:PORT with the master's address, and parameters")
        if "device" in options and options.get("protocol") != "rdma":
            raise TierUrlError(f"mooncake: found device={options['device']!r} without protocol=rdma, wanted both")
        if "contribute" in options:
            options["contribute_bytes"] = options.pop("contribute")
        return MooncakeSettings(host, port, **options)

    def address(self) -> str:
        """The address at which peers reach this process. Raises OSError if the master's host is unknown."""
        if self.local_host:
            return self.local_host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as facing:
            facing.connect((self.host, self.port))  # a datagram socket: nothing is sent
            return str(facing.getsockname()[0])


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError("tcp or rdma")
    return text


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "protocol": _protocol,
    "device": some_text,
    "local_host": some_text,
    "contribute": some_bytes,
    "replicas": whole(1, 16),
    "threads": whole(1, 64),
    "stall_s": whole(1, 20),
    "master_s": whole(1, 60),
    "direct": yes_or_no,
}
