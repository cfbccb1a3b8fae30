"""What probes, scrapers and curl see: health with reasons, metrics, versions, the document and its examples."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from admin_helpers import CALLS, call, ok, refused
from api_helpers import MIB, NOBODYS, Engine, ServerProcess, attach, eventually, keys, raw, unique
from paths import ROOT
from prometheus_client.parser import text_string_to_metric_families

from kvdock.api.http import openapi
from kvdock.api.http.openapi import wire_structs
from kvdock.api.record.timings import BOUNDS_S, Pulse, Timings
from kvdock.api.reports.degraded import ALL_HELD, ALL_KEPT, CAP_REACHED, GRANTS_HELD
from kvdock.api.reports.metrics import FRESH_S
from kvdock.client.client import Client
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import admin_schemas as a
from kvdock.protocol.errors import CODES
from kvdock.shm.objects import SHM_DIR

CHUNK_BYTES = 16384
CURL = shutil.which("curl")


def metrics(address: str) -> dict[str, Any]:
    text = raw(address, "GET", "/metrics")[2].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


# ------------------------------------------------------------------ health


@pytest.mark.security
def test_a_server_without_room_for_grants_says_so_and_who_has_most() -> None:
    with ServerProcess(table_grants=16) as server, Client(server.unix) as client:
        one, most = attach(client), attach(client)
        one.store(keys(1))
        leases = [engine.lookup(keys(1), f"request {number}").lease
                  for number, engine in enumerate([one] * 6 + [most] * 10)]  # fmt: skip
        assert all(leases)
        status, answer = call(server.http, "GET", "/readyz")
        assert status == 503 and answer["reasons"] == [GRANTS_HELD]
        eventually(lambda: bool(client.status().degraded[0].most))
        found, whose = ok(server.http, "GET", "/v1/status"), client.status().degraded[0].most
        assert whose.startswith(f"most is held by session {most.listed} ") and "10 leases" in whose
        (degraded,) = found["degraded"]
        assert found["status"] == "not ready" and degraded["reason"] == GRANTS_HELD
        assert degraded["most"] == whose and 0 <= found["now"] - degraded["since"] < 60
        assert metrics(server.http)["kvdock_degraded"].samples[0].value == 1
        assert f"{GRANTS_HELD}; {whose}" in server.log_text()
        most.release(leases[-1], 0)
        assert ok(server.http, "GET", "/readyz")["status"] == "ok"
        eventually(lambda: f"this is over: {GRANTS_HELD}" in server.log_text())
        assert server.log_text().count(whose) == 1
        assert ok(server.http, "GET", "/v1/status")["degraded"] == []


def test_a_server_whose_every_byte_is_held_says_so_until_somebody_lets_go() -> None:
    with ServerProcess(pool_bytes=1 * MIB, segment_bytes=1 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        granted = engine.reserve(keys(63, "all of it"))
        assert len(granted.chunks) == 63
        status, answer = call(server.http, "GET", "/readyz")
        who = f"{engine.listed} {engine.body.instance}"
        whose = f"most is held by session {who}: 1032192 bytes, 0 leases, 1 reservations"
        assert status == 503 and answer == {"status": "not ready", "reasons": [ALL_HELD]}
        assert call(server.http, "GET", "/healthz") == (503, answer)
        eventually(lambda: client.status().degraded[0].most == whose)
        assert client.status().reasons == [ALL_HELD]
        nobodys = json.loads(raw(server.http, "GET", "/v1/status", None, NOBODYS)[2])
        assert [(one["reason"], one["most"]) for one in nobodys["degraded"]] == [(ALL_HELD, "")]
        assert metrics(server.http)["kvdock_ready"].samples[0].value == 0
        for path in ("/livez", "/startupz"):
            assert ok(server.http, "GET", path) == {"status": "ok", "reasons": []}
        engine.commit(granted)
        assert ok(server.http, "GET", "/readyz")["status"] == "ok", "a full pool of evictable chunks is ready"
        engine.close()


def test_a_server_whose_names_somebody_removed_says_so() -> None:
    settings = {"pool_bytes": 2 * MIB, "segment_bytes": 1 * MIB, "growth": "ahead"}
    with ServerProcess(**settings) as server, Client(server.unix) as client:
        eventually(lambda: client.status().pool.segments == 2)
        assert len(server.pool_memory()) == 4
        (removed,) = (name for name in server.shared_memory() if "-0001-" in name)
        (SHM_DIR / removed).unlink()
        status, answer = call(server.http, "GET", "/readyz")
        assert status == 503 and answer["reasons"] == [
            f"no engine can attach any more, somebody removed from shared memory: /{removed}"
        ]
        assert client.status().reasons == answer["reasons"]


def test_a_server_whose_pool_is_kept_by_pins_says_so_until_they_end() -> None:
    with ServerProcess(pool_bytes=1 * MIB, segment_bytes=1 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        chain = keys(63, "all of it")
        engine.store(chain)
        body = a.PinChunks(namespace=engine.attached.namespace, keys=chain[-1:], duration_s=600)
        assert client.pin(body).chunks == 1, "the last of the chain keeps those before it"
        assert engine.reserve(keys(1, "more")).limited_by == "no_space"
        assert call(server.http, "GET", "/readyz") == (503, {"status": "not ready", "reasons": [ALL_KEPT]})
        client.pin(msgspec.structs.replace(body, duration_s=0))
        assert ok(server.http, "GET", "/readyz")["status"] == "ok"
        engine.close()


def test_a_server_at_its_total_cap_is_not_ready() -> None:
    with ServerProcess(total_cap=0.5, pool_bytes=1 * MIB, segment_bytes=1 * MIB) as server, Client(
        server.unix
    ) as client:
        engine = attach(client)
        granted = engine.reserve(keys(63, "half of it"))
        assert granted.limited_by == "held_bytes"
        engine.commit(granted)
        assert ok(server.http, "GET", "/readyz")["status"] == "ok"
        ok(server.http, "PATCH", "/v1/config", {"total_cap": CHUNK_BYTES / MIB})
        engine.lookup(keys(63, "half of it"))
        status, answer = call(server.http, "GET", "/readyz")
        assert status == 503 and answer["reasons"] == [CAP_REACHED]
        whose = f"most is held by session {engine.listed} "
        eventually(lambda: client.status().degraded[0].most.startswith(whose))
        engine.close()


def test_the_pulse_remembers_its_worst_lag_and_how_long_the_keeper_is_silent() -> None:
    import asyncio

    now_ns = 0

    async def story() -> None:
        nonlocal now_ns
        pulse = Pulse(lambda: now_ns)
        watching = asyncio.create_task(pulse.watch())
        await asyncio.sleep(0)
        now_ns += 3_100_000_000  # the loop was kept for 3 s
        while not pulse.worst_lag_s:
            await asyncio.sleep(0.01)
        assert pulse.worst_lag_s == pytest.approx(3.0)
        assert pulse.since_round_s == pytest.approx(3.1)
        pulse.made_round()
        assert pulse.since_round_s == 0
        watching.cancel()

    asyncio.run(story())


# ------------------------------------------------------------------ metrics


def test_every_call_is_timed_on_its_route_whichever_way_it_came(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    body = {"session": engine.session, "member": engine.member, "request": "timed", "keys": keys(1)}

    def counts() -> dict[tuple[str, str], float]:
        time.sleep(FRESH_S)
        return {
            (sample.labels["method"], sample.labels["route"]): sample.value
            for sample in metrics(server.http)["kvdock_call_seconds"].samples
            if sample.name.endswith("_count")
        }

    counts()  # the scrape itself is a call
    before = counts()
    for address in (server.http, server.unix):
        ok(address, "POST", "/v1/lookups", body)
        ok(address, "GET", f"/v1/sessions/{engine.session}")
        refused(address, "GET", "/nothing/here")
    after = counts()
    grown = {route: after[route] - before.get(route, 0) for route in after if after[route] != before.get(route, 0)}
    assert grown == {
        ("POST", "/v1/lookups"): 2, ("GET", "/v1/sessions/{session}"): 2, ("GET", ""): 2, ("GET", "/metrics"): 1,
    }
    engine.close()


def test_a_histogram_counts_a_call_in_its_bucket_and_all_above() -> None:
    timings = Timings(time.time)
    for took_ns in (50_000, 100_000, 3_000_000, 9_000_000_000):
        timings.add("GET", "/x", took_ns)
    (route,) = timings.view()
    counts = {one.most: one.total for one in route.cumulative}
    assert counts["0.0001"] == 2 and counts["0.005"] == 3
    assert route.cumulative[-1] == ("+Inf", 4, None) and len(route.cumulative) == len(BOUNDS_S) + 1
    assert route.total_s == pytest.approx(9.00315)


def test_metric_names_have_base_units_and_counters_end_in_total(tmp_path: Path) -> None:
    with ServerProcess(disk_path=str(tmp_path / "disk"), disk_bytes=64 * MIB) as server:
        text = raw(server.http, "GET", "/metrics")[2].decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    assert len(kinds) > 25
    for name, kind in kinds.items():
        assert name.startswith(("kvdock_", "process_")) and not name.endswith(("_ms", "_us", "_mib", "_percent")), name
        assert (kind == "counter") == name.endswith("_total"), name
        assert f"# HELP {name} " in text


# ------------------------------------------------------------------ versions and parameters


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/nothing", "/", "/v1/sessions?x=1"])
def test_every_answer_names_the_version_of_the_api(server: ServerProcess, path: str) -> None:
    for address in (server.http, server.unix):
        assert raw(address, "GET", path)[1]["kvdock-api"] == "1"


def test_status_names_the_version_of_the_api(server: ServerProcess) -> None:
    assert ok(server.http, "GET", "/v1/status")["api_version"] == 1


@pytest.mark.parametrize("version", ["2", "0", "01", "one", ""])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/status"), ("POST", "/v1/lookups")])
def test_another_version_is_refused_before_anything_is_done(
    server: ServerProcess, method: str, path: str, version: str
) -> None:
    for address in (server.http, server.unix):
        status, headers, content = raw(
            address, method, path, b"{}" if method == "POST" else None,
            {"Kvdock-Api": version, "Content-Type": "application/json"},
        )
        problem = json.loads(content)
        assert status == 400 and problem["code"] == "unsupported_version", problem
        assert problem["found"] == version and problem["wanted"] == [1] and headers["kvdock-api"] == "1"


def test_a_request_that_names_the_servers_version_is_answered(server: ServerProcess) -> None:
    assert raw(server.http, "GET", "/v1/status", None, {"Kvdock-Api": "1"})[0] == 200


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1/status?verbose=1"), ("GET", "/v1/requests?limit=3&page=2"), ("GET", "/healthz?full"),
    ("POST", "/v1/lookups?dry_run=1"), ("DELETE", "/v1/sessions/x?members=y"), ("POST", "/v1/leases/x/release?all="),
])
def test_an_unknown_parameter_is_refused(server: ServerProcess, method: str, path: str) -> None:
    for address in (server.http, server.unix):
        problem = refused(address, method, path, {} if method == "POST" else None)
        assert problem["code"] == "unknown_parameter" and isinstance(problem["wanted"], list)


def test_the_page_may_carry_what_it_likes_behind_its_question_mark(server: ServerProcess) -> None:
    assert raw(server.http, "GET", "/?theme=dark")[0] == 200


@pytest.mark.security
@pytest.mark.parametrize("name", ["__init__.py", "__pycache__", "__pycache__/__init__.cpython-311.pyc", "", "views"])
def test_the_pages_folder_serves_files_of_the_page_only(server: ServerProcess, name: str) -> None:
    assert raw(server.http, "GET", f"/static/{name}")[0] == 404


# ------------------------------------------------------------------ the document and its examples


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    return ok(server.http, "GET", "/openapi.json")


def calls(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            yield method.upper(), path, described


def test_every_call_says_how_it_is_repeated_and_what_it_refuses(document: dict[str, Any]) -> None:
    assert {(method, path) for method, path, _ in calls(document)} == set(CALLS)
    for method, path, described in calls(document):
        assert "Retry: " in described["description"], path
        named = {code for reply in described["responses"].values() for code in re.findall(r"`(\w+)`:", str(reply))}
        assert {"unsupported_version", "unknown_parameter"} <= named <= set(CODES), (method, path)
        if "requestBody" in described:
            assert {"invalid_body", "malformed_json", "too_large"} <= named, path


def test_every_body_and_answer_has_an_example_of_its_own_struct(document: dict[str, Any]) -> None:
    structs = {struct.__name__: struct for struct in wire_structs()}
    seen = 0
    for _, path, described in calls(document):
        contents = [described.get("requestBody", {}), *described["responses"].values()]
        for kind, content in (item for holder in contents for item in holder.get("content", {}).items()):
            name = content["schema"].get("$ref", "").rpartition("/")[2]
            if kind == "application/json":
                assert "example" in content, (path, name)
                made: Any = msgspec.convert(content["example"], structs[name])
                assert type(made).__name__ == name, path
                seen += 1
            elif name and "example" in content:
                assert content["example"]["code"] in CODES
    assert seen > 40


def shell_variables(server: ServerProcess, engine: Engine, liveness: MemberLiveness) -> dict[str, str]:
    """Ids of this server for what examples call by other names; each call gets a lease and a reservation."""
    chain = openapi.KEYS
    engine.store(chain, store=unique("s"))
    request = unique("r")
    lease = engine.lookup(chain, request=request).lease
    granted = engine.reserve(keys(1, unique("new")), store=unique("s"))
    return {
        "SESSION": engine.session, "MEMBER": engine.member, "INSTANCE": unique("engine"), "LEASE": str(lease),
        "REQUEST": request, "RESERVATION": str(granted.reservation), "LOCK_OFFSET": str(liveness.offset),
        "NAMESPACE": engine.attached.namespace, "SOCKET": server.unix.removeprefix("unix:"),
    }


@pytest.mark.skipif(CURL is None, reason="curl is not installed here")
def test_every_line_for_curl_works_as_it_stands(document: dict[str, Any], tmp_path: Path) -> None:
    tier = {"objects_url": tmp_path.as_uri()}
    with ServerProcess(observe="stream,curve,kv_events", **tier) as server, Client(server.unix) as client:
        check_lines(server, client, document)


def check_lines(server: ServerProcess, client: Client, document: dict[str, Any]) -> None:
    liveness = MemberLiveness(client.segments().lock_file, source=random.Random())
    address = server.http.removeprefix("http://")
    for method, path, described in calls(document):
        if path.startswith("/v1/peers/"):
            continue  # for movers, at servers whose pools nodes share: tests/tiers/test_peers.py
        engine = attach(client, model=unique("curl"))
        (sample,) = described["x-codeSamples"]
        line = sample["source"].replace(openapi.BASE_URL, address) + " -w '\\n%{http_code}'"
        variables = shell_variables(server, engine, liveness)
        done = subprocess.run(
            ["/bin/sh", "-c", line], env={**os.environ, **variables}, capture_output=True, text=True, timeout=30
        )
        content, _, status = done.stdout.rpartition("\n")
        assert done.returncode == 0 and status in ("200", "204"), (method, path, line, done.stdout, done.stderr)
        if path == "/v1/events":
            assert '"kind":"attached"' in content
        elif path == "/v1/kv-events":
            assert "AllBlocksCleared" in content
        elif method == "GET" and path.startswith("/v1/"):
            assert json.loads(content)
        engine.close()
    liveness.close()


JQ = """import json, sys
value = json.load(sys.stdin)
for name in sys.argv[2].strip(".").split("."):
    value = value[name]
