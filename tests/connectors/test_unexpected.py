"""A session goes on whatever is raised in its heartbeat thread: it is said once, the engine has misses, and the server
does not take the process for one that has gone silent."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, attach, eventually, keys, manifest, unique
from connector_helpers import mapped_objects
from mlock_helpers import MemoryLock

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment, EngineSession, Identity, SessionObserver
from kvdock.datapath.segments import Register, SegmentRegistrar
from kvdock.protocol import schemas as s
from kvdock.shm.locks import LOCK_FILE_BYTES
from kvdock.shm.objects import lock_path

pytestmark = pytest.mark.security


@contextmanager
def member_of(
    server: ServerProcess, observer: SessionObserver | None = None, **options: Any
) -> Iterator[EngineSession]:
    with Client(server.unix) as client:
        session = EngineSession(client, manifest(), Identity(unique("instance"), "m"), **options)
        session.start(observer)
        try:
            yield session
        finally:
            session.close()


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_session_outlives_whatever_its_observer_raises(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, the member stays live, and the server's questions are answered."""
    heard: list[s.Changes] = []
    asked: set[str] = set()

    def fail(_attachment: Attachment, changes: s.Changes) -> None:
        heard.append(changes)
        raise KeyError("a router's own")

    def keeps(lease: str) -> bool:
        asked.add(lease)
        return False

    quick = {"heartbeat_s": 0.02, "missed_heartbeats": 100, "ask_s": 0.1}
    with ServerProcess(**quick) as server, Client(server.unix) as client, \
            member_of(server, SessionObserver(keeps, fail)) as session:
        attachment = session.attachment
        assert attachment is not None
        writer = attach(client)
        writer.store(keys(2))
        found = client.lookup(s.Lookup(session=attachment.session, member="m-1", request="r", keys=keys(2)))
        assert found.lease is not None
        eventually(lambda: asked == {found.lease} and not client.leases().leases)
        eventually(lambda: len(heard) > 3)
        assert [chunk.key for changes in heard for chunk in changes.changes] == keys(2), "each change once"
        assert session.attachment is attachment
        assert errors_in(caplog) == ["changes of the cache were lost by KeyError: \"a router's own\""]
        writer.leave()


def test_a_heartbeat_that_fails_in_an_unknown_way_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvdock.connectors.session.LONGEST_RETRY_S", 0.02)
    with ServerProcess(heartbeat_s=0.02) as server, member_of(server) as session:
        beat = session.client.heartbeat
        failed: list[None] = []

        def fail(*_: object) -> s.HeartbeatAnswer:
            failed.append(None)
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(session.client, "heartbeat", fail)
        eventually(lambda: len(failed) > 3)
        states = {member.state for view in session.client.sessions().sessions for member in view.members}
        monkeypatch.setattr(session.client, "heartbeat", beat)
        assert states <= {"live", "suspect"}
        assert errors_in(caplog) == ["unexpected RuntimeError, trying again: can't start new thread"]
        eventually(lambda: {
            member.state for view in session.client.sessions().sessions for member in view.members
        } == {"live"})


def test_a_lock_file_that_was_cut_short_is_a_miss_until_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvdock.connectors.session.LONGEST_RETRY_S", 0.02)
    with ServerProcess() as server, caplog.at_level(logging.DEBUG, "kvdock.connector"):
        lock = lock_path(server.pool_id)
        os.truncate(lock, 100)
        with member_of(server) as session:
            assert session.attachment is None
            eventually(lambda: caplog.text.count("unexpected ValueError, trying again: ") > 1)
            os.truncate(lock, LOCK_FILE_BYTES)
            eventually(lambda: session.attachment is not None)
        begins = [text.partition(":")[0] for text in errors_in(caplog)]
        assert begins == ["cannot attach yet, so every lookup is a miss"]


def test_a_process_that_can_start_no_thread_holds_no_lock_and_attaches_once_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, real, refused = mapped_objects(), SegmentRegistrar, [None] * 3

    def scarce(*args: Any, **options: Any) -> SegmentRegistrar:
        if refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        return real(*args, **options)

    monkeypatch.setattr("kvdock.connectors.session.SegmentRegistrar", scarce)
    with ServerProcess() as server, member_of(server, register=MemoryLock()) as session:
        assert session.attachment is None and mapped_objects() == before
        eventually(lambda: session.attachment is not None)
        assert not refused


@pytest.mark.parametrize("register", [None, MemoryLock()], ids=["cpu", "gpu"])
def test_the_lock_is_left_to_children_only_by_a_process_that_registers_memory(
    register: Register | None, server: ServerProcess
) -> None:
    with member_of(server, register=register):
        lines = Path("/proc/self/smaps").read_text().splitlines()
        starts = [at for at, line in enumerate(lines) if line.endswith(str(lock_path(server.pool_id)))]
        flags = [next(line for line in lines[at:] if line.startswith("VmFlags:")).split() for at in starts]
        assert ["dc" in of_one for of_one in flags] == [register is None]
