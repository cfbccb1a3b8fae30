"""What systemd sees of a server: its messages over a real datagram socket, and a restart that keeps the pool."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

import pytest
from api_helpers import attach, keys
from cli_helpers import KVDOCK, SMALL, clean_environ

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.schemas import Lookup

WATCHDOG_S = 1.5


class Unit:
    """What systemd is to a unit of Type=notify: a datagram socket, and the same environment for each start."""

    def __init__(self, folder: Path) -> None:
        self.messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.messages.bind(str(folder / "notify"))
        self.messages.settimeout(60)
        self._folder = folder

    def start(self) -> subprocess.Popen[bytes]:
        environ = clean_environ(
            NOTIFY_SOCKET=str(self._folder / "notify"), WATCHDOG_USEC=str(int(WATCHDOG_S * 1e6)), KVDOCK_ON_EXIT="keep",
            KVDOCK_SOCKET_PATH=str(self._folder / "kvdock.sock"), KVDOCK_DRAIN_S="0.2",
        )
        with (self._folder / "log").open("a") as log:
            return subprocess.Popen([*KVDOCK, "serve", *SMALL], env=environ, stdout=log, stderr=log)

    def heard(self, field: str) -> str:
        """The first message that begins with the field, watchdog messages before it left out."""
        while not (message := self.messages.recv(4096).decode()).startswith(field):
            assert message == "WATCHDOG=1", message
        return message


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    return Unit(tmp_path)


def test_a_restarted_unit_keeps_the_cache_and_says_each_step(unit: Unit, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/kvdock.sock"
    server = unit.start()
    try:
        assert unit.heard("READY=1").startswith(f"READY=1\nSTATUS=serves engines at {address}, HTTP at http://")
        with Client(address) as client:
            stored = attach(client)
            stored.store(keys(3))
            space = stored.attached.namespace
            stored.liveness.close()
        server.send_signal(signal.SIGHUP)
        assert unit.heard("RELOADING=1").startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert unit.heard("READY=1") == "READY=1\nSTATUS=has read its settings and access tokens again"
        assert unit.heard("WATCHDOG=1") == "WATCHDOG=1", "it goes on while nothing else happens"
        server.terminate()
        assert unit.heard("STOPPING=1") == "STOPPING=1\nSTATUS=is draining: no new leases"
        assert unit.heard("STOPPING=1") == "STOPPING=1\nSTATUS=leaves its pool"
        assert server.wait(60) == 0

        server = unit.start()
        assert unit.heard("READY=1")
        with Client(address) as client:
            assert client.lookup(Lookup(namespace=space, keys=keys(3))).hit_tokens == 3 * 16
            client.clear(ClearCache())
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        unit.messages.close()


def test_a_server_that_stands_still_sends_the_watchdog_nothing(unit: Unit) -> None:
    server = unit.start()
    try:
        unit.heard("READY=1")
        server.send_signal(signal.SIGSTOP)
        unit.messages.settimeout(WATCHDOG_S)
        with pytest.raises(TimeoutError):
            for _ in range(100):
                unit.messages.recv(4096)
    finally:
        server.send_signal(signal.SIGCONT)
        server.send_signal(signal.SIGINT)
        server.wait(60)
        unit.messages.close()
