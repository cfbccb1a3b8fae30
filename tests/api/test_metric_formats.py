"""`GET /metrics` in both formats: which one a request gets, that each is valid, and that traces are linked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from api_helpers import MIB, NOBODYS, ServerProcess, attach, eventually, keys, raw
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families as classic

from kvdock.api.http.routes_people import preferred
from kvdock.api.record.timings import BOUNDS_S, Timings
from kvdock.client.client import Client
from kvdock.protocol.outcomes import Outcome

OPEN = "application/openmetrics-text"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PROMETHEUS = (
    f"{OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPEN};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What Prometheus 3 sends."""


@pytest.mark.parametrize(("accept", "is_open"), [
    ("", False), ("*/*", False), ("text/plain", False), ("text/plain;version=0.0.4", False), ("text/*", False),
    (OPEN, True), (OPEN.upper(), True), (PROMETHEUS, True), (f"{OPEN}; version=1.0.0; charset=utf-8", True),
    (f'{OPEN}; version="1.0.0"', True), (f"{OPEN};version=0.0.1", False), (f"{OPEN};version=2.0.0,*/*;q=0.1", False),
    (f"{OPEN};q=0.5,text/plain;q=0.4", True), (f"{OPEN};q=0.4,text/plain;q=0.5", False),
    (f"{OPEN},text/plain", False), (f"{OPEN},*/*", True), (f"{OPEN};q=0.1,*/*", False), (f"{OPEN};q=0", False),
    (f"{OPEN};q=0,*/*;q=0.1", False), ("application/*,text/plain;q=0.9", True), (f"{OPEN};q=much", False),
    (f"{OPEN};q=2", False), ("application/json", False), (";,/,;q=", False), (f"{OPEN};q=0.9 , text/plain", False),
])
def test_a_request_gets_the_format_that_it_accepts_best(accept: str, is_open: bool) -> None:
    offered = ("text/plain", f"{OPEN};version=1.0.0")
    assert preferred(accept, offered) == offered[is_open]


def open_metrics(text: str) -> Iterable[Metric]:
    parse = parser.text_string_to_metric_families
    families: Iterable[Metric] = parse(text)  # type: ignore[no-untyped-call]  # the package has no types
    return families


def parsed(families: Iterable[Metric]) -> dict[str, Metric]:
    found = list(families)
    assert len({family.name for family in found}) == len(found)
    return {family.name: family for family in found}


def test_both_formats_are_valid_and_say_the_same(tmp_path: Path) -> None:
    with ServerProcess(disk_path=str(tmp_path / "disk"), disk_bytes=64 * MIB) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(2))
        engine.release(engine.lookup(keys(2)).lease, 0)
        engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=40, loaded_tokens=32)])
        eventually(lambda: b"kvdock_tier_loaded_bytes_total{" in raw(server.http, "GET", "/metrics")[2], 30.0)
        plain, opened = (raw(server.http, "GET", "/metrics", None, sent) for sent in ({}, {"Accept": PROMETHEUS}))
        nobodys = raw(server.http, "GET", "/metrics", None, {**NOBODYS, "Accept": OPEN})[2].decode()
        engine.close()
    assert plain[1]["content-type"].startswith("text/plain; version=") and plain[1]["vary"] == "accept"
    assert opened[1]["content-type"] == f"{OPEN}; version=1.0.0; charset=utf-8"
    text = opened[2].decode()
    assert text.endswith("\n# EOF\n") and text.count("# EOF") == 1 and b"# EOF" not in plain[2]
    found, same = parsed(open_metrics(text)), parsed(classic(plain[2].decode()))
    assert found.keys() - {"kvdock_build"} == same.keys() - {"kvdock_build_info"} and len(found) > 90
    assert parsed(open_metrics(nobodys)).keys() < found.keys(), "without a token the totals alone"
    for name, family in found.items():
        if family.type not in ("info", "unknown"):
            assert {one.name for one in family.samples} == {one.name for one in same[name].samples}, name
        unit = next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "")
        assert family.unit == unit, name


def test_a_bucket_names_the_last_recorded_trace_in_it() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(1), traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        lease = engine.lookup(keys(1), traceparent=f"00-{TRACE}-00f067aa0ba902b7-01").lease
        engine.release(lease, 0)
        engine.lookup(keys(1), "other", traceparent=f"00-{TRACE[::-1]}-00f067aa0ba902b7-00")
        text = raw(server.unix, "GET", "/metrics", None, {"Accept": OPEN})[2].decode()
        plain = raw(server.unix, "GET", "/metrics")[2].decode()
        engine.close()
    assert TRACE not in plain
    found = parsed(open_metrics(text))
    for name, labels in (
        ("kvdock_call_seconds", {"route": "/v1/lookups"}), ("kvdock_call_seconds", {"route": "/v1/reservations"}),
        ("kvdock_load_seconds", {}), ("kvdock_store_seconds", {}),
    ):
        linked = [one for one in found[name].samples if one.exemplar and labels.items() <= one.labels.items()]
        assert [one.exemplar.labels for one in linked if one.exemplar] == [{"trace_id": TRACE}], (name, labels)
        (exemplar,) = (one.exemplar for one in linked if one.exemplar)
        assert 0 <= exemplar.value <= float(linked[0].labels["le"]) and exemplar.timestamp is not None


def test_the_last_trace_of_each_bucket_is_kept_and_no_other() -> None:
    timings = Timings(lambda: 7.0)
    for took_ns, trace, flags in (
        (50_000, "a", "01"), (60_000, "b", "01"), (70_000, "c", "00"), (3_000_000, "d", "01"), (3_500_000, "", ""),
        (4_000_000, "e", "no flags"),
    ):
        timings.add("GET", "/x", took_ns, f"00-{trace * 32}-{'1' * 16}-{flags}" if trace else "")
    (route,) = timings.view()
    kept = {one.most: one.last for one in route.cumulative if one.last is not None}
    assert kept == {"0.0001": ("b" * 32, 60e-6, 7.0), "0.005": ("d" * 32, 3e-3, 7.0)}
    assert [one.total for one in route.cumulative][-1] == 6 and len(route.cumulative) == len(BOUNDS_S) + 1
