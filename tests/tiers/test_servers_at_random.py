"""Several servers over one store, which is too small and is damaged: they store, look up and delete at random."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, eventually
from mover_steps import SteppedServer
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_helpers import patient
from tier_stores import SHARED, SharedStore, clear_pool, has_state, opened

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.tiers.notes import Note
from kvdock.tiers.record import ALL_WRITERS, PartName
from kvdock.tiers.tier import Sweeps, Tier

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(180)]

SEED = 7
SERVERS, ENGINES = 3, 2
"""So many engines at each server."""
SECONDS = 3.0
"""At least: until each server has loaded and one has met damage."""
CHUNKS = 8
"""In a chain."""
WRITERS = 2
OF = manifest(64 << 10, model="random", writers=WRITERS)
POOL_BYTES = 8 * MIB
CHAINS = {"redis": 24, "mooncake": 24, "objects": 4}
STORE_BYTES = {"redis": 16 * MIB, "mooncake": 16 * MIB, "objects": 2 * MIB}
"""Less than all chains are, and than is stored meanwhile: the S3 server answers slowly."""


@pytest.fixture(scope="module", params=SHARED, ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest) -> Iterator[SharedStore]:
    made = partial(request.param, limit_bytes=STORE_BYTES[request.param.name])
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(made, Path(name)) as one:
        yield one


@pytest.fixture(scope="module")
def servers(store: SharedStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    armed = tmp_path_factory.mktemp("steps") / "armed"
    with ExitStack() as all_of_them:
        made: list[ServerProcess] = [
            all_of_them.enter_context(SteppedServer(
                armed, store.environment, pool_bytes=POOL_BYTES, segment_bytes=POOL_BYTES, tier_asks=1, heartbeat_s=0.1,
                **store.settings,
            ))
            for _ in range(SERVERS)
        ]
        for one in made:
            has_state(one.unix, "open")
        yield made


@pytest.fixture
def tier(store: SharedStore) -> Iterator[Tier]:
    """As one more server has it."""
    one = store.open()
    yield one
    one.close(patient())


class Worker:
    """An engine that does one thing after another; what it hits has to be right."""

    def __init__(self, server: ServerProcess, number: int, chains: list[list[bytes]]) -> None:
        self._server, self._number, self._chains = server, number, chains
        self._engine, self._random = TierEngine(server.unix, OF, f"random-{number}"), random.Random(f"{SEED}/{number}")
        self.namespace = self._engine.attachment.namespace

    def run(self, ended: threading.Event) -> None:
        for step in itertools.count():
            if ended.is_set():
                return
            chain = self._random.choice(self._chains)
            keys, what = chain[: self._random.randint(1, CHUNKS)], self._random.random()
            if what < 0.4:
                self._engine.store(keys)
            elif what < 0.95:
                found = self._engine.awaited(keys, f"{self._number}-{step}", 5.0)
                self._engine.read(keys, found)
                if found.lease is not None:
                    self._engine.release(found)
            else:
                with Client(self._server.unix) as client:  # of all that nobody holds now
                    client.evict(EvictChunks(free_bytes=client.status().pool.limit_bytes))

    def close(self) -> None:
        self._engine.close()


def names_of(tier: Tier, namespace: bytes, keys: list[bytes]) -> list[PartName]:
    def note() -> Note | None:
        return tier.notes([namespace], patient())[0]

    eventually(lambda: note() is not None, 30.0)
    noted = note()
    assert noted is not None
    return [noted.name(namespace, key, 0, ALL_WRITERS) for key in keys]


def harm(tier: Tier, store: SharedStore, namespace: bytes, keys: list[bytes], ended: threading.Event) -> None:
    """Deletes, as another server does, and damages what is there; by the note that the store has now, which it may
    evict as well."""
    chance = random.Random(f"{SEED}/harm")
    while not ended.wait(0.005):
        (note,) = tier.notes([namespace], patient())
        if note is None:
            continue
        name = note.name(namespace, chance.choice(keys), 0, ALL_WRITERS)
        if chance.random() < 0.3:
            tier.delete([name], patient())
        else:
            store.damage(name)


def counted(servers: list[ServerProcess], name: str) -> list[int]:
    """By each server's mover, half a second ago."""
    found = []
    for server in servers:
        with Client(server.unix) as client:
            found.append(sum(one.counters[name] for one in client.status().tiers))
    return found


