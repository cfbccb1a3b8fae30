"""What people and probes read: status, history, metrics, the page, the API's own description."""

from __future__ import annotations

import json

import pytest
from api_helpers import Engine, ServerProcess, eventually, keys, raw, unique
from prometheus_client.parser import text_string_to_metric_families
from server_fixtures import attached_engine

from kvdock.api.http.openapi import wire_structs
from kvdock.api.http.wire import SECURITY_HEADERS
from kvdock.api.record.history import SERIES
from kvdock.client.client import Client
from kvdock.protocol.errors import CODES
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.wire_types import Answer

engine = attached_engine(label="people")


def get(server: ServerProcess, path: str) -> tuple[int, dict[str, str], bytes]:
    return raw(server.http, "GET", path)


@pytest.mark.parametrize("path", ["/livez", "/startupz", "/readyz", "/healthz"])
def test_a_started_server_is_healthy(server: ServerProcess, path: str) -> None:
    status, _, content = get(server, path)
    assert status == 200 and json.loads(content) == {"status": "ok", "reasons": []}


def test_bytes_by_state_sum_to_bytes_allocated(client: Client, engine: Engine) -> None:
    engine.store(keys(3, unique("sum")))
    engine.reserve(keys(2, unique("sum")))
    pool = client.status().pool
    headers = sum(segment.data_offset for segment in client.segments().segments)
    in_states = pool.free_bytes + pool.reserved_bytes + pool.ready_bytes + pool.quarantined_bytes
    assert in_states + headers == pool.allocated_bytes == pool.limit_bytes
    assert pool.reserved_bytes == pool.held_bytes == 2 * 16384
    used = sum(segment.used_bytes for segment in client.segments().segments)
    assert used == pool.allocated_bytes - headers - pool.free_bytes


def test_the_last_requests_are_listed_newest_first(client: Client, engine: Engine) -> None:
    wanted = keys(2, unique("recent"))
    engine.store(wanted, store="the store")
    engine.lookup([*wanted, *keys(1, unique("miss"))], request="the lookup")
    lookup, store = client.requests().requests[:2]
    assert (lookup.kind, lookup.request, lookup.label) == ("lookup", "the lookup", "people")
    assert (lookup.tokens, lookup.hit_tokens, lookup.chunks, lookup.bytes) == (48, 32, 2, 2 * 16384)
    assert (store.kind, store.request, store.tokens, store.chunks) == ("store", "the store", 32, 2)


def test_history_has_one_value_per_series_and_interval(client: Client, engine: Engine) -> None:
    before = len(client.stats().series[0].values)
    eventually(lambda: len(client.stats().series[0].values) >= before + 3)
    stats = client.stats()
    assert [series.name for series in stats.series] == [spec.name for spec in SERIES]
    assert len({len(series.values) for series in stats.series}) == 1
    assert stats.interval_s == 0.1 and 0 <= stats.age_s < 5


def test_history_shows_what_was_loaded(client: Client, engine: Engine) -> None:
    engine.heartbeat(outcomes=[Outcome(request=unique("ratio"), prompt_tokens=32, loaded_tokens=32)])

    def ratios() -> list[float | None]:
        return next(series.values for series in client.stats().series if series.name == "loaded_share")

    eventually(lambda: 1.0 in ratios())


def test_history_is_bounded() -> None:
    with ServerProcess(history_interval_s=0.02, history_values=5) as server, Client(server.unix) as client:
        eventually(lambda: {len(series.values) for series in client.stats().series} == {5})
        since_s = client.status().uptime_s
        eventually(lambda: client.status().uptime_s > since_s + 0.3)
        assert {len(series.values) for series in client.stats().series} == {5}


