"""What RFC 9110 and the OpenAPI document promise: methods, HEAD, headers of refusals, hosts, sites, operation ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import CALLS, call, ok
from api_helpers import NOBODYS, ServerProcess, attach, http_connection, keys, raw, unique
from flood_helpers import quick_server, refusal_in, until_closed
from prometheus_client.parser import text_string_to_metric_families

from kvdock import __version__
from kvdock.api.http.wire import COMMON_HEADERS, SECURITY_HEADERS
from kvdock.client.client import Client

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    return ok(server.http, "GET", "/openapi.json")


# ------------------------------------------------------------------ methods


METHODS = [
    ("/v1/config", "GET, HEAD, PATCH"), ("/v1/sessions", "GET, HEAD, POST"), ("/v1/sessions/x", "DELETE, GET, HEAD"),
    ("/v1/leases/x", "DELETE, GET, HEAD"), ("/v1/lookups", "POST"), ("/livez", "GET, HEAD"), ("/", "GET, HEAD"),
    ("/docs", "GET, HEAD"), ("/openapi.json", "GET, HEAD"), ("/static/app.js", "GET, HEAD"),
]


@pytest.mark.parametrize(("path", "wanted"), METHODS, ids=[path for path, _ in METHODS])
@pytest.mark.parametrize("method", ["PUT", "OPTIONS"])
def test_a_refused_method_is_told_all_methods_of_the_path(
    server: ServerProcess, method: str, path: str, wanted: str
) -> None:
    for address in (server.http, server.unix):
        status, headers, content = raw(address, method, path)
        assert (status, headers["allow"]) == (405, wanted)
        assert json.loads(content)["code"] == "method_not_allowed"


READS = [path for method, path in CALLS if method == "GET" and "{" not in path] + [
    "/", "/static/app.js", "/docs", "/docs.css", "/openapi.json", "/nothing/here", "/static/nothing.js",
    "/v1/sessions/nobody", "/v1/requests?limit=many", "/v1/requests?some=thing",
]


@pytest.mark.parametrize("path", READS)
def test_head_is_get_without_the_body(server: ServerProcess, path: str) -> None:
    for address in (server.http, server.unix):
        (status, headers, content), head = raw(address, "GET", path), raw(address, "HEAD", path)
        assert (head[0], head[2]) == (status, b"") and content
        if path in ("/metrics", "/v1/curve", "/v1/prefixes", "/v1/status", "/v1/stats"):  # their numbers move
            assert int(head[1]["content-length"]) > 0
            headers["content-length"] = head[1]["content-length"]
        headers.pop("transfer-encoding", None)  # there is nothing to transfer
        assert head[1] == headers


def test_after_a_head_the_connection_carries_the_next_call(server: ServerProcess) -> None:
    connection = http_connection(server.http)
    for method in ("HEAD", "GET"):
        connection.request(method, "/livez")
        response = connection.getresponse()
        assert response.status == 200 and bool(response.read()) == (method == "GET")
    connection.close()


@pytest.mark.security
def test_head_needs_the_scope_of_its_get(server: ServerProcess) -> None:
    for path in (path for method, path in CALLS if method == "GET"):
        status, _, _ = raw(server.http, "HEAD", path, None, NOBODYS)
        assert status == raw(server.http, "GET", path, None, NOBODYS)[0], path
    assert raw(server.http, "HEAD", "/v1/sessions", None, NOBODYS)[0] == 401
    assert raw(server.http, "HEAD", "/v1/lookups")[0] == 405


def test_the_document_has_no_head_and_no_body_with_delete(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        assert "head" not in methods, path
        assert not {"get", "delete"} & {method for method, call in methods.items() if "requestBody" in call}, path


def test_a_lease_is_cancelled_without_a_body(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    engine.store(chain := keys(1, unique("cancel")))
    lease = engine.lookup(chain).lease
    path = f"/v1/leases/{lease}?member={engine.member}"
    status, problem = call(server.http, "DELETE", path, {"session": engine.session, "member": engine.member})
    assert (status, problem["code"], problem["found"]) == (422, "bad_argument", "query.session")
    assert raw(server.http, "DELETE", f"{path}&session={engine.session}")[0] == 204
    engine.close()


# ------------------------------------------------------------------ when to try again


def test_whoever_is_told_to_come_back_is_told_when(server: ServerProcess, document: dict[str, Any]) -> None:
    settings = {"pool_bytes": 1 << 20, "segment_bytes": 1 << 20, "session_grants": 1}
    with ServerProcess(**settings) as small, Client(small.unix) as client:
        engine = attach(client)
        engine.reserve(keys(63, "all of it"))
        body = {"session": engine.session, "member": engine.member, "store": "more", "keys": keys(1, "more")}
        for address in (small.http, small.unix):  # the guard's way and the short one
            status, headers, _ = raw(address, "POST", "/v1/reservations", json.dumps(body).encode(), JSON)
            assert (status, headers["retry-after"]) == (429, "1")
            for path in ("/readyz", "/healthz"):
                status, headers, _ = raw(address, "GET", path)
                assert (status, headers["retry-after"]) == (503, "1")
        engine.close()
    for path, methods in document["paths"].items():
        for described in methods.values():
            for status, reply in described["responses"].items():
                assert (status in ("429", "503")) == ("Retry-After" in reply.get("headers", {})), path
            assert "`too_busy`" in described["responses"]["503"]["description"], path
    assert "`not_ready`" in document["paths"]["/v1/sessions"]["post"]["responses"]["503"]["description"]


def test_a_refused_connection_is_told_when(tmp_path: Path) -> None:
    with quick_server(str(tmp_path), tcp_connections=0) as server:
        refused = refusal_in(until_closed(server.http, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")


# ------------------------------------------------------------------ whose request it is


@pytest.mark.security
@pytest.mark.parametrize(("head", "wanted"), [
    ("GET /livez HTTP/1.1\r\n", 400),
    ("GET /livez HTTP/1.1\r\nHost: evil.test\r\nHost: localhost\r\n", 400),
    ("GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
    ("GET http://localhost/livez HTTP/1.1\r\n", 400),
    ("GET http://evil.test/livez HTTP/1.1\r\nHost: localhost\r\n", 421),
    ("GET http://[::2]:7410/livez HTTP/1.1\r\nHost: localhost\r\n", 421),
    ("GET http://evil.test HTTP/1.1\r\nHost: localhost\r\n", 400),
    ("GET http://localhost:7410/livez HTTP/1.1\r\nHost: evil.test\r\n", 200),
    ("GET http://[::1]/livez HTTP/1.1\r\nHost: evil.test\r\n", 200),
    ("GET //evil.test/livez HTTP/1.1\r\nHost: localhost\r\n", 404),
    ("GET /livez HTTP/1.1\r\nHost: localhost\r\n", 200),
])
def test_a_request_over_tcp_is_for_one_host(server: ServerProcess, head: str, wanted: int) -> None:
    answer = until_closed(server.http, f"{head}Connection: close\r\n\r\n".encode())
    assert int(answer.split()[1]) == wanted, answer
    if wanted >= 400:
        refused = refusal_in(answer)
        assert refused.problem["code"] == {400: "malformed_request", 421: "wrong_host", 404: "not_found"}[wanted]
        assert COMMON_HEADERS.items() <= refused.headers.items()


@pytest.mark.security
def test_a_page_of_another_origin_is_refused(server: ServerProcess) -> None:
    own = server.http.rpartition(":")[2]
    fine = [f"http://localhost:{own}", f"http://127.0.0.1:{own}", f"http://[::1]:{own}"]
    foreign = [
        f"http://evil.test:{own}", "http://localhost:3000", "http://localhost", f"https://localhost:{own}", "null", "",
        f"http://localhost.evil.test:{own}", "http://localhost:x", "http://[", f"http://evil@evil.test:{own}",
    ]
    for origin in fine + foreign:
        for method, path, body in (("GET", "/livez", None), ("POST", "/v1/cache/clear", b"{}")):
            status, _, content = raw(server.http, method, path, body, {**JSON, "Origin": origin})
            assert status == (200 if origin in fine else 403), (origin, content)
            if origin in foreign:
                problem = json.loads(content)
                assert (problem["code"], problem["found"]) == ("cross_site", origin)
    assert raw(server.unix, "GET", "/livez", None, {"Origin": "http://evil.test"})[0] == 200


FETCH = [  # method, path, site, mode, dest, status
    ("GET", "/metrics", "same-origin", "cors", "empty", 200), ("GET", "/metrics", "none", "navigate", "document", 200),
    ("GET", "/metrics", "cross-site", "no-cors", "image", 403), ("GET", "/metrics", "same-site", "cors", "empty", 403),
    ("GET", "/metrics", "cross-site", "navigate", "document", 403), ("GET", "/metrics", "", "cors", "empty", 403),
    ("GET", "/nothing", "cross-site", "cors", "empty", 403), ("GET", "/static/app.js", "same-site", "cors", "", 403),
    ("GET", "/", "cross-site", "navigate", "document", 200), ("GET", "/docs", "same-site", "navigate", "document", 200),
    ("HEAD", "/", "cross-site", "navigate", "document", 200), ("GET", "/", "cross-site", "navigate", "iframe", 403),
    ("GET", "/", "cross-site", "no-cors", "document", 403), ("POST", "/", "cross-site", "navigate", "document", 403),
    ("POST", "/v1/cache/clear", "cross-site", "cors", "empty", 403),
    ("POST", "/v1/cache/clear", "same-origin", "cors", "empty", 200),
]


@pytest.mark.security
@pytest.mark.parametrize(("method", "path", "site", "mode", "dest", "wanted"), FETCH)
def test_a_browser_may_call_for_this_servers_page_only(
    server: ServerProcess, method: str, path: str, site: str, mode: str, dest: str, wanted: int
) -> None:
    sent = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest, **JSON}
    status, headers, content = raw(server.http, method, path, b"{}" if method == "POST" else None, sent)
    assert status == wanted, content
    if wanted == 403:
        assert json.loads(content)["code"] == "cross_site"
        assert headers["cross-origin-opener-policy"] == "same-origin"


# ------------------------------------------------------------------ errors below and above the app


@pytest.mark.security
@pytest.mark.parametrize("name", ["nothing", "a%00b", "x" * 300, "%ff"])
def test_what_is_not_under_static_is_a_problem_like_all_others(server: ServerProcess, name: str) -> None:
    status, headers, content = raw(server.http, "GET", f"/static/{name}.js")
    assert (status, json.loads(content)["code"]) == (404, "not_found")
    assert COMMON_HEADERS.items() <= headers.items() and headers["content-type"] == "application/problem+json"


@pytest.mark.security
def test_a_failure_of_the_server_is_a_problem_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quick_server(str(tmp_path)) as server:
        def broken(*_: object) -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(type(server.parts.handlers.overview), "stats", broken)
        status, headers, content = raw(server.http, "GET", "/v1/stats", None, NOBODYS)
        assert (status, json.loads(content)["code"]) == (500, "internal") and b"defect" not in content
        assert COMMON_HEADERS.items() <= headers.items() and headers["content-type"] == "application/problem+json"
        assert server.parts.meter.refusals == {"internal": 1}


@pytest.mark.security
def test_every_answer_isolates_the_window_that_shows_it() -> None:
    assert SECURITY_HEADERS["cross-origin-opener-policy"] == "same-origin"


# ------------------------------------------------------------------ bodies


@pytest.mark.security
@pytest.mark.parametrize(("parameters", "wanted"), [
    ("", 200), ("; charset=utf-8", 200), (';charset="UTF-8"', 200), ("; q=1", 200), ("; charset=utf-7", 415),
    ("; charset=utf-16", 415), ("; x=y; Charset=latin-1", 415), ("; charset", 415),
    (";charset=utf-8;charset=utf-7", 415),
])
def test_bodies_are_in_utf_8(server: ServerProcess, parameters: str, wanted: int) -> None:
    kind = {"Content-Type": f"application/json{parameters}"}
    for path, body in (("/v1/cache/clear", {"namespace": None}), ("/v1/releases", {"session": "x", "releases": []})):
        for address in (server.http, server.unix):
            status, _, content = raw(address, "POST", path, json.dumps(body).encode(), kind)
            assert (status == 415) == (wanted == 415), content
            assert wanted == 200 or json.loads(content)["code"] == "unsupported_media_type"


def test_an_integer_with_a_fraction_is_refused_as_the_document_says(
    server: ServerProcess, document: dict[str, Any]
) -> None:
    assert "`88`, not `88.0`" in document["info"]["description"]
    for number in ("88.0", "8.8e1"):
        status, _, content = raw(server.http, "PATCH", "/v1/config", b'{"session_grants": %b}' % number.encode(), JSON)
        problem = json.loads(content)
        assert (status, problem["code"], problem["found"]) == (422, "invalid_body", "$.session_grants")


# ------------------------------------------------------------------ the document


OPERATIONS = {
    "abort", "acknowledge", "attach", "cancel", "clear", "commit", "configure", "curve", "delete_chunks", "drain",
    "empty_tier", "evict", "explain", "healthz", "heartbeat", "hint", "hits", "hold", "leave", "list_events",
    "list_kv_events", "list_leases", "list_namespaces", "list_prefixes", "list_requests", "list_segments",
    "list_sessions", "livez", "lookup", "make_raw", "metrics", "mismatch", "peer_notes", "peer_read", "pin_chunks",
    "prefetch", "readyz", "release", "release_many", "reserve", "show_config", "show_lease", "show_session",
    "show_tiers", "startupz", "stats", "status", "verdict", "weights", "whoami",
}


def test_operations_have_these_ids(document: dict[str, Any]) -> None:
    found = [described["operationId"] for methods in document["paths"].values() for described in methods.values()]
    assert sorted(found) == sorted(OPERATIONS)


def test_the_document_says_where_the_server_is_and_what_its_tags_mean(document: dict[str, Any]) -> None:
    assert [server["url"] for server in document["servers"]] == ["/"]
    tags = {tag["name"] for tag in document["tags"] if tag["description"]}
    assert tags == {tag for methods in document["paths"].values() for call in methods.values() for tag in call["tags"]}


def test_examples_are_json_and_stand_beside_json_only(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for described in methods.values():
            for holder in (described.get("requestBody", {}), *described["responses"].values()):
                packed = holder.get("content", {}).get("application/msgpack", {})
                assert "example" not in packed
                assert not packed or "example" in holder["content"]["application/json"]


# ------------------------------------------------------------------ metrics


def test_metrics_tell_the_version_the_process_and_refusals_by_code() -> None:
    with ServerProcess() as server:
        for _ in range(2):
            raw(server.http, "GET", "/nothing")
        raw(server.unix, "POST", "/v1/lookups", b"{", JSON)
        until_closed(server.http, b"nonsense\r\n\r\n")
        text = raw(server.http, "GET", "/metrics")[2].decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        refusals = {sample.labels["code"]: sample.value for sample in families["kvdock_refusals"].samples}
        assert refusals == {"not_found": 2, "malformed_json": 1, "malformed_request": 1}
        assert ok(server.http, "GET", "/v1/status")["counters"]["refusals"] == sum(refusals.values())
        (build,) = families["kvdock_build_info"].samples
        assert (build.name, build.labels, build.value) == ("kvdock_build_info", {"version": __version__}, 1)
        values = {name: family.samples[0].value for name, family in families.items() if name.startswith("process_")}
        assert 1e7 < values["process_resident_memory_bytes"] < 1e10
        assert 5 < values["process_open_fds"] < values["process_max_fds"]
        assert values["process_start_time_seconds"] > 1.6e9