@pytest.mark.sweep("store")
def test_every_hit_is_what_was_stored_and_every_server_works_on(
    servers: list[ServerProcess], store: SharedStore, tier: Tier
) -> None:
    chance = random.Random(SEED)
    chains = [[chance.randbytes(32) for _ in range(CHUNKS)] for _ in range(CHAINS[store.name])]
    workers = [Worker(servers[number % SERVERS], number, chains) for number in range(SERVERS * ENGINES)]
    namespace, all_keys = workers[0].namespace, [key for chain in chains for key in chain]
    ended = threading.Event()
    def has_seen_all() -> bool:
        is_full = sum(counted(servers, "stored_bytes")) > STORE_BYTES[store.name]
        return is_full and all(counted(servers, "load_done")) and sum(counted(servers, "damaged")) > 0

    with ThreadPoolExecutor(len(workers) + 1) as threads:
        working = [threads.submit(worker.run, ended) for worker in workers]
        working.append(threads.submit(harm, tier, store, namespace, all_keys, ended))
        try:
            ended.wait(SECONDS)
            eventually(lambda: has_seen_all() or any(work.done() for work in working), 90.0)
        finally:
            ended.set()
        for work in working:
            work.result()
    for worker in workers:
        worker.close()

    make_room(tier, namespace, all_keys)
    for server in servers:
        assert server.process.poll() is None and "Traceback" not in server.log_text(), server.log_text()[-3000:]
        has_state(server.unix, "open")
    for number, server in enumerate(servers):
        engine = TierEngine(server.unix, OF, f"after-{number}")
        status = engine.client.status()
        assert status.mover is not None and status.mover.restarts == 0
        keys = engine.chain(CHUNKS)
        engine.store(keys)
        is_stored(tier, engine, keys)
        engine.close()
        for other in servers:
            is_hit(other, engine, keys)


def make_room(tier: Tier, namespace: bytes, keys: list[bytes]) -> None:
    """Also of what was stored by a note that the store has evicted."""
    tier.delete(names_of(tier, namespace, keys), patient())
    if isinstance(tier, Sweeps):
        (note,) = tier.notes([namespace], patient())
        assert note is not None
        eventually(lambda: tier.sweep(namespace, note, patient()) == 0, 30.0)


def is_stored(tier: Tier, by: TierEngine, keys: list[bytes]) -> None:
    names = names_of(tier, by.attachment.namespace, keys)
    eventually(lambda: all(tier.exists(names, patient())), 30.0)


def is_hit(server: ServerProcess, by: TierEngine, keys: list[bytes]) -> None:
    """From the store alone."""
    clear_pool(server.unix)
    reader = TierEngine(server.unix, OF, "reader")
    found = reader.awaited(keys)
    assert found.hit_tokens == len(keys) * CHUNK_TOKENS
    reader.read(keys, found)
    reader.release(found)
    reader.close()


@pytest.mark.sweep("store")
def test_a_server_whose_part_another_one_has_deleted_sees_a_miss(
    servers: list[ServerProcess], store: SharedStore, tier: Tier
) -> None:
    one, other = (TierEngine(server.unix, OF, "deletes") for server in servers[:2])
    keys = one.chain(4)
    one.store(keys)
    is_stored(tier, one, keys)
    is_hit(servers[1], one, keys)
    bundle = names_of(tier, one.attachment.namespace, keys)[1]
    store.damage(bundle)
    damaged = replace(bundle, writer=WRITERS - 1)
    for engine, server in ((one, servers[0]), (other, servers[1])):
        clear_pool(server.unix)
        found = engine.awaited(keys, "misses")
        assert found.hit_tokens == CHUNK_TOKENS
        engine.read(keys, found)
        engine.release(found)
    assert [f"{damaged.text()} is damaged" in server.log_text() for server in servers] == [True, False, False]
    clear_pool(servers[1].unix)
    other.store(keys)
    is_stored(tier, one, keys)
    is_hit(servers[0], other, keys)
    one.close()
    other.close()
