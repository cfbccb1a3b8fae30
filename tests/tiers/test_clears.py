"""Clear means clear: what was cleared, deleted or found to be damaged comes back from no lower tier, whichever server
still had it on its way, whatever is restarted, and at no other server that uses the same store."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, ServerProcess, comes_true, eventually, unique
from connector_helpers import sweep
from mover_steps import SteppedServer, kill_with_mover
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_stores import SHARED, STORES, DiskStore, RedisStore, Store, clear_pool, has_state, opened

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache, Cleared, DeleteChunks, Deleted
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Commit, PartDone, ReportMismatch, Reserve
from kvdock.protocol.wire_types import OWN_TENANT

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(180)]

CHUNKS = 6
PART_BYTES = 64 << 10

Change = Callable[[TierEngine, list[bytes]], object]


def clear(engine: TierEngine, keys: list[bytes]) -> Cleared:
    return engine.client.clear(ClearCache(namespace=engine.attachment.namespace.hex()))


def clear_all(engine: TierEngine, keys: list[bytes]) -> Cleared:
    return engine.client.clear(ClearCache())


def clear_tenant(engine: TierEngine, keys: list[bytes]) -> Cleared:
    """That of the server's own user, the only one whose chunks tiers keep."""
    return engine.client.clear(ClearCache(tenant=OWN_TENANT))


def delete(engine: TierEngine, keys: list[bytes]) -> Deleted:
    return engine.client.delete(
        DeleteChunks(namespace=engine.attachment.namespace.hex(), keys=[key.hex() for key in keys])
    )


def quarantine(engine: TierEngine, keys: list[bytes]) -> None:
    """A reader finds that all of them have other bytes. What tiers have goes soon after."""
    found = engine.awaited(keys, unique("reads"))
    assert found.lease is not None
    for parts in found.chunks:
        engine.damage(parts[0])
    engine.client.mismatch(ReportMismatch(
        session=engine.attachment.session, lease=found.lease, chunks=list(range(len(keys)))
    ))
    engine.release(found)
    eventually(lambda: pending_orders(engine.client) == 0, 30.0)


CHANGES: list[Change] = [clear, clear_all, delete, quarantine]
changes = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def pending_orders(client: Client) -> int:
    return sum(tier.pending_orders for tier in client.status().tiers)


class Servers:
    """Servers over one store, the first at one socket again and again."""

    def __init__(self, store: Store, folder: Path, ends: ExitStack) -> None:
        self.store, self.folder, self._ends = store, folder, ends
        self._model = unique("clears")
        self._count = 0

    def start(self, socket: str = "kvdock.sock", **more: object) -> SteppedServer:
        self._count += 1
        server = SteppedServer(
            self.folder / f"armed-{self._count}", self.store.environment, pool_bytes=16 * MIB, segment_bytes=16 * MIB,
            tier_asks=1, heartbeat_s=0.1, socket_path=str(self.folder / socket), **self.store.settings, **more,
        )
        return self._ends.enter_context(server)

    def engine(self, server: ServerProcess, name: str = "engine") -> TierEngine:
        engine = TierEngine(server.unix, manifest(PART_BYTES, model=self._model), name)
        self._ends.callback(engine.close)
        return engine

    def kill(self, server: ServerProcess, *, with_pool: bool) -> None:
        kill_with_mover(server)
        if with_pool:
            sweep(server)


def apart(kinds: Sequence[type[Store]]) -> list[Any]:
    """The tests of each store may run beside those of the others."""
    return [pytest.param(kind, id=kind.name, marks=pytest.mark.xdist_group(f"clears-{kind.name}")) for kind in kinds]


@pytest.fixture(scope="module", params=apart(STORES))
def made(request: pytest.FixtureRequest) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


@pytest.fixture(scope="module", params=apart(SHARED))
def shared(request: pytest.FixtureRequest) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


def over(store: Store) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, ExitStack() as ends:
        yield Servers(store, Path(name), ends)


@pytest.fixture
def servers(made: Store) -> Iterator[Servers]:
    yield from over(made)


@pytest.fixture
def sharing(shared: Store) -> Iterator[Servers]:
    yield from over(shared)


def written(engine: TierEngine, keys: list[bytes]) -> list[bytes]:
    """They are in the pool and in the tier."""
    before = stored_in_tier(engine)
    engine.store(keys)
    eventually(lambda: stored_in_tier(engine) >= before + len(keys), 60.0)
    return keys


