"""A server dies, and the next one at its socket has its pool: all of it or, loudly, nothing."""

from __future__ import annotations

import math
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from adoption_helpers import adopted_here, next_at, of_another_release
from api_helpers import ServerProcess, attach, eventually, keys, unique
from connector_helpers import CHUNK, engine_over, kvdock_of, mortal
from engine_helpers import config, make_engine, prompt, run_one, sampling

from kvdock.api.errors import OtherFormat
from kvdock.api.pool.adopt import check_format
from kvdock.api.pool.lock import server_alive
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.shm import objects as shm

VERSION_AT = 8
"""Offset of the table's version in its region: it never moves."""
LENGTHS = [100, 190, 280]


def refused(server: ServerProcess, **settings: object) -> str:
    """The message of a server that does not start."""
    failing = ServerProcess(**{**server.settings, **settings})
    with pytest.raises(AssertionError, match="did not start"):
        failing.wait_ready()
    failing.process.wait(10)
    said = failing.log_text()
    failing.close()
    return said


def object_of(server: ServerProcess, ending: str) -> Path:
    return next(shm.SHM_DIR.glob(f"kvdock-{server.pool_id:016x}{ending}*"))


def damage(server: ServerProcess, offset: int, content: bytes) -> None:
    with object_of(server, "-table").open("r+b") as region:
        region.seek(offset)
        region.write(content)


def test_chunks_leases_and_sessions_survive_a_killed_server_and_reservations_do_not() -> None:
    with mortal() as server, Client(server.unix) as client:
        engine = attach(client)
        stored, begun = keys(8, unique("stored")), keys(3, unique("begun"))
        engine.store(stored)
        lease = engine.lookup(stored)
        reservation = engine.reserve(begun)
        server.stop(signal.SIGKILL)
        with next_at(server) as second:
            assert second.pool_id == server.pool_id
            with pytest.raises(ApiError, match="unknown_session"):
                engine.lookup(stored)
            again = client.attach(engine.body)
            assert (again.session, again.incarnation) == (engine.session, engine.attached.incarnation + 1)
            renewed = engine.lookup(stored)
            assert (renewed.lease, renewed.chunks) == (lease.lease, lease.chunks), "the lease is the one it was"
            with pytest.raises(ApiError, match="grant_closed"):
                engine.commit(reservation)
            assert engine.reserve(begun).reservation is not None, "aborted, not published, and its memory is free"
            assert engine.release(lease.lease, 0) == []
            engine.close()
            assert second.stop() == 0
        assert server.shared_memory() == []


def test_a_commit_whose_answer_was_lost_in_the_crash_is_answered_by_the_next_server() -> None:
    with mortal() as server, Client(server.unix) as client:
        engine = attach(client)
        stored = engine.store(keys(4, unique("answered")))
        server.stop(signal.SIGKILL)
        with next_at(server):
            client.attach(engine.body)
            assert (engine.commit(stored).ready, engine.commit(stored).remaining) == (4, [])
        engine.close()


def test_what_the_dead_held_is_freed_and_what_the_living_hold_is_not() -> None:
    """Neither calls the next server: it looks at their locks."""
    with mortal() as server, Client(server.unix) as client:
        living, dying = attach(client), attach(client)
        chain = keys(4, unique("held"))
        living.store(chain)
        assert living.lookup(chain).lease and dying.lookup(chain[:2]).lease
        server.stop(signal.SIGKILL)
        dying.close()
        with next_at(server, settle_s=0.1, heartbeat_s=0.05, missed_heartbeats=3):
            eventually(lambda: client.status().leases == 1)
            assert client.status().sessions == 1
            time.sleep(0.5)  # many missed heartbeats and settlings later
            status = client.status()
            assert (status.leases, status.pool.held_bytes) == (1, 4 * 16384)
        living.close()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_second_server_in_a_row_adopts_too(ending: signal.Signals) -> None:
    with mortal(on_exit="keep") as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(4, unique("kept"))
        engine.store(chain)
        server.stop(ending)
        for life in range(3):
            with next_at(server) as following:
                client.attach(engine.body)
                assert engine.lookup(chain, request=f"r{life}").hit_tokens == 64
                following.stop(ending)
        engine.close()


def test_a_server_told_never_to_adopt_starts_with_an_empty_pool_and_removes_the_old_one() -> None:
    with mortal() as server:
        server.stop(signal.SIGKILL)
        with next_at(server, adopt="never") as second:
            assert second.pool_id != server.pool_id and server.shared_memory() == []


def test_a_server_that_must_adopt_does_not_start_without_a_pool() -> None:
    with mortal() as server:
        server.stop(signal.SIGKILL)
        with of_another_release(server):
            said = refused(server, adopt="require")
        assert "the table is of another version (found format 999, this release reads" in said
        assert server.shared_memory(), "it is left for whoever can use it"
        with next_at(server, adopt="never") as second:
            second.stop()
        assert "no server has left a pool" in refused(server, adopt="require")


