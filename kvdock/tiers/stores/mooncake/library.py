"""Wraps Mooncake's client library, with types. Answers of the library are checked, and a lost master raises an error.

A write has three steps: begin (calls the master), copy ranges (to peers), end (calls the master). A read has the same
steps, but its end makes no call. So calls to the master, which may hang, use no page of the pool. This was tested with
0.3.13.post1; docs/operate/tiers_mooncake.md describes what each call does in that version.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Self

from kvdock.protocol.errors import without_password
from kvdock.tiers.stores.urls import read_url, some_bytes, some_text, whole, yes_or_no
from kvdock.tiers.tier import Deadline, NotInstalled, TierError, TierUrlError

# --------------------------------------------------------------------------- the settings

# The settings of the tier on Mooncake Store, read from its URL: mooncake://HOST:PORT?protocol=tcp&contribute=8GiB.



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
            raise TierUrlError(
                f"found {without_password(url)!r}, wanted mooncake://HOST:PORT of the master, and parameters"
            )
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


# --------------------------------------------------------------------------- the library

TIER: Final = "mooncake"
INSTALL: Final = "pip install 'kvdock[mooncake]', and libibverbs1 of the distribution"

DONE: Final = 0
NO_ROOM: Final = -200
INVALID: Final = -600
"""The library also returns this code if this process has begun a write of the name and has neither ended nor revoked
it."""
BEING_WRITTEN: Final = -703
ABSENT: Final = -704
THERE: Final = -705
"""A client has begun to write an object of the name before, and may have ended the write."""
LEASED: Final = -706
LEASE_OVER: Final = -707
_LOST: Final = range(-999, -899)  # calls that did not reach the master

_ENDS_WITHIN_S: Final = 50.0
"""The library waits 60 s for copies; then it returns an error, although copies may still be in progress. If it returns
an error earlier, all copies of the call have ended."""
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")

Function = Callable[..., Any]


class Unended(Exception):
    """A copy has failed, and may still be in progress."""


class Library:
    """One client of one master. Thread-safe, but each name may have one read or write at a time."""

    def __init__(self, settings: MooncakeSettings, store: Any, config: Any) -> None:
        self._settings, self._store, self._config = settings, store, config
        self._is_lost = False

    @classmethod
    def open(cls, settings: MooncakeSettings, deadline: Deadline) -> Self:
        """Raises TierError. May take a few times `master_s` longer than the deadline: the library's start cannot be
        cancelled, and no other Python thread runs meanwhile."""
        _prepare(settings)
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise NotInstalled(TIER, f"its client is not installed ({error}), wanted: {INSTALL}") from error
        store, config = MooncakeDistributedStore(), ReplicateConfig()
        config.replica_num = settings.replicas
        try:
            address = settings.address()
            _connect(settings, min(deadline.left_s, settings.master_s))
        except OSError as error:
            raise TierError(TIER, f"the master at {settings.master} is not reached: {error}") from error
        # No local buffer: nothing here uses it, and it would be registered memory, which others can reach.
        code = store.setup(
            address, "P2PHANDSHAKE", settings.contribute_bytes, 0, settings.protocol, settings.device, settings.master
        )
        if code != DONE:
            raise TierError(TIER, f"no client of the master at {settings.master} could be made (code {code})")
        return cls(settings, store, config)

    def exist(self, names: list[str]) -> list[int]:
        """For each name, 1: the store has all of the object."""
        return self._ask(self._store.batch_is_exist, names)

    def remove(self, names: list[str], force: bool = False) -> list[int]:
        """Removes objects. The codes are DONE, ABSENT, BEING_WRITTEN, or, without `force`, LEASED."""
        return self._ask(self._store.batch_remove, names, force)

    def begin_reads(self, names: list[str]) -> list[int]:
        """Begins to read objects. The codes are DONE, ABSENT, BEING_WRITTEN or LEASE_OVER."""
        return self._ask(self._store.batch_get_session_start, names)

    def end_reads(self, names: list[str]) -> None:
        """Makes the client forget where the objects are, without a call to the master."""
        self._store.batch_get_session_end(names)

    def begin_writes(self, names: list[str], sizes: list[int]) -> list[int]:
        """Begins to write objects. The codes are DONE, THERE, INVALID or NO_ROOM."""
        return self._ask(self._store.batch_put_session_start, names, sizes, self._config)

    def end_writes(self, names: list[str]) -> list[int]:
        """Ends writes. DONE: other clients find the object from now on. Must not be called for a name before all its
        bytes are written, because the store does not check that."""
        return self._ask(self._store.batch_put_session_end, names)

    def revoke_writes(self, names: list[str]) -> None:
        """Revokes writes. Errors are ignored, because a write that could not be revoked is revoked when the name is
        written again, or the master drops it."""
        if names:
            self._store.batch_put_session_revoke(names)

    def read(self, name: str, address: int, length: int, offset: int) -> int:
        """Returns the number of bytes read, or a code. Raises Unended."""
        return self._copy(self._store.batch_get_into_multi_buffer_ranges, name, address, length, offset)

    def write(self, name: str, address: int, length: int, offset: int) -> int:
        """Returns the number of bytes written, or a code. Raises Unended."""
        return self._copy(self._store.batch_put_from_multi_buffer_ranges, name, address, length, offset)

    def register(self, address: int, length: int) -> None:
        """Raises TierError."""
        if (code := self._store.register_buffer(address, length)) != DONE:
            raise TierError(TIER, f"{length} bytes of memory could not be registered (code {code})")

    def unregister(self, address: int) -> None:
        self._store.unregister_buffer(address)

    def close(self) -> None:
        """Closes the client. This takes up to a second, and no other Python thread runs meanwhile."""
        self._store.close()

    def _ask(self, call: Function, names: list[str], *more: Any) -> list[int]:
        if self._is_lost:  # the library would try for seconds to reach a master that does not run
            try:
                _connect(self._settings, self._settings.master_s)
            except OSError as error:
                raise TierError(TIER, f"the master at {self._settings.master} is not reached: {error}") from error
        codes = list(call(names, *more))
        lost = [code for code in codes if code in _LOST]
        self._is_lost = bool(lost)
        if lost:
            raise TierError(TIER, f"the master at {self._settings.master} does not answer (code {lost[0]})")
        if len(codes) != len(names):
            raise TierError(TIER, f"found {len(codes)} answers of the client, wanted {len(names)}")
        return codes

    @staticmethod
    def _copy(call: Function, name: str, address: int, length: int, offset: int) -> int:
        began_s = monotonic()
        codes: Sequence[int] = call([name], [[address]], [[length]], [[offset]])
        if list(codes) != [length] and monotonic() - began_s > _ENDS_WITHIN_S:
            raise Unended(f"a copy of {name} may still be in progress")
        return codes[0] if len(codes) == 1 else INVALID


def _connect(settings: MooncakeSettings, timeout_s: float) -> None:
    """Connects to the master once. Raises OSError if no master listens."""
    socket.create_connection((settings.host, settings.port), max(timeout_s, 0.01)).close()


def _prepare(settings: MooncakeSettings) -> None:
    """Sets the environment variables from which the library reads settings. Raises TierError if RDMA is wanted and
    missing: the library would use TCP without an error, where every host can read and write registered memory."""
    if settings.protocol == "rdma":
        devices = sorted(path.name for path in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []
        missing = [name for name in settings.device.split(",") if name and name not in devices]
        if not devices or missing or "MC_FORCE_TCP" in os.environ:
            raise TierError(
                TIER, f"found the RDMA devices {devices or 'none'}, wanted {settings.device or 'at least one'}, "
                "and MC_FORCE_TCP not in the environment"
            )
    stall, patience = str(settings.stall_s), str(1000 * settings.master_s)
    os.environ.update(
        MC_TCP_PROGRESS_TIMEOUT_SEC=stall, MC_TCP_STATUS_TIMEOUT_SEC=stall,
        MC_TCP_ADMISSION_TIMEOUT_MS=str(1000 * settings.stall_s),
        MC_RPC_TIMEOUT_MS=patience, MC_RPC_CONNECT_TIMEOUT_MS=patience, MC_STORE_CLIENT_SETUP_RETRIES="1",
    )
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise it logs each step of its work
