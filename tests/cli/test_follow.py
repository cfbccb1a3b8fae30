"""`kvdock events --follow` when its server drains, ends or is killed, and another one starts."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from api_helpers import ServerProcess, attach, eventually, keys, raw
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ

from kvdock.client.client import Client
from kvdock.client.events import read_events
from kvdock.client.transport import Address

Following = tuple[subprocess.Popen[str], Iterator[str]]
READS = re.compile(r'^kvdock_call_seconds_count\{method="GET",route="/v1/events"\} (\S+)$', re.MULTILINE)
LOST = re.compile(r"kvdock: the server is lost \(unix:.*\), trying again every 1 s\n")


@contextmanager
def following(folder: Path, kinds: str) -> Iterator[Following]:
    """The command at the folder's socket, and the kinds that it prints, one by one. Ctrl-C ends it; a command that
    says nothing for too long is killed."""
    command = [*KVDOCK, "events", "--follow", "--json", "--kinds", kinds, "--server", f"unix:{folder}/kvdock.sock"]
    with subprocess.Popen(
        command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        late = threading.Timer(TIMEOUT_S, process.kill)
        late.start()
        try:
            yield process, (json.loads(line)["kind"] for line in process.stdout)
        finally:
            late.cancel()
            process.send_signal(signal.SIGCONT)  # a test may have stopped it
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130


def said(process: subprocess.Popen[str]) -> str:
    """The next line on standard error."""
    assert process.stderr is not None
    return process.stderr.readline()


def asked(path: Path, times: int) -> None:
    """Waits until somebody has tried so often to reach a server there, in vain."""
    path.unlink(missing_ok=True)  # a server that was killed leaves it
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(TIMEOUT_S)
        for _ in range(times):
            listening.accept()[0].close()
    path.unlink()


def reads(server: ServerProcess) -> float:
    """The number of calls that have read the server's events."""
    found = READS.search(raw(server.unix, "GET", "/metrics")[2].decode())
    return float(found[1]) if found else 0.0


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    """The settings of servers that follow each other, which so have one address."""
    return {"socket_path": str(tmp_path / "kvdock.sock")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lost_server_is_told_of_once_and_each_event_of_the_next_one_comes_once(
    tmp_path: Path, settings: dict[str, object], number: int
) -> None:
    with ServerProcess(**settings) as first, following(tmp_path, "ready,attached") as (process, told):
        assert next(told) == "ready"
        first.stop(number)
        assert LOST.fullmatch(said(process))
        asked(tmp_path / "kvdock.sock", 2)
        with ServerProcess(**settings) as second, Client(second.unix) as client:
            attach(client).close()
            assert [next(told), next(told), next(told)] == ["gap", "ready", "attached"]
            second.stop()
            assert "it has ended" in said(process), "nothing was said of each try"


def test_who_was_told_nothing_yet_gets_all_that_the_next_server_keeps(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    with ServerProcess(**settings) as first, following(tmp_path, "attached") as (process, told):
        eventually(lambda: reads(first) >= 1, TIMEOUT_S)
        first.stop()
        assert LOST.fullmatch(said(process))
        process.send_signal(signal.SIGSTOP)
        with ServerProcess(**settings) as second, Client(second.unix) as client:
            attach(client).close()
            eventually(lambda: bool(list(read_events(Address.parse(second.unix), kinds="attached"))))
            process.send_signal(signal.SIGCONT)
            assert next(told) == "attached"


def test_a_server_that_drains_is_not_asked_all_the_time(tmp_path: Path, settings: dict[str, object]) -> None:
    with (
        ServerProcess(drain_s=3.0, **settings) as server, following(tmp_path, "draining") as (_, told),
        Client(server.unix) as client,
    ):
        engine = attach(client)
        engine.store(keys(1))
        assert engine.lookup(keys(1), "r").lease, "the server waits for its end"
        eventually(lambda: reads(server) >= 1, TIMEOUT_S)
        server.process.send_signal(signal.SIGTERM)
        assert next(told) == "draining"
        found = []
        with suppress(OSError):  # the server has ended
            while True:
                found.append(reads(server))
        engine.close()
    assert len(found) > 2 and max(found) <= 8, "about one a second"
