"""Codes that only an unusual server or an unlucky client meets, and that no code goes without a test."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from pathlib import Path

import httpx
import pytest
from admin_helpers import call, refused
from api_helpers import ServerProcess, attach, eventually, keys, small_pool, unique
from paths import ROOT
from starlette.types import Receive, Scope, Send

from kvdock._core import MAX_SESSION_MEMBERS, TableError
from kvdock.api.access.access_file import AccessFile
from kvdock.api.access.peer import of_user
from kvdock.api.build import build, create_app
from kvdock.api.clock import Clocks
from kvdock.api.http import wire
from kvdock.api.pool.pool import open_pool
from kvdock.api.reports.degraded import STARTING
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol.errors import CODES, ApiError


def test_a_member_that_died_hears_so() -> None:
    with ServerProcess(settle_s=60.0) as server, Client(server.unix) as client:
        scheduler = attach(client)
        worker = attach(client, instance=scheduler.body.instance, ranks=[1], scheduler=False)
        worker.close()

        def answered() -> bool:
            body = {"member": worker.member}
            _, answer = call(server.http, "POST", f"/v1/sessions/{worker.session}/heartbeat", body)
            return bool(answer.get("code") == "member_dead")

        eventually(answered)
        body = {"session": worker.session, "member": worker.member, "request": "r", "keys": keys(1)}
        assert refused(server.http, "POST", "/v1/lookups", body)["code"] == "member_dead"
        scheduler.leave()


@pytest.mark.security
def test_a_member_that_died_is_forgotten_once_it_has_settled(server: ServerProcess, client: Client) -> None:
    """An engine whose processes die one after the other does not fill the server's lists."""
    scheduler = attach(client)

    def attached_and_died() -> bool:
        """Another process may have the id once the server has forgotten the one that had it."""
        try:
            attach(client, instance=scheduler.body.instance, ranks=[1], scheduler=False, member="worker").close()
        except ApiError as error:
            assert error.code in ("id_reused", "member_dead")
            return False
        return True

    for _ in range(3):
        eventually(attached_and_died)
    scheduler.leave()


@pytest.mark.security
def test_a_session_with_as_many_members_as_it_may_have_gets_no_more(server: ServerProcess, client: Client) -> None:
    scheduler = attach(client)
    workers = [
        attach(client, instance=scheduler.body.instance, ranks=[], scheduler=False)
        for _ in range(MAX_SESSION_MEMBERS - 1)
    ]
    with pytest.raises(ApiError, match="as many members as it may have") as refused_one:
        attach(client, instance=scheduler.body.instance, ranks=[], scheduler=False)
    problem = refused_one.value
    assert (problem.code, problem.found, problem.wanted) == ("quota_exceeded", 256, "< 256")
    workers.pop().leave()
    workers.append(attach(client, instance=scheduler.body.instance, ranks=[], scheduler=False))
    for engine in (*workers, scheduler):
        engine.leave()


def test_a_plan_that_a_rank_has_seen_cannot_be_cancelled(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    chain = keys(1, unique("cancel"))
    engine.store(chain)
    lease = engine.lookup(chain, request=unique("r"), readers=2).lease
    engine.release(lease, 0)
    path = f"/v1/leases/{lease}?session={engine.session}&member={engine.member}"
    assert refused(server.http, "DELETE", path)["code"] == "handed_out"
    engine.leave()


def test_a_table_without_space_for_another_grant_says_so() -> None:
    with ServerProcess(table_grants=16) as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(1, "full")
        engine.store(chain)
        codes = []
        for number in range(20):
            body = {"session": engine.session, "member": engine.member, "request": f"r{number}", "keys": chain}
            codes.append(call(server.http, "POST", "/v1/lookups", body)[1].get("code"))
        assert set(codes) == {None, "table_full"} and codes[0] is None and codes[-1] == "table_full"
        engine.close()


def test_before_the_first_segment_nobody_attaches_and_probes_say_why(tmp_path: Path) -> None:
    """The app over a pool that has not grown yet."""
    settings = Settings.load(small_pool(socket_path=str(tmp_path / "s.sock")))
    pool = open_pool(settings, random.Random(time.time_ns()).getrandbits)
    parts = build(settings, pool, AccessFile(""), Clocks())

    async def story() -> None:
        app = create_app(settings, parts)

        async def own(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": {"peer": of_user(os.geteuid()), "connection": lambda: None}}, receive, send)

        transport = httpx.ASGITransport(own)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {
                "instance": "i", "member": {"id": "m", "lock_offset": 1},
                "manifest": {"model": "m", "kv_dtype": "f", "layers": 1, "kv_heads": 1, "head_size": 1,
                             "chunk_tokens": 1, "block_tokens": 1, "groups": [{"part_bytes": 1}]},
            }
            refusal = (await client.post("/v1/sessions", json=body)).json()
            assert (refusal["code"], refusal["status"]) == ("not_ready", 503)
            for path in ("/startupz", "/readyz", "/healthz"):
                answer = await client.get(path)
                assert (answer.status_code, answer.json()["reasons"]) == (503, [STARTING]), path
            assert (await client.get("/livez")).status_code == 200
            await pool.grow_first()
            for path in ("/startupz", "/readyz", "/healthz"):
                assert (await client.get(path)).status_code == 200, path

    try:
        asyncio.run(story())
    finally:
        pool.close()


def test_a_damaged_table_is_the_servers_fault() -> None:
    error = TableError("two owners of one slot")
    error.code, error.found, error.wanted = "corrupt", 2, 1
    problem = wire.refusal(error, "/v1/lookups")
    assert (problem.code, problem.status, problem.found, problem.wanted) == ("corrupt", 500, 2, 1)


@pytest.mark.parametrize("code", CODES)
def test_no_code_goes_without_a_test(code: str) -> None:
    tests = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert any(re.search(rf'"{code}"', text) for text in tests), f"no test expects {code}"
