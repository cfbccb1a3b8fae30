"""Whole attacks of a user of the machine, over TCP and without a token, on a server that an engine uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from api_helpers import NOBODYS, Engine, ServerProcess, attach, keys, raw

from kvdock.client.client import Client
from kvdock.protocol.schemas import Lookup

pytestmark = pytest.mark.security

PROMPT = list(range(1000, 1064))


@pytest.fixture
def victim(client: Client) -> Iterator[Engine]:
    attached = attach(client, label="victim", cache_salt="a-salt", hash_seed="a-seed")
    yield attached
    client.leave(attached.session, attached.member)
    attached.close()


def nobodys(server: ServerProcess, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    """One call without a token over TCP."""
    sent = None if body is None else msgspec.json.encode(body)
    status, _, content = raw(server.http, method, path, sent, {**NOBODYS, "Content-Type": "application/json"})
    return status, json.loads(content)


def test_nobody_stores_zeros_in_another_engines_name(server: ServerProcess, victim: Engine) -> None:
    """Even with ids that it could not have read: they are no proof over TCP."""
    for session in (victim.session, victim.listed):
        body = {"session": session, "member": victim.member, "store": "poison", "tokens": PROMPT}
        assert nobodys(server, "POST", "/v1/reservations", body)[0] == 401
    granted = victim.reserve(keys(1, "under way"))
    parts: dict[str, Any] = {"session": victim.session, "rank": 0, "parts": [[0, 0, "1cb23b2f069b1082"]]}
    for verb, sent in (("commit", parts), ("abort", {"session": victim.session})):
        assert nobodys(server, "POST", f"/v1/reservations/{granted.reservation}/{verb}", sent)[0] == 401
    assert victim.client.lookup(Lookup(namespace=victim.attached.namespace, tokens=PROMPT)).hit_tokens == 0
    assert victim.commit(granted).ready == 1, "its own commit still counts"


def test_nobody_takes_the_cache_the_session_or_the_settings_away(server: ServerProcess, victim: Engine) -> None:
    victim.store(keys(2, "mine"))
    for method, path, body in (
        ("POST", "/v1/cache/clear", {}), ("POST", "/v1/cache/evict", {"free_bytes": 1 << 20}),
        ("PATCH", "/v1/config", {"session_grants": 1}),
        ("DELETE", f"/v1/sessions/{victim.session}", None),
        ("POST", f"/v1/sessions/{victim.session}/heartbeat", {"member": victim.member}),
        ("POST", "/v1/chunks/delete", {"namespace": victim.attached.namespace, "keys": keys(2, "mine")}),
    ):
        assert nobodys(server, method, path, body)[0] == 401, path
    assert victim.lookup(keys(2, "mine"), request="after").hit_tokens == 32


def test_nobody_reads_who_is_there_or_what_a_prompt_has_stored(server: ServerProcess, victim: Engine) -> None:
    namespace = victim.attached.namespace
    answers = [
        nobodys(server, "GET", f"/v1/{name}")
        for name in ("sessions", "namespaces", "segments", "leases", "requests", "config", f"sessions/{victim.listed}")
    ]
    answers.append(nobodys(server, "POST", "/v1/lookups", {"namespace": namespace, "tokens": PROMPT}))
    assert {status for status, _ in answers} == {401}
    shown = str(answers) + str(nobodys(server, "GET", "/v1/status")) + str(nobodys(server, "GET", "/v1/stats"))
    shown += raw(server.http, "GET", "/metrics", None, NOBODYS)[2].decode()
    for secret in ("victim", victim.body.instance, victim.member, namespace, "a-salt", "a-seed", victim.session):
        assert secret not in shown