def stored_in_tier(engine: TierEngine) -> int:
    return sum(tier.counters["store_done"] for tier in engine.client.status().tiers)


def hits(engine: TierEngine, keys: list[bytes]) -> int:
    """Chunks, after a wait for tiers. What comes has the right bytes."""
    found = engine.awaited(keys, unique("looks"))
    if found.hit_tokens:
        engine.read(keys, found)
    if found.lease is not None:
        engine.release(found)
    return found.hit_tokens // CHUNK_TOKENS


def come(engine: TierEngine, keys: list[bytes]) -> bool:
    """They come from a tier, once the mover serves the engine's namespace and the tier is used for it. A busy machine
    may be too slow for one request."""
    eventually(lambda: hits(engine, keys) == len(keys), 30.0)
    return True


def ready(servers: Servers) -> tuple[SteppedServer, TierEngine]:
    server = servers.start()
    has_state(server.unix, "open")
    return server, servers.engine(server)


# ---------------------------------------------------------------- one server


@pytest.mark.sweep("made")
@pytest.mark.parametrize("change", [*CHANGES, clear_tenant], ids=lambda change: change.__name__)
def test_what_was_cleared_comes_back_from_no_tier(servers: Servers, change: Change) -> None:
    server, engine = ready(servers)
    keys, others = written(engine, engine.chain(CHUNKS)), written(engine, engine.chain(CHUNKS))
    clear_pool(server.unix)
    assert come(engine, keys) and come(engine, others), "the tier has them"
    change(engine, keys)
    assert hits(engine, keys) == 0
    assert come(engine, others) if change in (delete, quarantine) else hits(engine, others) == 0
    written(engine, keys)
    clear_pool(server.unix)
    assert come(engine, keys), "what is stored afterwards is kept like anything else"
    change(engine, keys)
    assert hits(engine, keys) == 0, "a second time as well"


@pytest.mark.sweep("made")
@pytest.mark.parametrize("with_pool", [False, True], ids=["restarted", "pool removed"])
@changes
def test_what_was_cleared_does_not_come_back_with_the_next_server(
    servers: Servers, change: Change, with_pool: bool
) -> None:
    server, engine = ready(servers)
    keys, others = written(engine, engine.chain(CHUNKS)), engine.chain(CHUNKS)
    change(engine, keys)
    written(engine, others)
    servers.kill(server, with_pool=with_pool)
    server = servers.start()
    has_state(server.unix, "open")
    engine = servers.engine(server, "later")
    assert hits(engine, keys) == 0
    clear_pool(server.unix)
    assert come(engine, others), "the tier is used"
    assert hits(engine, keys) == 0


@pytest.mark.sweep("made")
def test_deleting_answers_how_many_chunks_tiers_had(servers: Servers) -> None:
    server, engine = ready(servers)
    keys = written(engine, engine.chain(CHUNKS))
    clear_pool(server.unix)
    answer = delete(engine, keys[:4] + engine.chain(2))
    assert (answer.chunks, answer.tier_chunks, answer.pending_tiers, answer.is_cleared) == (0, 4, [], False)
    assert hits(engine, keys) == 0
    assert hits(engine, keys[:1]) == 0


@pytest.mark.sweep("made")
def test_more_deletions_than_a_note_can_name_clear_the_namespace(servers: Servers) -> None:
    server, engine = ready(servers)
    keys, others = written(engine, engine.chain(CHUNKS)), written(engine, engine.chain(CHUNKS))
    for _ in range(2):
        many = [engine.rng.randbytes(32) for _ in range(3000)]
        answer = delete(engine, many + keys[:1])
    assert answer.is_cleared
    clear_pool(server.unix)
    assert hits(engine, others) == 0
    written(engine, keys)
    clear_pool(server.unix)
    assert come(engine, keys)


# ---------------------------------------------------------------- on its way


@pytest.mark.sweep("made")
@pytest.mark.parametrize("step", ["down.asked", "down.held", "down.written"])
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_what_was_on_its_way_down_is_not_found(servers: Servers, change: Change, step: str) -> None:
    server, engine = ready(servers)
    server.armed.write_text(step)
    keys = engine.chain(CHUNKS)
    engine.store(keys)
    mover = server.stands(step)
    answer = change(engine, keys)
    assert isinstance(answer, Cleared | Deleted)
    assert answer.pending_tiers == [servers.store.name], "the tier that has not carried it out is named"
    mover.send_signal(signal.SIGCONT)
    eventually(lambda: pending_orders(engine.client) == 0, 30.0)
    assert hits(engine, keys) == 0
    for _ in range(2):  # the write that was in progress may end now, and then counts as one of the first time
        written(engine, keys)
        clear_pool(server.unix)
        if comes_true(lambda: hits(engine, keys) == CHUNKS, 5.0, pause_s=0.01):
            return
    pytest.fail("what is stored again does not come back")


