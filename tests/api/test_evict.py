"""`POST /v1/cache/evict`: so much is free afterwards, what is worth least went, and nobody lost what they hold."""

from __future__ import annotations

import pytest
from admin_helpers import hit_tokens, ok, refused
from api_helpers import MIB, NOBODYS, ServerProcess, attach, eventually, keys, raw

from kvdock.client.client import Client

CHUNK_BYTES = 16384
JSON = {"Content-Type": "application/json"}


def free_bytes(server: ServerProcess) -> int:
    return int(ok(server.http, "GET", "/v1/status")["pool"]["free_bytes"])


def test_evict_frees_what_is_missing_and_takes_the_oldest_first() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        chains = [keys(8, f"evict {number}") for number in range(4)]
        for chain in chains:
            engine.store(chain)
        wanted = free_bytes(server) + 12 * CHUNK_BYTES
        done = ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": wanted})
        assert done == {"chunks": 12, "bytes": 12 * CHUNK_BYTES, "free_bytes": wanted} and free_bytes(server) == wanted
        assert [hit_tokens(engine, chain) // 16 for chain in chains] == [0, 4, 8, 8]
        again = ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": wanted})
        assert again == {"chunks": 0, "bytes": 0, "free_bytes": wanted}
        assert ok(server.http, "GET", "/v1/status")["counters"]["evicted_chunks"] == 12
        engine.close()


def test_what_the_pool_may_grow_by_is_free() -> None:
    with ServerProcess(pool_bytes=32 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(8, "grows")
        engine.store(chain)
        done = ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": 24 * MIB})
        assert (done["chunks"], done["free_bytes"]) == (0, free_bytes(server) + 16 * MIB)
        wanted = done["free_bytes"] + CHUNK_BYTES
        assert ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": wanted}) == {
            "chunks": 1, "bytes": CHUNK_BYTES, "free_bytes": wanted
        }
        assert hit_tokens(engine, chain) == 7 * 16
        engine.close()


def test_evict_leaves_what_is_held_written_or_pinned() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        leased, pinned, other = (keys(3, seed) for seed in ("leased", "pinned", "other"))
        for chain in (leased, pinned, other):
            engine.store(chain)
        lease = engine.lookup(leased).lease
        coming = engine.reserve(keys(2, "coming"))
        body = {"namespace": engine.attached.namespace, "keys": pinned[1:2], "duration_s": 600}
        assert ok(server.http, "POST", "/v1/pins", body) == {"chunks": 1}
        done = ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": 16 * MIB})
        assert done["chunks"] == 4 and done["free_bytes"] == free_bytes(server) < 16 * MIB
        assert [hit_tokens(engine, chain) // 16 for chain in (leased, pinned, other)] == [3, 2, 0]
        assert client.status().pool.held_bytes == (3 + 2) * CHUNK_BYTES
        assert engine.commit(coming).ready == 2 and engine.release(lease, 0) == []
        ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": 16 * MIB})
        assert hit_tokens(engine, leased) == 0
        engine.close()


@pytest.mark.parametrize(("wanted", "code"), [(0, "invalid_body"), (16 * MIB + 1, "bad_argument")])
def test_evict_refuses_what_the_pool_cannot_have(server: ServerProcess, wanted: int, code: str) -> None:
    problem = refused(server.http, "POST", "/v1/cache/evict", {"free_bytes": wanted})
    assert problem["code"] == code and problem["detail"]


def test_evict_needs_an_operator_and_is_logged(server: ServerProcess) -> None:
    status, _, _ = raw(server.http, "POST", "/v1/cache/evict", b'{"free_bytes": 1}', {**JSON, **NOBODYS})
    assert status == 401
    ok(server.http, "POST", "/v1/cache/evict", {"free_bytes": 1})
    eventually(lambda: "token operator: POST /v1/cache/evict '{\"free_bytes\":1}'" in server.log_text())