def test_a_pool_in_another_format_is_left_in_place_and_its_release_takes_it_over_again() -> None:
    with mortal() as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(4, unique("kept"))
        engine.store(chain)
        server.stop(signal.SIGKILL)
        before = server.shared_memory()
        check_format(server.pool_id)
        with of_another_release(server):
            with pytest.raises(OtherFormat, match="found format 999"):
                check_format(server.pool_id)
            said = refused(server, adopt="auto")
        assert f"pool {server.pool_id:016x}, left at {server.settings['socket_path']}, is kept" in said
        assert "(found format 999, this release reads" in said and "--adopt=never" in said
        assert server.shared_memory() == before
        with next_at(server) as second:
            client.attach(engine.body)
            assert second.pool_id == server.pool_id and engine.lookup(chain).hit_tokens == 64
        engine.close()


def test_a_pool_whose_version_alone_is_damaged_keeps_no_server_from_starting() -> None:
    with mortal() as server:
        server.stop(signal.SIGKILL)
        damage(server, VERSION_AT, struct.pack("<I", 999))
        with next_at(server) as second:
            assert second.pool_id != server.pool_id and server.shared_memory() == []
            assert "the number of the table's version is damaged" in second.log_text()


def test_a_pool_cut_short_is_refused() -> None:
    for name, bytes_left in (("-table", 0), ("-table", 70_000), ("-0000", 4096), ("-0000", 8 << 20)):
        with mortal() as server:
            server.stop(signal.SIGKILL)
            os.truncate(object_of(server, name), bytes_left)
            with next_at(server) as second:
                assert second.pool_id != server.pool_id, (name, bytes_left)
                assert "cannot be taken over" in second.log_text()


def test_a_server_at_another_socket_leaves_the_pool_alone() -> None:
    with mortal() as server:
        server.stop(signal.SIGKILL)
        with ServerProcess() as stranger:
            assert stranger.pool_id != server.pool_id and server.shared_memory()
        with next_at(server) as second:
            assert second.pool_id == server.pool_id


def test_a_pool_has_one_server() -> None:
    with mortal() as server:
        assert server_alive(server.pool_id)
        assert "another server answers" in refused(server)
        with pytest.raises(Exception, match="held"), adopted_here(server):
            pass


def test_a_segment_the_table_never_knew_goes_and_its_id_is_free_again() -> None:
    """As after a kill in the middle of growing."""
    with mortal(pool_bytes=4 << 20, segment_bytes=2 << 20) as server, Client(server.unix) as client:
        server.stop(signal.SIGKILL)
        half_made = Path(f"{shm.SHM_DIR}{shm.segment_name(server.pool_id, 1, 1)}")
        half_made.touch(0o600)
        os.truncate(half_made, 2 << 20)
        with next_at(server) as second:
            assert second.pool_id == server.pool_id and not half_made.exists()
            engine = attach(client)
            engine.store(keys(200, unique("grown")))
            assert [segment.id for segment in client.segments().segments] == [0, 1]
            engine.leave()


def test_engines_have_hits_again_after_one_wait_at_most_and_the_same_tokens_after_every_kill() -> None:
    settings = config(num_blocks=200, max_local_hit_tokens=0)
    wanted = [run_one(make_engine(), prompt(n, length), sampling(8)).output_tokens for n, length in enumerate(LENGTHS)]
    with mortal() as server:
        engine = engine_over(server.unix, settings)
        for number, length in enumerate(LENGTHS):
            run_one(engine, prompt(number, length), sampling(1))
        assert engine.drain(20.0)
        session = kvdock_of(engine).session
        before, running = session.attachment, server
        waits: list[float] = []
        """Those of a member without a server."""
        wait = session._wake.wait

        def noted(timeout: float | None = None) -> bool:
            if session.attachment is None:
                waits.append(math.inf if timeout is None else timeout)
            return wait(timeout)

        session._wake.wait = noted  # type: ignore[method-assign]  # real, its length kept
        for _ in range(3):
            running.stop(signal.SIGKILL)
            missed = run_one(engine, prompt(0, LENGTHS[0]), sampling(8))
            assert (missed.output_tokens, missed.metrics.loaded_tokens) == (wanted[0], 0), "meanwhile it has misses"
            with next_at(server) as running:
                begun = len(waits)
                eventually(lambda: session.attachment is not None)
                assert len(waits) <= begun + 1, "it attaches with the first try, or with the next after one under way"
                for number, length in enumerate(LENGTHS):
                    done = run_one(engine, prompt(number, length), sampling(8))
                    assert done.output_tokens == wanted[number]
                    assert done.metrics.loaded_tokens == length // CHUNK * CHUNK
                assert session.attachment is before, "it came back as who it was"
                running.stop(signal.SIGKILL)
        assert waits and max(waits) <= 1.5, "the next server is looked for so often"
        engine.close()