@pytest.mark.sweep("made")
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_what_was_leased_before_a_clear_is_neither_found_after_it_nor_known_to_be_stored(
    servers: Servers, change: Change
) -> None:
    """The mover has leased the chunks, and writes them once the tier has carried out the order."""
    server, engine = ready(servers)
    keys = engine.chain(CHUNKS)
    with server.holding("down.held"):
        engine.store(keys)
        eventually(lambda: not server.armed.exists(), 30.0)
        change(engine, keys)
        eventually(lambda: pending_orders(engine.client) == 0, 30.0)
    eventually(lambda: stored_in_tier(engine) >= CHUNKS, 60.0)
    looked_up, again = keys[:2], keys[2:]
    assert hits(engine, looked_up) == 0
    written(engine, again)  # without a lookup, after which a chunk that the tier lacks would be written anyway
    clear_pool(server.unix)
    assert come(engine, again)


@pytest.mark.sweep("made")
@pytest.mark.parametrize("step", ["up.asked", "up.reserved", "up.hashed", "up.committed"])
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_what_was_on_its_way_up_is_not_published(servers: Servers, change: Change, step: str) -> None:
    server, engine = ready(servers)
    keys = written(engine, engine.chain(CHUNKS))
    clear_pool(server.unix)
    server.armed.write_text(step)
    waiting = unique("waits")
    assert engine.lookup(keys, waiting, 20.0).pending is not None
    mover = server.stands(step)
    change(engine, keys)
    mover.send_signal(signal.SIGCONT)
    found = engine.awaited(keys, waiting)
    assert found.hit_tokens == 0
    if found.lease is not None:
        engine.release(found)
    assert hits(engine, keys) == 0
    eventually(lambda: pending_orders(engine.client) == 0, 30.0)
    assert hits(engine, keys) == 0


@pytest.mark.sweep("made")
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_what_an_engine_was_storing_is_not_published(servers: Servers, change: Change) -> None:
    _, engine = ready(servers)
    keys, attachment = engine.chain(2), engine.attachment
    granted = engine.client.reserve(Reserve(
        session=attachment.session, member=attachment.member, store="begun", keys=b"".join(keys)
    ))
    change(engine, keys)
    done = [PartDone(chunk.index, part.group, 7) for chunk in granted.chunks for part in chunk.parts]
    assert granted.reservation is not None
    try:
        engine.client.commit(granted.reservation, Commit(session=attachment.session, rank=0, parts=done))
        assert change is delete
    except ApiError as error:
        assert (error.code, change) == ("grant_closed", clear)
    assert engine.lookup(keys, "after").hit_tokens == 0
    assert engine.client.status().reservations == 0


# ---------------------------------------------------------------- a tier that is off


def off(store: Store) -> None:
    store.stop("stat sync") if isinstance(store, DiskStore) else store.stop()


@pytest.mark.sweep("made")
@pytest.mark.parametrize("with_pool", [None, False, True], ids=["same server", "restarted", "pool removed"])
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_a_tier_with_a_pending_order_is_not_used_until_it_has_carried_it_out(
    servers: Servers, change: Change, with_pool: bool | None
) -> None:
    server, engine = ready(servers)
    keys = written(engine, engine.chain(CHUNKS))
    clear_pool(server.unix)
    off(servers.store)
    try:
        answer = change(engine, keys)
        assert isinstance(answer, Cleared | Deleted)
        assert answer.pending_tiers == [servers.store.name]
        assert pending_orders(engine.client) == 1
        if with_pool is not None:
            servers.kill(server, with_pool=with_pool)
    finally:
        servers.store.resume()
    if with_pool is not None:
        server = servers.start()
        engine = servers.engine(server, "later")
    has_state(server.unix, "open")
    assert hits(engine, keys) == 0
    eventually(lambda: pending_orders(engine.client) == 0, 60.0)
    assert hits(engine, keys) == 0
    eventually(lambda: not list(servers.folder.glob("*.orders")), 30.0)
    written(engine, keys)
    clear_pool(server.unix)
    assert come(engine, keys)


