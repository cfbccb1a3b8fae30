"""`kvdock serve --takeover`: a rolling upgrade keeps the pool, and only one server ever has it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from adoption_helpers import of_another_release
from api_helpers import ServerProcess, attach, eventually, keys, unique
from cli_helpers import TIMEOUT_S, first_line, kvdock, kvdock_serve, refusal
from frozen import frozen

from kvdock.api.errors import StartupError
from kvdock.api.pool.adopt import ask_to_leave
from kvdock.client.client import Client
from kvdock.shm.objects import pool_objects


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[Popen[str], Client]]:
    with kvdock_serve(folder, "--settle-s", "0.1", *flags) as process:
        said = first_line(process)
        assert "kvdock is ready" in said, said + (process.stderr.read() if process.stderr else "")
        with Client(f"unix:{folder}/kvdock.sock") as client:
            yield process, client


def test_chunks_and_leases_outlive_three_upgrades_and_every_server_ends_well(tmp_path: Path) -> None:
    with ExitStack() as servers:
        running, client = servers.enter_context(serving(tmp_path))
        pool = int(client.status().pool_id, 16)
        engine, chain = attach(client), keys(6, unique("upgrade"))
        engine.store(chain)
        lease = engine.lookup(chain).lease
        for _ in range(3):
            before, (running, following) = running, servers.enter_context(serving(tmp_path, "--takeover"))
            assert before.wait(TIMEOUT_S) == 0, "the old server has ended, and not of the signal"
            assert int(following.status().pool_id, 16) == pool
            assert following.attach(engine.body).session == engine.session
            assert engine.lookup(chain).lease == lease, "the lease is the one it was"
        engine.close()
        running.send_signal(signal.SIGTERM)
        assert running.wait(TIMEOUT_S) == 0
        assert pool not in pool_objects()


def test_a_reservation_under_way_is_finished_before_the_pool_changes_hands(tmp_path: Path) -> None:
    with serving(tmp_path, "--drain-s", "20") as (first, client):
        engine, chain = attach(client), keys(3, unique("finished"))
        granted = engine.reserve(chain)
        failures: list[StartupError] = []

        def ask() -> None:
            try:
                ask_to_leave(f"{tmp_path}/kvdock.sock", patience_s=20)
            except StartupError as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.5)  # time enough to leave too early
        assert first.poll() is None, "it waits for the writer"
        engine.commit(granted)
        asking.join(TIMEOUT_S)
        assert not failures and first.wait(TIMEOUT_S) == 0
        with serving(tmp_path) as (second, following):
            following.attach(engine.body)
            assert engine.lookup(chain).hit_tokens == 48
            engine.close()
            second.send_signal(signal.SIGTERM)
            assert second.wait(TIMEOUT_S) == 0


def test_with_nobody_to_take_over_from_it_just_starts(tmp_path: Path) -> None:
    with serving(tmp_path, "--takeover") as (process, client):
        assert client.status().sessions == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_taking_over_and_never_adopting_exclude_each_other(tmp_path: Path) -> None:
    said = refusal(kvdock("serve", "--takeover", "--adopt", "never", "--socket-path", str(tmp_path / "s")), 1)
    assert "choose one" in said


def test_a_server_that_could_not_be_followed_is_not_asked_to_leave(tmp_path: Path) -> None:
    """Neither by a release that does not read its pool, nor by a server that would not start: nobody would serve."""
    with ServerProcess() as server:
        take = ("serve", "--takeover", "--port", "0", "--socket-path", str(server.settings["socket_path"]))
        with of_another_release(server):
            said = refusal(kvdock(*take), 1)
        assert "cannot be taken over, so its server goes on: " in said and "found format 999, this release" in said
        assert "No such file" in refusal(kvdock(*take, "--access-file", str(tmp_path / "none")), 1)
        assert server.process.poll() is None
        with Client(server.unix) as client:
            assert not client.status().reasons, "it was not asked to drain"


def test_without_takeover_the_running_server_keeps_its_pool(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, client):
        refused = kvdock("serve", "--port", "0", "--socket-path", str(tmp_path / "kvdock.sock"))
        assert "another server answers" in refusal(refused, 1)
        assert client.status().sessions == 0 and process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_a_server_that_does_not_leave_keeps_its_pool() -> None:
    with ServerProcess() as server:
        with frozen(server.process), pytest.raises(StartupError, match=r"has not ended within 0\.3 s"):
            ask_to_leave(str(server.settings["socket_path"]), patience_s=0.3)
        eventually(lambda: server.process.poll() is not None)
        with ServerProcess(**server.settings) as second:
            assert second.pool_id == server.pool_id