def test_metrics_are_prometheus_text_with_base_units(server: ServerProcess, client: Client, engine: Engine) -> None:
    stored = keys(2, unique("metrics"))
    engine.store(stored)
    assert engine.lookup(stored, request=unique("metrics")).hit_tokens > 0
    status, headers, content = get(server, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(content.decode())}
    assert families["kvdock_lookups"].type == "counter"
    totals = client.status().counters
    for name, total in totals.items():
        samples = families[f"kvdock_{name}"].samples
        assert {sample.name for sample in samples} <= {f"kvdock_{name}_total"}
        assert sum(sample.value for sample in samples) == total
    by_state = {sample.labels["state"]: sample.value for sample in families["kvdock_pool_bytes"].samples}
    assert by_state["ready"] == client.status().pool.ready_bytes > 0
    assert families["kvdock_sessions"].samples[0].value == len(client.sessions().sessions)


def test_the_page_and_its_files_are_served_and_may_load_only_from_here(server: ServerProcess) -> None:
    status, headers, content = get(server, "/")
    assert status == 200 and b"<html" in content
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css")):
        status, headers, _ = get(server, f"/static/{name}")
        assert status == 200 and headers["content-type"].startswith(kind)


@pytest.mark.security
@pytest.mark.parametrize(("method", "path", "body", "wanted"), [
    ("GET", "/v1/status", None, 200), ("GET", "/metrics", None, 200), ("GET", "/livez", None, 200),
    ("GET", "/openapi.json", None, 200), ("GET", "/nowhere", None, 404), ("PUT", "/v1/lookups", b"{}", 405),
    ("POST", "/v1/lookups", b"{", 400), ("POST", "/v1/lookups", b"\x93", 422), ("POST", "/v1/cache/clear", b"[]", 422),
])
def test_every_answer_has_the_security_headers(
    server: ServerProcess, method: str, path: str, body: bytes | None, wanted: int
) -> None:
    kind = "application/msgpack" if body == b"\x93" else "application/json"
    status, headers, _ = raw(server.http, method, path, body, {"Content-Type": kind})
    assert status == wanted and {name: headers.get(name) for name in SECURITY_HEADERS} == SECURITY_HEADERS


@pytest.mark.security
@pytest.mark.parametrize("path", ["/static/../../api/app.py", "/static/%2e%2e/pyproject.toml", "/static//etc/passwd"])
def test_only_the_pages_folder_is_served(server: ServerProcess, path: str) -> None:
    assert get(server, path)[0] == 404


def test_answers_are_not_stored_by_caches(server: ServerProcess) -> None:
    for path in ("/v1/status", "/v1/segments", "/v1/nothing", "/metrics", "/readyz"):
        assert get(server, path)[1]["cache-control"] == "no-store", path


def test_openapi_describes_every_route_body_and_answer(server: ServerProcess) -> None:
    schema = json.loads(get(server, "/openapi.json")[2])
    structs = schema["components"]["schemas"]
    assert {struct.__name__ for struct in wire_structs()} <= set(structs)
    referred = set(json.dumps(schema).split('"#/components/schemas/')[1:])
    assert {text.partition('"')[0] for text in referred} <= set(structs), "a $ref leads nowhere"
    calls = {(method, path): call for path, methods in schema["paths"].items() for method, call in methods.items()}
    assert len(calls) >= 23
    for (method, path), call in calls.items():
        assert call["summary"], path
        assert any(code in call["responses"] for code in ("200", "204")), path
        assert "default" in call["responses"], path
        if method == "post":
            assert "$ref" in call["requestBody"]["content"]["application/json"]["schema"], path
    lookup = calls["post", "/v1/lookups"]
    assert lookup["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/LookupAnswer")
    assert "`skip_misaligned`" in lookup["responses"]["422"]["description"]


def test_docs_has_an_anchor_for_every_error_code_and_struct_and_fetches_nothing_from_elsewhere(
    server: ServerProcess,
) -> None:
    status, headers, content = get(server, "/docs")
    page = content.decode()
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert all(f'id="{code}"' in page for code in CODES)
    assert all(f'id="struct-{struct.__name__}"' in page for struct in wire_structs())
    assert "POST</span> /v1/lookups" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert get(server, "/docs.css")[0] == 200


def test_every_answer_decodes_as_its_struct(client: Client, engine: Engine) -> None:
    for read in (client.status, client.stats, client.sessions, client.leases, client.segments, client.requests):
        assert isinstance(read(), Answer)