print(value if isinstance(value, str) else json.dumps(value))
"""


@pytest.mark.skipif(CURL is None, reason="curl is not installed here")
def test_the_guide_works_line_by_line(tmp_path: Path) -> None:
    """docs/understand/api.md's shell lines as one script, against an own server; its Python lines hold the lock."""
    guide = (ROOT / "docs" / "understand" / "api.md").read_text()
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", guide, re.MULTILINE | re.DOTALL))
    (python,) = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (tmp_path / "jq.py").write_text(JQ)
    with ServerProcess() as server:
        program = python.replace("unix:/run/user/1000/kvdock.sock", server.unix)
        holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None
            offset = holder.stdout.readline().strip()
            jq = f'jq() {{ "{sys.executable}" "{tmp_path}/jq.py" "$@"; }}\n'
            fails = shell.replace("curl -sS", "curl -sS --fail-with-body")
            done = subprocess.run(
                ["/bin/sh", "-ec", jq + fails], capture_output=True, text=True, timeout=60,
                env={**os.environ, "LOCK_OFFSET": offset, "SOCKET": server.unix.removeprefix("unix:")},
            )
        finally:
            holder.kill()
            holder.communicate()
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"ready":2' in done.stdout and '"remaining":[]' in done.stdout, done.stdout
        assert ok(server.http, "GET", "/v1/status")["chunks"]["ready"] == 2
