"""A server that crashed while it used an adopted pool starts the next time without it, and says so."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, attach, keys, unique
from cli_helpers import kvdock
from connector_helpers import mortal

from kvdock.api.pool.adopt import TRUSTED_S, CrashMark
from kvdock.api.pool.lock import secret_of
from kvdock.client.client import Client
from kvdock.shm import objects as shm

pytestmark = pytest.mark.security


def mark_of(server: ServerProcess) -> Path:
    return shm.kept_path(server.pool_id, "crash", secret_of(server.pool_id))


def adoption(server: ServerProcess) -> tuple[int, str]:
    """What `kvdock doctor --adopt` says."""
    done = kvdock("doctor", "--adopt", KVDOCK_SOCKET_PATH=str(server.settings["socket_path"]))
    return done.returncode, " ".join(done.stdout.split())


def stored_in(server: ServerProcess) -> list[str]:
    with Client(server.unix) as client:
        engine = attach(client)
        chain = keys(4, unique("crash"))
        engine.store(chain)
        engine.close()
        return chain


@pytest.mark.parametrize("crash", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_a_crash_with_an_adopted_pool_costs_the_pool_and_is_named(crash: signal.Signals) -> None:
    with mortal() as server:
        stored_in(server)
        server.stop(signal.SIGKILL)
        with next_at(server) as second:
            assert second.pool_id == server.pool_id and mark_of(second).read_bytes() == b""
            assert adoption(server)[0] == 0, "while it is used there is nothing to say"
            assert second.stop(crash) == -crash
        status, said = adoption(server)
        assert status != 0 and "the server that had taken it over before crashed" in said
        with next_at(server) as third, Client(third.unix) as client:
            assert third.pool_id != server.pool_id
            said = f"pool {server.pool_id:016x} cannot be taken over, starting with an empty one: the server that had"
            assert f"{said} taken it over before crashed (" in third.log_text()
            (finding,) = client.verdict().findings
            assert finding.code == "pool_left_out" and f"{server.pool_id:016x}" in finding.text
            assert server.shared_memory() == [], "its memory is free for the next pool"
            assert client.acknowledge().troubles == 1 and client.verdict().findings == []
            stored_in(third)
            third.stop(signal.SIGKILL)
        with next_at(server) as fourth:
            assert fourth.pool_id == third.pool_id, "the new pool is adopted as any other"


def test_the_first_crash_with_a_pool_of_its_own_costs_no_pool() -> None:
    with mortal() as server:
        stored_in(server)
        server.stop(signal.SIGSEGV)
        with next_at(server) as second:
            assert second.pool_id == server.pool_id
            second.stop(signal.SIGSEGV)
        with next_at(server) as third:
            assert third.pool_id != server.pool_id, "the second crash was with the adopted one"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_killed_or_stopped_keeps_its_adopted_pool_for_the_next(number: signal.Signals) -> None:
    with mortal() as server:
        stored_in(server)
        server.stop(signal.SIGKILL)
        for _ in range(3):
            with next_at(server, on_exit="keep") as following:
                assert following.pool_id == server.pool_id
                following.stop(number)
                assert mark_of(server).exists() == (number == signal.SIGKILL)


def test_a_server_that_must_adopt_does_not_start_with_a_pool_that_crashed_one() -> None:
    with mortal() as server:
        server.stop(signal.SIGKILL)
        with next_at(server) as second:
            second.stop(signal.SIGSEGV)
        third = ServerProcess(**{**server.settings, "adopt": "require"})
        with pytest.raises(AssertionError, match="cannot be taken over: the server that had taken it over"):
            third.wait_ready()
        third.close()
        with next_at(server) as fourth:
            assert fourth.pool_id != server.pool_id


def test_a_pool_that_was_used_for_long_is_trusted(tmp_path: Path) -> None:
    """In a process of its own, whose handler of crashes it is; the time is passed in."""
    program = f"""
import os, signal, sys
from pathlib import Path
from kvdock.api.pool.adopt import TRUSTED_S, CrashMark
now_s = [5.0]
mark = CrashMark(Path({str(tmp_path / "mark")!r}), lambda: now_s[0])
mark.begin(catches_signals=True)
now_s[0] += float(sys.argv[1])
mark.end_when_due()
os.kill(os.getpid(), signal.SIGSEGV)
"""
    path, found = tmp_path / "mark", []
    for used_s in (TRUSTED_S - 1, TRUSTED_S):
        done = subprocess.run([sys.executable, "-c", program, str(used_s)], capture_output=True)
        assert done.returncode == -signal.SIGSEGV
        found.append(CrashMark(path, time.monotonic).read())
        path.unlink(missing_ok=True)
    assert found == ["Segmentation fault", ""]


def test_signals_of_a_process_that_is_not_the_servers_are_left_alone(tmp_path: Path) -> None:
    before = faulthandler.is_enabled()
    mark = CrashMark(tmp_path / "mark", time.monotonic)
    mark.begin(catches_signals=False)
    assert (faulthandler.is_enabled(), list(tmp_path.iterdir())) == (before, [])
    mark.end()