# ---------------------------------------------------------------- servers that share a store


@pytest.mark.sweep("shared")
@changes
def test_what_one_server_clears_is_found_at_no_other_that_shares_the_store(sharing: Servers, change: Change) -> None:
    """Not in the other's pool, once it has followed, nor in the store, which the other does not bring it back to."""
    server, engine = ready(sharing)
    another = sharing.start("another.sock")
    has_state(another.unix, "open")
    other = sharing.engine(another, "other")
    keys, kept = written(engine, engine.chain(CHUNKS)), written(engine, engine.chain(CHUNKS))
    assert come(other, keys) and come(other, kept)
    other.store(keys)  # so they do not go with their last reader
    change(engine, keys)
    eventually(lambda: other.lookup(keys, unique("peeks")).hit_tokens == 0)
    assert hits(other, keys) == 0
    clear_pool(server.unix)
    assert hits(engine, keys) == 0
    if change in (delete, quarantine):
        assert come(other, kept)
    written(other, keys)
    clear_pool(server.unix)
    assert come(engine, keys)  # a store that was asked in vain is asked again a little later


@changes
def test_what_one_server_clears_is_not_found_on_the_disk_of_another(change: Change, tmp_path: Path) -> None:
    """That server shares a store with it, and has a disk of its own, from which it starts again."""
    with ExitStack() as ends:
        store = ends.enter_context(opened(RedisStore, tmp_path))
        servers = Servers(store, tmp_path, ends)
        own: dict[str, object] = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 64 * MIB}
        _, engine = ready(servers)
        another = servers.start("another.sock", **own)
        other = servers.engine(another, "other")
        keys, kept = other.chain(CHUNKS), other.chain(CHUNKS)
        for some in (keys, kept):
            other.store(some)
            engine.store(some)
        eventually(lambda: on_disk(other) == 2 * CHUNKS, 60.0)
        change(engine, keys)
        eventually(lambda: other.lookup(keys, unique("peeks")).hit_tokens == 0)
        eventually(lambda: pending_orders(other.client) == 0)
        assert hits(other, keys) == 0
        later = other.chain(CHUNKS)
        other.store(later)
        eventually(lambda: on_disk(other) == 3 * CHUNKS, 60.0)
        servers.kill(another, with_pool=True)
        again = servers.start("another.sock", **own)
        engine_again = servers.engine(again, "other again")
        eventually(lambda: [tier.state for tier in engine_again.client.status().tiers] == ["open", "open"], 30.0)
        assert come(engine_again, later)
        assert hits(engine_again, keys) == 0
        if change in (delete, quarantine):
            assert come(engine_again, kept)


def on_disk(engine: TierEngine) -> int:
    return sum(tier.counters.get("store_done", 0) for tier in engine.client.status().tiers if tier.name == "disk")


@pytest.mark.sweep("shared")
@pytest.mark.parametrize("change", [clear, delete], ids=lambda change: change.__name__)
def test_what_another_server_was_writing_is_not_found(sharing: Servers, change: Change) -> None:
    """It has leased the chunks before, and writes them after the clear."""
    _, engine = ready(sharing)
    another = sharing.start("another.sock")
    has_state(another.unix, "open")
    other = sharing.engine(another, "other")
    another.armed.write_text("down.held")
    keys = engine.chain(CHUNKS)
    other.store(keys)
    mover = another.stands("down.held")
    engine.store(engine.chain(1))  # so the namespace is known here
    change(engine, keys)
    mover.send_signal(signal.SIGCONT)
    eventually(lambda: other.lookup(keys, unique("peeks")).hit_tokens == 0)
    for one in (engine, other):
        assert hits(one, keys) == 0
    assert hits(engine, keys) == 0


@pytest.mark.sweep("shared")
def test_a_server_that_starts_later_knows_of_clears_by_others(sharing: Servers) -> None:
    server, engine = ready(sharing)
    keys = written(engine, engine.chain(CHUNKS))
    clear(engine, keys)
    others = written(engine, engine.chain(CHUNKS))
    sharing.kill(server, with_pool=True)
    another = sharing.start("another.sock")
    has_state(another.unix, "open")
    other = sharing.engine(another, "other")
    assert come(other, others)
    assert hits(other, keys) == 0
