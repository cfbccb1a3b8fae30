"""A Mooncake Store of its own for tests: the master, a peer that holds the bytes, and a client that reads and changes
what lies there from outside.

The master listens on loopback only. Its clients always listen on all addresses.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from frozen import send
from paths import SUPPORT
from ports import held_port
from tier_helpers import MIB, eventually

PEER_BYTES: Final = 96 * MIB


class Served:
    """A process under test. Its stderr goes to `log`."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        environment = {**os.environ, "MC_TCP_PROGRESS_TIMEOUT_SEC": "1"}
        with log.open("ab") as errors:
            self.process: Final = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
            )

    def first_line(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        send(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class MooncakeServers:
    """`client_ttl_s`: a client that is silent for this long is taken for dead. `peer_bytes`: what the peer keeps.
    `more`: arguments of the master, the last of a name counts."""

    def __init__(
        self, folder: Path, client_ttl_s: int = 2, peer_bytes: int = PEER_BYTES, *more: str
    ) -> None:
        if importlib.util.find_spec("mooncake") is None:
            # .ci/run installs it, and fails where a test skips itself.
            pytest.skip("the package mooncake-transfer-engine-non-cuda is not installed")
        self._folder, self._client_ttl_s, self._peer_bytes, self._more = folder, client_ttl_s, peer_bytes, more
        self._client: Any = None
        self._program = _master_program()
        self.port, self._metrics_port = held_port(), held_port()
        self.start_master()
        self.start_peer()

    def start_master(self) -> None:
        """It evicts nothing unless `more` says so: by itself it does so once after it was full, although there is room
        again by then, and what a later test has stored is what goes."""
        self.master = Served([
            str(self._program), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}", f"--client_ttl={self._client_ttl_s}",
            "--put_start_discard_timeout_sec=2", "--eviction_ratio=0", "--eviction_high_watermark_ratio=1",
            "--logtostderr", *self._more,
        ], self._folder / "master.log")
        eventually(lambda: _listens(self.port))

    def start_peer(self) -> None:
        arguments = [sys.executable, str(SUPPORT / "mooncake_peer.py"), f"127.0.0.1:{self.port}", str(self._peer_bytes)]
        self.peer = Served(arguments, self._folder / "peer.log")
        assert self.peer.first_line() == b"0\n"

    def url(self, parameters: str = "") -> str:
        return f"mooncake://127.0.0.1:{self.port}?{parameters}"

    @property
    def client(self) -> Any:
        """A client of the library itself."""
        if self._client is None:
            from mooncake.store import MooncakeDistributedStore

            self._client = MooncakeDistributedStore()
            master = f"127.0.0.1:{self.port}"
            assert self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0
        return self._client

    def reset(self) -> None:
        self.client.remove_all(True)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get(key)
        assert data, f"{key} is not there"
        return data

    def put(self, key: str, data: bytes) -> None:
        """In the place of what is there."""
        self.client.remove(key, True)
        assert self.client.put(key, data) == 0

    @contextmanager
    def filled(self) -> Iterator[None]:
        """With what cannot be evicted."""
        from mooncake.store import ReplicateConfig

        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        filled: list[str] = []
        for size in (4 * MIB, MIB, MIB // 16):
            while self.client.put(f"fill/{len(filled)}", bytes(size), pinned) == 0:
                filled.append(f"fill/{len(filled)}")
        try:
            yield
        finally:
            self.client.batch_remove(filled, True)

    def end(self) -> None:
        if self._client is not None:
            self._client.close()
        for served in (self.peer, self.master):
            with suppress(ProcessLookupError):
                served.resume()
            served.kill()


def _master_program() -> Path:
    """The program itself, not the script of its package, whose child outlives it."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "mooncake_master"
    path.chmod(path.stat().st_mode | 0o100)
    return path


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
