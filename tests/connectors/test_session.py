"""A connector and a server that comes late, stops, dies or returns as another: what is lost is a miss, never more."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
from adoption_helpers import remove_stale_of
from api_helpers import (
    MIB,
    PATIENCE_S,
    ServerProcess,
    attach,
    eventually,
    keys,
    manifest,
    raw,
    small_pool,
    unique,
)
from connector_helpers import CHUNK, Rig, halted, mapped_objects, mortal, no_trace, successor, tokens_of

from kvdock.api.access.access_file import AccessFile
from kvdock.api.build import build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.http.connection import connection_class
from kvdock.api.pool.pool import Pool, open_pool
from kvdock.api.server import connection_limits
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.connectors.interface import LoadDone, Miss, Pending
from kvdock.connectors.session import EngineSession, Identity, SessionObserver
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import PatchConfig
from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.wire_types import MAX_ENTRIES
from kvdock.shm.objects import SHM_DIR


class Held:
    """A client's calls of one method, made once `go` is set. `begun`: how many."""

    def __init__(self, client: Client, name: str) -> None:
        self.go, self.begun, self._call = threading.Event(), 0, getattr(client, name)
        setattr(client, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.begun += 1
        self.go.wait(PATIENCE_S)
        return self._call(*arguments, **named)


@contextmanager
def unready_server(path: str) -> Iterator[tuple[str, Pool, asyncio.AbstractEventLoop]]:
    """The real application over a pool whose first segment is not there yet."""
    settings = Settings.load(small_pool(socket_path=path))
    pool = open_pool(settings, secrets.randbits)
    parts = build(settings, pool, AccessFile(""), Clocks())
    connections = connection_class(connection_limits(settings), parts.meter)
    app = create_app(settings, parts)
    server = uvicorn.Server(uvicorn.Config(app, uds=path, http=connections, log_config=None, lifespan="off"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(),))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"unix:{path}", pool, loop
    finally:
        server.should_exit = True
        thread.join()
        loop.close()
        pool.close()


def test_a_server_that_is_not_ready_yet_is_waited_for() -> None:
    with ServerProcess() as somewhere:
        path = f"{somewhere.folder.name}/early.sock"
        with unready_server(path) as (address, pool, loop), Rig(address) as rig:
            tokens = tokens_of(1, 2)
            assert rig.connector.lookup("r", tokens, 16) == Miss()
            asyncio.run_coroutine_threadsafe(pool.grow_first(), loop).result(10.0)
            eventually(lambda: rig.connector.session.attachment is not None)
            rig.store("s", tokens, range(8))
            assert rig.lookup("r", tokens) == 128


def test_segments_that_the_pool_gave_up_are_unmapped_and_the_others_go_on() -> None:
    before = mapped_objects()
    sizes = {"pool_bytes": 4 * MIB, "segment_bytes": MIB, "heartbeat_s": 0.05}
    with mortal(**sizes) as server, Rig(server.unix) as rig, Client(server.unix) as client:
        for number in range(3):  # each as large as most of a segment
            rig.store(f"s{number}", tokens_of(60 + number, 25), range(100))
        grown = len(client.segments().segments)
        assert grown >= 3
        eventually(lambda: mapped_objects() == before + grown + 1)
        body = msgspec.json.encode({"pool_bytes": 2 * MIB})
        status, _, _ = raw(server.unix, "PATCH", "/v1/config", body, {"Content-Type": "application/json"})
        assert status == 200
        eventually(lambda: len(client.segments().segments) == 2)
        eventually(lambda: mapped_objects() == before + 2 + 1)
        tokens = tokens_of(70, 2)
        rig.store("after", tokens, range(8))
        assert rig.lookup("r", tokens) == 128
        assert rig.load("r", range(64, 72), 0, 128).valid_tokens == 128
        assert torch.equal(rig.blocks(range(64, 72)), rig.blocks(range(8)))


@pytest.mark.security
def test_segments_that_went_unheard_are_unmapped_once_the_pool_has_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that was away while more segments went than a pool remembers."""
    sizes = {"pool_bytes": 4 * MIB, "segment_bytes": MIB, "heartbeat_s": 0.05}
    with mortal(**sizes) as server, Rig(server.unix) as rig, Client(server.unix) as client:
        heard = rig.connector.session.client
        heartbeat = heard.heartbeat

        def deaf(session: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
            return msgspec.structs.replace(heartbeat(session, body), retired=[])

        monkeypatch.setattr(heard, "heartbeat", deaf)  # as a server answers that has forgotten
        for number in range(3):
            rig.store(f"s{number}", tokens_of(60 + number, 25), range(100))
        eventually(lambda: len(rig.attachment.segments.segments) == len(client.segments().segments) >= 3)
        client.configure(PatchConfig(pool_bytes=MIB))
        eventually(lambda: len(client.segments().segments) == 1)
        client.configure(PatchConfig(pool_bytes=3 * MIB))
        rig.store("later", tokens_of(80, 25), range(100))
        listed = {one.id for one in client.segments().segments}
        assert max(listed) > 2
        eventually(lambda: {one.id for one in rig.attachment.segments.segments} == listed)


def test_a_killed_server_is_a_miss_and_its_memory_is_given_back_with_its_pool() -> None:
    before = mapped_objects()
    with mortal() as server, Rig(server.unix) as rig:
        tokens = tokens_of(2, 2)
        rig.store("s", tokens, range(8))
        assert mapped_objects() == before + 2, "a segment and the lock file"
        server.stop(signal.SIGKILL)
        eventually(lambda: rig.lookup("r", tokens, 32) == 32)
        assert rig.connector.begin_store("r", tokens, [range(8)], 128) == ()
        rig.connector.finished("r")
        assert mapped_objects() == before + 2, "as long as a server may adopt the pool"
        assert remove_stale_of(server.pool_id)
        eventually(lambda: mapped_objects() == before)


def test_an_answer_of_a_dead_server_is_still_loaded_and_never_hurts_its_successor() -> None:
    """A plan of the first life is carried out while the second is attached: its memory stays mapped, and that the
    second server knows nothing of it is no reason to leave the second."""
    before = mapped_objects()
    with mortal() as server, Rig(server.unix) as rig:
        tokens = tokens_of(3, 2)
        rig.store("s", tokens, range(8))
        assert rig.lookup("r", tokens) == 128
        begun = rig.connector.scheduler.lookups.begin_load("r", [range(64, 72)], 0, 128)
        assert begun is not None
        server.stop(signal.SIGKILL)
        with successor(server):
            eventually(lambda: rig.connector.session.attachment not in (None, begun[0]))
            second = rig.attachment
            assert mapped_objects() == before + 4
            assert rig.connector.worker.load(*begun) == 128
            assert torch.equal(rig.blocks(range(64, 72)), rig.blocks(range(8)))
            rig.connector.session.lost(begun[0], ServerUnavailable("a call of the first life, timed out at last"))
            assert rig.connector.session.attachment is second
            begun[0].release()
            assert mapped_objects() == before + 2
            rig.close()


def test_a_request_of_the_first_epoch_is_looked_up_again_in_the_second() -> None:
    with mortal() as server, Rig(server.unix) as rig:
        tokens = tokens_of(4, 2)
        rig.store("s", tokens, range(8))
        assert rig.lookup("r", tokens) == 128
        first = rig.attachment
        server.stop(signal.SIGKILL)
        with successor(server):
            eventually(lambda: rig.connector.session.attachment not in (None, first))
            assert rig.lookup("r", tokens) == 0
            rig.connector.begin_load("r", [range(8)], 0, 128)
            assert rig.wait_load("r") == LoadDone("r", 0)
            wanted = rig.connector.begin_store("r", tokens, [range(8)], 128)
            assert wanted == (tuple(range(8)),), "what the first server held must be offered to the second"
            rig.wait_store("r", wanted)
            assert rig.lookup("again", tokens) == 128
            rig.close()


def test_a_stopped_server_comes_back_as_the_same_attachment_and_the_waiting_lease_holds() -> None:
    with mortal(ask_s=0.5, heartbeat_s=0.1) as server, Rig(server.unix) as rig:
        tokens = tokens_of(5, 2)
        rig.store("s", tokens, range(8))
        assert rig.lookup("waits", tokens) == 128
        before = rig.attachment
        with Client(server.unix) as client:
            [lease] = client.leases().leases
        with halted(server, rig.connector):
            rig.connector.lookup("r", tokens, 0)
            eventually(lambda: rig.connector.session.attachment is None)
            assert rig.connector.lookup("r", tokens, 16) == Miss()
            assert rig.connector.lookup("waits", tokens, 16) == Miss()
        eventually(lambda: rig.connector.session.attachment is before)
        assert rig.lookup("new", tokens) == 128
        assert rig.lookup("waits", tokens) == 128
        with Client(server.unix) as client:
            assert [one.grant for one in client.leases().leases if one.request == "waits"] == [lease.grant]
        assert rig.load("waits", range(64, 72), 0, 128).valid_tokens == 128
        with Client(server.unix) as client:
            assert client.status().counters["attached_members"] == 2, "wanted the same member again"
            rig.connector.finished("new")
            # Also the lease whose answer nobody was there to hear: the server asks about it.
            eventually(lambda: client.status().leases == 0)


def test_stores_queued_behind_a_stopped_server_give_their_blocks_back_together() -> None:
    """Not after a timeout each: the engine needs those blocks."""
    with mortal() as server, Rig(server.unix) as rig:
        calls, offered = Held(rig.connector.session.client, "reserve"), {}
        for number in range(8):
            tokens = tokens_of(10 + number, 1)
            offered[f"r{number}"] = rig.connector.begin_store(f"r{number}", tokens, [range(4)], 64)
        with halted(server, rig.connector):
            calls.go.set()
            for request, blocks in offered.items():
                assert blocks == ((0, 1, 2, 3),)
                rig.wait_store(request, blocks)
            assert calls.begun == 1, "each store waited for a timeout of its own"


def test_loads_queued_behind_a_stopped_server_are_done_together() -> None:
    """The bytes are in shared memory: only the word of release has to wait."""
    with mortal() as server, Rig(server.unix) as rig:
        tokens = tokens_of(20, 2)
        rig.store("s", tokens, range(8))
        for number in range(8):
            assert rig.lookup(f"r{number}", tokens) == 128
        calls = Held(rig.connector.session.client, "flush")
        for number in range(8):
            rig.connector.begin_load(f"r{number}", [range(64 + 8 * number, 72 + 8 * number)], 0, 128)
        with halted(server, rig.connector):
            calls.go.set()
            for number in range(8):
                assert rig.wait_load(f"r{number}").valid_tokens == 128
            assert calls.begun == 1, "each load waited for a timeout of its own"


def test_questions_queued_behind_a_stopped_server_are_misses_together() -> None:
    with mortal() as server, Rig(server.unix) as rig:
        before, calls = rig.attachment, Held(rig.connector.session.client, "lookup")
        for number in range(8):
            assert rig.connector.lookup(f"r{number}", tokens_of(30, 2), 0) == Pending()
        with halted(server, rig.connector):
            calls.go.set()
            eventually(lambda: rig.connector.session.attachment is None)
            eventually(rig.connector.scheduler.lookups._asking.is_idle)  # else some would be asked once it is back
        eventually(lambda: rig.connector.session.attachment is before)
        rig.lookup("new", tokens_of(31, 1))
        assert calls.begun <= 2, "the one that found the server stopped, and the new one"


def test_the_connector_outlives_a_time_without_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvdock.connector")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with mortal() as server, Rig(server.unix) as rig:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            server.process.kill()
            eventually(lambda: caplog.text.count("still no server") >= 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        server.stop()
        first = rig.connector.session.attachment
        with successor(server):
            eventually(lambda: rig.connector.session.attachment not in (None, first))
            rig.close()


def test_a_process_that_cannot_map_the_pool_says_why_once_and_always_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvdock.connector")
    with mortal() as server, Client(server.unix) as client:
        name = client.segments().segments[0].name.removeprefix("/")
        (SHM_DIR / name).rename(SHM_DIR / f"{name}-away")
        try:
            with Rig(server.unix) as rig:
                assert rig.connector.session.attachment is None
                eventually(lambda: client.status().counters["attached_members"] >= 4)
                assert sum(len(session.members) for session in client.sessions().sessions) <= 1, "one may be trying"
                assert client.status().counters["dead_members"] == 0
                loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
                assert len(loud) == 1 and name in loud[0], loud
                (SHM_DIR / f"{name}-away").rename(SHM_DIR / name)
                eventually(lambda: rig.connector.session.attachment is not None)
                eventually(lambda: f"attached to {server.unix}" in caplog.text)
        finally:
            (SHM_DIR / f"{name}-away").unlink(missing_ok=True)


@contextmanager
def observed(client: Client, observer: SessionObserver, described: s.Manifest | None = None) -> Iterator[EngineSession]:
    """An engine process that wants to hear of changes."""
    session = EngineSession(client, described or manifest(), Identity(unique("instance"), unique("member")))
    session.start(observer)
    try:
        yield session
    finally:
        session.close()


def test_changes_are_heard_from_attaching_on() -> None:
    with mortal() as server, Rig(server.unix) as rig, Client(server.unix) as client:
        rig.store("s", tokens_of(42, 2), range(8))
        heard: list[s.Changes] = []
        observer = SessionObserver(changed=lambda attachment, changes: heard.append(changes))
        with observed(client, observer, rig.connector.session.manifest):
            eventually(lambda: bool(heard))
            assert heard[0].complete and heard[0].changes == []


def test_more_changes_than_an_answer_holds_are_heard_with_one_heartbeat() -> None:
    heard: list[int] = []
    observer = SessionObserver(changed=lambda attachment, changes: heard.append(len(changes.changes)))
    with ServerProcess(heartbeat_s=60.0) as server, Client(server.unix) as client, \
            observed(client, observer) as session:
        attachment = session.attachment
        assert attachment is not None
        eventually(lambda: attachment.changes_since > 0)
        other = attach(client, **msgspec.to_builtins(session.manifest))
        changed = 0
        for batch in range(12):  # each goes as the next one comes
            stored = other.store(keys(400, unique(f"batch {batch}")))
            changed += 2 * len(stored.chunks)
        assert changed > 2 * MAX_ENTRIES
        latest = attachment.changes_since
        while (told := other.heartbeat(changes_since=latest).changes) is not None and told.next > latest:
            latest = told.next
        session._wake.set()  # the next heartbeat
        eventually(lambda: attachment.changes_since == latest)
        full = heard.index(MAX_ENTRIES)
        assert heard[full : full + 2] == [MAX_ENTRIES, MAX_ENTRIES], "the second at once"
        other.close()


def test_what_the_server_refuses_of_heartbeats_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = SessionObserver(changed=lambda attachment, changes: None)
    with ServerProcess(heartbeat_s=0.05) as server, Client(server.unix) as client, \
            observed(client, observer) as session:
        attachment = session.attachment
        assert attachment is not None

        def hears_from(since: int) -> int:
            """Set until it stays: an answer on its way sets it too."""
            found = attachment.changes_since
            if (found < 0) != (since < 0):
                attachment.changes_since = since
            return found

        eventually(lambda: hears_from(-1) < 0 and client.status().counters["refusals"] >= 3)
        assert caplog.text.count("the server refuses heartbeats") == 1
        assert session.attachment is attachment, "it is there, and answers everything else"
        eventually(lambda: hears_from(0) > 0)
        eventually(lambda: hears_from(-1) < 0 and caplog.text.count("the server refuses heartbeats") == 2)


def test_a_refusal_is_said_once_until_the_engine_is_attached(caplog: pytest.LogCaptureFixture) -> None:
    """The next server's pool has no room for one chunk of this engine."""
    with mortal() as server, Rig(server.unix, chunk_tokens=64 * CHUNK) as rig:
        server.process.kill()
        server.stop()
        with ServerProcess(
            socket_path=server.settings["socket_path"], adopt="never", pool_bytes=MIB, segment_bytes=MIB
        ) as small, Client(small.unix) as client:
            eventually(lambda: client.status().counters["refusals"] >= 3)
            assert caplog.text.count("refuses this engine") == 1
        with successor(server):
            eventually(lambda: rig.connector.session.attachment is not None)


def test_a_connector_that_lost_its_server_closes_without_a_trace() -> None:
    with mortal() as server:
        with no_trace():
            rig = Rig(server.unix)
            tokens = tokens_of(40, 3 * 2)
            rig.store("s", tokens, range(24))
            rig.lookup("r", tokens)
            with halted(server, rig.connector):
                rig.connector.begin_load("r", [range(64, 88)], 0, 6 * CHUNK)
                rig.connector.begin_store("t", tokens_of(41, 2), [range(8)], 128)
                rig.connector.lookup("u", tokens, 0)
                rig.close()
        with Client(server.unix) as client:
            eventually(lambda: client.status().sessions == 0)
            eventually(lambda: client.status().chunks.quarantined == client.status().chunks.reserved == 0)
            assert client.leases().leases == []


def test_a_member_that_the_server_takes_for_dead_attaches_again_under_a_new_id() -> None:
    """Its lock is free while another member keeps the session alive."""
    instance, described = unique("instance"), manifest(tensor_parallel=2, writers=2)
    with ServerProcess(heartbeat_s=0.05, settle_s=0.2) as server, Client(server.unix) as one, \
            Client(server.unix) as two:
        dies = EngineSession(one, described, Identity(instance, "dies", ranks=(0,)))
        stays = EngineSession(two, described, Identity(instance, "stays", ranks=(1,), scheduler=False))
        for session in (dies, stays):
            session.start()
        first = dies.attachment
        assert first is not None and first.member == "dies-1"
        first.hold.liveness.close()
        eventually(lambda: dies.attachment not in (None, first))
        assert dies.attachment is not None and dies.attachment.member != "dies-1"
        for session in (dies, stays):
            session.close()
