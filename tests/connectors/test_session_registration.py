"""A process that registers segments with a GPU's driver says how far it is, also over losses of its server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from api_helpers import MIB, ServerProcess, attach, eventually, keys, manifest, raw, unique
from connector_helpers import Rig, mapped_objects, mortal, successor
from mlock_helpers import GatedLock, MemoryLock, locked_bytes

from kvdock.client.client import Client
from kvdock.connectors.session import Attachment, EngineSession, Identity
from kvdock.datapath.segments import Register
from kvdock.protocol.errors import ServerUnavailable
from kvdock.shm.errors import SegmentNotRegistered


@contextmanager
def registering(server: ServerProcess, register: Register) -> Iterator[EngineSession]:
    """An engine process that registers what it maps."""
    with Client(server.unix) as client:
        session = EngineSession(client, manifest(), Identity(unique("instance"), unique("member")), register=register)
        session.start()
        try:
            yield session
        finally:
            session.close()


def attached(session: EngineSession) -> Attachment:
    assert session.attachment is not None
    return session.attachment


def reported(client: Client) -> list[int | None]:
    """`pinned_through` of each member."""
    return [member.pinned_through for view in client.sessions().sessions for member in view.members]


def test_what_is_registered_is_reported_at_once_and_unregistered_at_the_end() -> None:
    before = locked_bytes()
    with ServerProcess(heartbeat_s=60.0) as server, Client(server.unix) as client:
        register = GatedLock()
        with registering(server, register) as session:
            assert register.reached.wait(10.0)
            assert reported(client) == [0], "attaching says that nothing is registered yet"
            with pytest.raises(SegmentNotRegistered, match="segment 0: found pinned through 0"):
                session.ensure_segment(attached(session), 0)
            register.gate.set()
            eventually(lambda: reported(client) == [1])
            session.ensure_segment(attached(session), 0)
            assert locked_bytes() == before + 16 * MIB
        assert locked_bytes() == before


def test_an_engine_that_registers_nothing_reports_nothing() -> None:
    with ServerProcess() as server, Client(server.unix) as client, Rig(server.unix):
        assert reported(client) == [None]


def test_segments_that_the_pool_grows_and_gives_up_are_registered_and_unregistered() -> None:
    before_locked, before_mapped = locked_bytes(), mapped_objects()
    sizes = {"pool_bytes": 4 * MIB, "segment_bytes": MIB, "heartbeat_s": 0.05}
    with mortal(**sizes) as server, Client(server.unix) as client, registering(server, MemoryLock()) as session:
        eventually(lambda: reported(client) == [1])
        writer = attach(client)
        writer.store(keys(150))  # parts of 16 KiB
        grown = len(client.segments().segments)
        assert grown >= 3
        eventually(lambda: reported(client)[0] == grown)
        assert locked_bytes() == before_locked + grown * MIB
        body = msgspec.json.encode({"pool_bytes": 2 * MIB})
        status, _, _ = raw(server.unix, "PATCH", "/v1/config", body, {"Content-Type": "application/json"})
        assert status == 200
        eventually(lambda: len(client.segments().segments) == 2)
        eventually(lambda: mapped_objects() == before_mapped + 2 + 1 + 1)
        assert locked_bytes() == before_locked + 2 * MIB
        assert reported(client)[0] == grown
        assert session.attachment is not None
        writer.close()


def test_after_a_restart_of_the_server_all_is_registered_anew() -> None:
    before = locked_bytes()
    with mortal() as server, registering(server, MemoryLock()) as session:
        with Client(server.unix) as client:
            eventually(lambda: reported(client) == [1])
        first = attached(session)
        server.stop(signal.SIGKILL)
        with successor(server) as second, Client(second.unix) as client:
            eventually(lambda: session.attachment not in (None, first))
            eventually(lambda: reported(client) == [1])
            eventually(lambda: locked_bytes() == before + 16 * MIB)
            session.close()


def test_a_member_that_comes_back_reports_what_is_still_registered() -> None:
    with mortal() as server, registering(server, MemoryLock()) as session, Client(server.unix) as client:
        eventually(lambda: reported(client) == [1])
        before = attached(session)
        session.lost(before, ServerUnavailable("the line was cut"))
        eventually(lambda: session.attachment is before)
        assert reported(client) == [1] and before.hold.registrar is not None and before.hold.registrar.is_registered(0)
