"""Fuzzes the whole OpenAPI document: no input leads to a 5xx, and every answer is as the document describes.

schemathesis makes requests from the document: valid ones, and ones that break it in one place. Half of them
name a real session, member, lease or namespace, so that they get past the first check. Half are the operator's, others
a tenant's or nobody's. KVDOCK_FUZZ_SEED chooses the seed, which is printed; 0 draws one.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from admin_helpers import CALLS, ROUTES, ok
from api_helpers import OPERATOR, Engine, ServerProcess, access_file, attach, keys
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from bench.floods.honest import most_memory_mib
from kvdock.api.access.access_file import entry
from kvdock.client.client import Client

pytestmark = pytest.mark.security

SEED = int(os.environ.pop("KVDOCK_FUZZ_SEED", "20261121")) or random.SystemRandom().getrandbits(32)
EXAMPLES, SWEPT = 5, 15
"""How many valid and how many broken examples of each call, without and with --sweeps."""
CALLERS = {"operator": OPERATOR, "tenant": "tenant-" + "a" * 40, "nobody": ""}
"""Their access tokens."""
MOST_GROWTH_MIB = 64
_numbers = itertools.count()
OPEN = {(route.method, route.path) for route in ROUTES if route.scope == "health"}
"""What is answered without a token."""


@schemathesis.check
def takes_what_the_document_describes(context: Any, response: Any, case: Any) -> None:
    """Ids and combinations may be wrong in a body that fits its schema, but no field has a wrong type."""
    if case.meta.generation.mode is GenerationMode.POSITIVE and response.status_code == 422:
        problem = response.json()
        assert problem["code"] != "invalid_body" or not problem["wanted"].startswith("Expected `"), problem


HELD = (takes_what_the_document_describes, schemathesis.checks.not_a_server_error, checks.response_schema_conformance,
        checks.content_type_conformance, checks.status_code_conformance)


def without_fractions(value: Any) -> Any:
    """88.0 is an integer for JSON Schema; the document says that integers are written without a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: without_fractions(item) for name, item in value.items()}
    return [without_fractions(item) for item in value] if isinstance(value, list) else value


@schemathesis.serializer("application/msgpack")
def pack(context: Any, value: Any) -> bytes:
    if isinstance(value, dict) and isinstance(value.get("keys"), str):
        value = {**value, "keys": value["keys"].encode()}  # a bin; in JSON it is base64
    if isinstance(value, dict) and isinstance(value.get("blocks"), list):
        blocks = [
            [*one[:2], one[2].encode()] if isinstance(one, list) and len(one) == 3 and isinstance(one[2], str) else one
            for one in value["blocks"]
        ]
        value = {**value, "blocks": blocks}
    return msgspec.msgpack.encode(within_64_bits(value))


def within_64_bits(value: Any) -> Any:
    """MessagePack has no larger integers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(-(1 << 63), min(value, (1 << 64) - 1))
    if isinstance(value, dict):
        return {name: within_64_bits(item) for name, item in value.items()}
    return [within_64_bits(item) for item in value] if isinstance(value, list) else value


@schemathesis.deserializer("application/msgpack")
def unpack(context: Any, response: Any) -> Any:
    return msgspec.msgpack.decode(response.content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tenant = entry("tenant", CALLERS["tenant"], ["engine"], "a")
    with ServerProcess(access_file=str(access_file(tmp_path_factory.mktemp("access"), tenant))) as running:
        yield running


@pytest.fixture(scope="module")
def world(server: ServerProcess) -> Iterator[dict[str, Any]]:
    """Real ids, by the names that paths and bodies use."""
    with Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(8, "fuzz"))
        schema = schemathesis.openapi.from_url(f"{server.http}/openapi.json")
        limits = ok(server.http, "GET", "/v1/config")["limits"]
        began_mib = most_memory_mib(server.process.pid)
        yield {"server": server, "engine": engine, "schema": schema, "limits": limits, "began_mib": began_mib}
        engine.close()


def real_ids(engine: Engine) -> dict[str, Any]:
    """Fresh ones: a call before may have ended the session's grants, or the session."""
    engine.attached = engine.client.attach(engine.body)
    engine.heartbeat()
    number = f"fuzz {next(_numbers)}"
    lease = engine.lookup(keys(8, "fuzz"), request=number).lease
    granted = engine.reserve(keys(1, number), store=number)
    return {
        "session": engine.session, "member": engine.member, "namespace": engine.attached.namespace,
        "lease": lease or "0" * 16, "grant": lease or "0" * 16, "reservation": granted.reservation or "0" * 16,
        "lock_offset": engine.liveness.offset,
    }


def with_real_ids(value: Any, ids: dict[str, Any]) -> Any:
    """A copy of a JSON value in which every field that names an id names a real one."""
    if isinstance(value, dict):
        return {
            name: ids[name] if name in ids and isinstance(item, str | int) else with_real_ids(item, ids)
            for name, item in value.items()
        }
    return [with_real_ids(item, ids) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), CALLS, ids=lambda value: str(value))
def test_whatever_is_sent_the_answer_is_one_of_the_document_and_no_5xx(
    world: dict[str, Any], sweeps: bool, method: str, path: str, mode: GenerationMode
) -> None:
    print(f"KVDOCK_FUZZ_SEED={SEED}")
    operation = world["schema"][path][method]
    server, engine = world["server"], world["engine"]
    session = requests.Session()

    @seed(SEED)
    @settings(
        max_examples=SWEPT if sweeps else EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        print_blob=False, suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode), real=st.booleans(),
        caller=st.sampled_from(["operator", "operator", "tenant", "nobody"]),
    )
    def fuzz(case: Any, real: bool, caller: str) -> None:
        if real:
            ids = real_ids(engine)
            case.path_parameters = with_real_ids(case.path_parameters, ids)
            case.query = with_real_ids(case.query, ids)
            case.body = with_real_ids(case.body, ids)
        case.body = without_fractions(case.body)
        token = CALLERS[caller]
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        response = case.call(base_url=server.http, session=session, headers=sent)
        if not token and (method, path) not in OPEN:
            assert response.status_code in (401, 404), "404: with its ids, the path is none of the API's"
        if method == "PATCH":
            ok(server.http, "PATCH", path, world["limits"])
        case.validate_response(response, checks=list(HELD))

    try:
        fuzz()
    except schemathesis.errors.SchemathesisError as error:
        if "negative" not in str(error).lower():
            raise  # a call without parameters or body has nothing that could be broken
    finally:
        session.close()


def test_after_all_of_it_the_server_is_well(world: dict[str, Any]) -> None:
    server = world["server"]
    assert server.process.poll() is None
    assert most_memory_mib(server.process.pid) - world["began_mib"] < MOST_GROWTH_MIB
    assert "Traceback" not in server.log_text()
    assert ok(server.http, "GET", "/readyz")["status"] == "ok"
