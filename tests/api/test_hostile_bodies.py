"""Bodies that are legal JSON and too much, or that would speak for somebody else, are refused, and leave no trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from api_helpers import Engine, ServerProcess, attach, eventually, keys, post, unique
from server_fixtures import attached_engine

from kvdock.client.client import Client
from kvdock.protocol.wire_types import MAX_ANSWERS, MAX_GROUPS, MAX_RANKS

pytestmark = pytest.mark.security

engine = attached_engine()


def attach_body(engine: Engine, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(engine.body)
    for path, value in changes.items():
        at, *more = path.split("__")
        if more:
            body[at][more[0]] = value
        else:
            body[at] = value
    return body


@pytest.mark.parametrize("where", [
    "label", "manifest__revision", "manifest__adapter", "manifest__token_order", "manifest__hash_function",
    "manifest__hash_seed", "manifest__cache_salt", "manifest__model", "instance", "member__id",
])
def test_a_string_without_end_is_refused(where: str, engine: Engine) -> None:
    before = len(engine.client.sessions().sessions)
    body = attach_body(engine, **{"instance": unique("i"), "member__id": unique("m"), where: "x" * 1025})
    status, problem = post(engine.client.address, "/v1/sessions", body)
    assert (status, problem["code"]) == (422, "invalid_body"), problem
    assert len(engine.client.sessions().sessions) == before


@pytest.mark.parametrize(("path", "field", "longest", "item"), [
    ("/v1/sessions/{session}/heartbeat", "done", MAX_ANSWERS, {"grant": "0" * 16, "ranks": []}),
    ("/v1/sessions/{session}/heartbeat", "keep", MAX_ANSWERS, "0" * 16),
    ("/v1/leases/0000000000000001/release", "ranks", MAX_RANKS, 0),
    ("/v1/reservations/0000000000000001/abort", "ranks", MAX_RANKS, 0),
    ("/v1/reservations", "groups", MAX_GROUPS, 0),
    ("/v1/releases", "releases", 256, ["0" * 16, []]),
    ("/v1/releases", "releases", 1, ["0" * 16, [0] * (MAX_RANKS + 1)]),
])
def test_a_list_without_end_is_refused(path: str, field: str, longest: int, item: object, engine: Engine) -> None:
    body: dict[str, Any] = {"session": engine.session, field: [item] * (longest + 1)}
    if "heartbeat" in path:
        body = {"member": engine.member, field: body[field]}
    if path == "/v1/reservations":
        body |= {"member": engine.member, "store": "s", "keys": keys(1)}
    status, problem = post(engine.client.address, path.format(session=engine.session), body)
    assert (status, problem["code"]) == (422, "invalid_body"), problem


def test_no_answer_names_a_members_lock(engine: Engine) -> None:
    """Whoever knows the byte could attach in the member's name."""
    secret = str(engine.liveness.offset)
    for wrong in (1, engine.liveness.offset + 1):
        status, problem = post(engine.client.address, "/v1/sessions", attach_body(engine, member__lock_offset=wrong))
        assert (status, problem["code"]) == (409, "id_reused")
        assert secret not in str(problem)
    shown = engine.client.session(engine.session), engine.client.sessions(), engine.client.status()
    assert secret not in str(shown)


def test_one_byte_of_the_lock_file_proves_one_members_life(engine: Engine) -> None:
    thief = attach_body(engine, instance=unique("thief"), member__id=unique("thief"))
    status, problem = post(engine.client.address, "/v1/sessions", thief)
    assert (status, problem["code"]) == (409, "lock_not_visible"), problem
    assert str(engine.liveness.offset) not in str(problem)
    status, _ = post(engine.client.address, "/v1/sessions", attach_body(engine))
    assert status == 200, "the member itself may come back"


def test_a_byte_is_free_again_once_its_member_has_left(client: Client) -> None:
    first = attach(client)
    client.leave(first.session, first.member)
    other = attach_body(first, instance=unique("next"), member__id=unique("next"))
    status, attached = post(client.address, "/v1/sessions", other)
    assert status == 200
    client.leave(attached["session"], attached["member"])
    first.close()


def test_a_thousand_adapters_one_after_the_other_leave_no_trace(server: ServerProcess, client: Client) -> None:
    engine = attach(client, model=unique("stays"))
    engine.store(keys(2, "stays"))
    client.leave(engine.session, engine.member)
    for number in range(1100):
        body = attach_body(engine, manifest__adapter=f"adapter-{number}", instance=unique("i"), member__id=unique("m"))
        status, attached = post(client.address, "/v1/sessions", body)
        assert status == 200, attached
        client.leave(attached["session"], attached["member"])
    eventually(lambda: [space.manifest.adapter for space in client.namespaces().namespaces
                        if space.manifest.model == engine.body.manifest.model] == [""])
    engine.close()
