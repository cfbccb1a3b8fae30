"""A redis-server process that listens on a Unix socket or on a loopback port, and keeps nothing on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tier_subject import StoreProcess

START_S = 30.0


class RedisServer(StoreProcess):
    """`settings`: lines of redis.conf. `address`: a host and a port, or the path of a Unix socket."""

    def __init__(self, folder: Path, address: tuple[str, int] | str, *settings: str) -> None:
        if shutil.which("redis-server") is None:
            # .ci/run installs it, and fails where a test skips itself.
            pytest.skip("redis-server is not installed")
        self.address, self._folder = address, folder
        folder.mkdir(exist_ok=True)
        listen = ("port 0", f"unixsocket {address}") if isinstance(address, str) else ()
        config = (f"dir {folder}", "bind 127.0.0.1", 'save ""', "appendonly no", "daemonize no", *listen, *settings)
        (folder / "redis.conf").write_text("\n".join(config) + "\n")
        self.start()

    @property
    def port(self) -> int:
        assert not isinstance(self.address, str)
        return self.address[1]

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", str(self._folder / "redis.conf")], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until = time.monotonic() + START_S
        while not self._accepts():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < until, "redis-server does not accept connections"
            time.sleep(0.01)  # between two tries to connect

    def _accepts(self) -> bool:
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        with socket.socket(family) as one:
            return one.connect_ex(self.address) == 0


@contextmanager
def served(folder: Path, *settings: str) -> Iterator[RedisServer]:
    """On a Unix socket."""
    server = RedisServer(folder, str(folder / "sock"), *settings)
    try:
        yield server
    finally:
        server.kill()
