"""`GET /v1/curve` of real servers: what counts, who sees it, and when it begins anew."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import ok
from api_helpers import NOBODYS, ServerProcess, access_file, attach, keys, manifest, raw, small_pool, unique

from kvdock.api.access.access_file import entry
from kvdock.api.access.peer import of_user
from kvdock.api.pool.kept_object import KeptObject
from kvdock.api.pool.pool import open_pool
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.record.curve import Curves
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol import schemas as s

A, B, READER = "token-of-a-" + "a" * 32, "token-of-b-" + "b" * 32, "reader-of-b-" + "r" * 32
GROUPS = (s.Group(part_bytes=4096),)
CHUNKS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = [
        entry("team-a", A, ["engine"], "a"), entry("team-b", B, ["engine"], "b"),
        entry("reader-b", READER, ["read"], "b"),
    ]
    folder = tmp_path_factory.mktemp("curve")
    with ServerProcess(access_file=str(access_file(folder, *tokens))) as running:
        yield running


def asked(server: ServerProcess, token: str, prompts: Sequence[str], *, times: int = 1) -> str:
    """An engine looks up each of the prompts and stores it, then asks the same again. Returns its namespace."""
    with Client(server.unix, access_token=token) as client, closing(
        attach(client, groups=GROUPS, cache_salt=unique("salt"))
    ) as engine:
        for turn in range(times):
            for prompt in prompts:
                chain = keys(CHUNKS, prompt)
                found = engine.lookup(chain, f"{prompt}-{turn}")
                if found.lease:
                    engine.release(found.lease, 0)
                else:
                    engine.store(chain)
        return engine.attached.namespace


def curve_for(server: ServerProcess, token: str | None = None) -> dict[str, Any]:
    headers = None if token is None else {"Authorization": f"Bearer {token}"}
    status, _, content = raw(server.http, "GET", "/v1/curve", None, headers)
    assert status == 200, content
    found: dict[str, Any] = json.loads(content)
    return found


def test_it_says_what_a_pool_would_find(server: ServerProcess) -> None:
    prompts = [unique(str(number)) for number in range(20)]
    namespace = asked(server, A, prompts, times=3)
    with Client(server.unix, access_token=A) as client:
        curve = client.curve()
    mine = next(one for one in curve.namespaces if one.namespace == namespace)
    assert (mine.tenant, mine.lookups, mine.sampled_chunks) == ("a", 60, 60 * CHUNKS)
    assert mine.tokens == 60 * CHUNKS * mine.chunk_tokens
    assert mine.hit_share == pytest.approx(2 / 3)
    assert [point.factor for point in mine.points] == [0.25, 0.5, 1, 2, 4, 8, None]
    assert [point.hit_share for point in mine.points] == pytest.approx([2 / 3] * 7)
    assert mine.points[2].pool_bytes == curve.pool_bytes and mine.points[-1].pool_bytes is None
    assert curve.covers_s > 0 and curve.sampled_share == 1 and curve.eviction == "adaptive"


def test_a_small_pool_finds_less_than_a_large_one_would() -> None:
    """A pool of 255 chunks, asked for 400 by turns."""
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20, eviction="lru") as small:
        with Client(small.unix) as client, closing(attach(client, groups=GROUPS)) as engine:
            for turn in range(4):
                for prompt in range(20):
                    found = engine.lookup(keys(CHUNKS, str(prompt)), f"{turn}-{prompt}")
                    assert found.hit_tokens == 0, "the pool has let it go"
                    engine.store(keys(CHUNKS, str(prompt)))
            curve = client.curve()
        shares = {point.factor: point.hit_share for point in curve.total.points}
        assert curve.total.hit_share == 0
        assert shares == pytest.approx({0.25: 0, 0.5: 0, 1: 0, 2: 0.75, 4: 0.75, 8: 0.75, None: 0.75})


def test_a_repeated_lookup_counts_once_and_a_store_alone_never(server: ServerProcess) -> None:
    with Client(server.unix, access_token=A) as client, closing(
        attach(client, groups=GROUPS, cache_salt=unique("salt"))
    ) as engine:
        chain = keys(CHUNKS, unique("prompt"))
        for _ in range(3):
            engine.lookup(chain, "again")
        engine.store(keys(CHUNKS, unique("prompt")))
        mine = next(one for one in client.curve().namespaces if one.namespace == engine.attached.namespace)
        assert (mine.lookups, mine.sampled_chunks) == (1, CHUNKS)
        assert mine.points == [], "twenty chunks say nothing"
        engine.lookup(chain, "again", epoch=1)
        mine = next(one for one in client.curve().namespaces if one.namespace == engine.attached.namespace)
        assert mine.lookups == 2


def test_a_tenant_sees_its_own_and_an_operator_sees_all(server: ServerProcess) -> None:
    of_a, of_b = asked(server, A, [unique("prompt")]), asked(server, B, [unique("prompt")])
    for token, mine, other in ((A, of_a, of_b), (READER, of_b, of_a)):
        seen = curve_for(server, token)
        names = {one["namespace"] for one in seen["namespaces"]}
        assert mine in names and other not in names
        assert len(seen["tenants"]) == 1
        assert seen["total"]["tokens"] == seen["tenants"][0]["tokens"]
        assert seen["total"]["tokens"] == sum(one["tokens"] for one in seen["namespaces"])
    everything = curve_for(server)
    assert {of_a, of_b} <= {one["namespace"] for one in everything["namespaces"]}
    assert {one["tenant"] for one in everything["tenants"]} >= {"a", "b"}
    assert everything["total"]["tokens"] == sum(one["tokens"] for one in everything["tenants"])


def test_who_may_not_read_is_refused(server: ServerProcess) -> None:
    assert raw(server.http, "GET", "/v1/curve", None, NOBODYS)[0] == 401


def test_it_begins_anew_with_another_size_or_policy(server: ServerProcess) -> None:
    for change in ({"eviction": "lru"}, {"pool_bytes": 32 << 20}, {"eviction": "adaptive"}):
        asked(server, A, [unique("prompt")])
        assert curve_for(server)["total"]["lookups"] > 0
        changed = ok(server.http, "PATCH", "/v1/config", change)["limits"]
        assert curve_for(server)["total"]["lookups"] == 0
        asked(server, A, [unique("prompt")])
        curve = curve_for(server)
        assert curve["total"]["lookups"] == 1
        assert (curve["eviction"], curve["pool_bytes"]) == (changed["eviction"], changed["pool_bytes"])
    ok(server.http, "PATCH", "/v1/config", {"session_cap": 0.4})
    asked(server, A, [unique("prompt")])
    assert curve_for(server)["total"]["lookups"] == 2


def test_a_curve_follows_what_engines_do_now(tmp_path: Path) -> None:
    """Hours pass on a clock that the test sets: half counts after each half-life."""
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s")))
    pool, now_s = open_pool(settings, secrets.randbits), [1000.0]
    try:
        curves = Curves(pool, lambda: now_s[0], lambda: now_s[0])
        space = NamespaceRecord(0, bytes(32), manifest(), "")
        peer = of_user(os.geteuid())
        for _ in range(64):
            curves.looked_up(space, bytes.fromhex("".join(keys(4, "old"))), 0)
        for hours, lookups in ((6, 32), (12, 8), (90 * 24, 0)):
            now_s[0] += 3600 * hours
            assert asyncio.run(curves.total(peer)).lookups == lookups
            assert asyncio.run(curves.view(peer)).half_life_s == 6 * 3600
    finally:
        pool.close()


def test_the_next_server_of_a_pool_goes_on_with_its_curve() -> None:
    """It names what the first one counted, though no engine is attached to it."""
    with ServerProcess(**small_pool(on_exit="keep")) as server:
        with Client(server.unix) as client:
            engine = attach(client)
            for number in range(130):
                engine.lookup(keys(4, f"prompt {number % 26}"), f"request {number}")
        before = ok(server.http, "GET", "/v1/curve")
        assert before["total"]["lookups"] == 130 and before["total"]["points"]
        server.stop(signal.SIGTERM)
        with ServerProcess(**server.settings) as second:
            after = ok(second.http, "GET", "/v1/curve")
            for part in ("total", "namespaces", "tenants"):
                assert after[part] == before[part]
            assert before["covers_s"] < after["covers_s"] < before["covers_s"] + 60


async def nothing_waits() -> None: ...


def test_a_curve_that_was_kept_ages_while_no_server_runs(tmp_path: Path) -> None:
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s")))
    pool, now_s, boot_s = open_pool(settings, secrets.randbits), [1000.0], [5000.0]
    kept = KeptObject(tmp_path / "kvdock-curve", "the curve")
    try:
        def server() -> Curves:
            return Curves(pool, lambda: now_s[0], lambda: boot_s[0], kept)

        first, space = server(), NamespaceRecord(0, bytes(32), manifest(), "")
        for _ in range(64):
            first.looked_up(space, bytes.fromhex("".join(keys(4, "old"))), 0)
        asyncio.run(first.keep_when_due(nothing_waits))
        assert not kept.read(), "not yet due"
        now_s[0] += 60
        asyncio.run(first.keep_when_due(nothing_waits))
        head, simulated = first._content()
        assert head + simulated == kept.read() and simulated == first._simulated.keep(), "a megabyte is not copied"
        peer = of_user(os.geteuid())
        now_s[0], boot_s[0] = 3.0, 5000.0 + 6 * 3600
        assert asyncio.run(server().total(peer)).lookups == 32
        assert asyncio.run(server().view(peer)).covers_s == 60 + 6 * 3600
        boot_s[0] = 1.0  # it cannot be earlier, so nobody knows how long the curve was away
        assert asyncio.run(server().total(peer)).lookups == 64
        kept.write(b"\x00" + kept.read())
        assert asyncio.run(server().total(peer)).lookups == 0
    finally:
        pool.close()
