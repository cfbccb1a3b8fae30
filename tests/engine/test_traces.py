"""An engine's request has one trace: a real collector gets the spans of a real server as its children."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import ServerProcess, attach, eventually, keys, raw
from connector_helpers import CHUNK, engine_over
from engine_helpers import prompt, run, sampling
from otlp_collector import Collector
from paths import ROOT

from kvdock.api.errors import SettingsError
from kvdock.api.feeds.traces import QUEUE_EVENTS, Traces
from kvdock.api.settings import DEFAULT_OBSERVERS, OTLP_VARIABLE, Settings
from kvdock.client.client import Client
from kvdock.engine.engine import Engine
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import NamespaceView
from kvdock.protocol.errors import ApiError
from kvdock.protocol.events import Loaded

TRACES = "log,stream,metrics,curve,traces"
OF_SESSIONS = {"kvdock.tenant", "kvdock.session", "kvdock.label", "gen_ai.request.model"}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture
def server(collector: Collector) -> Iterator[ServerProcess]:
    with ServerProcess(observe=TRACES, traces_endpoint=collector.endpoint) as started:
        yield started


def spans_of(server: ServerProcess, outcome: str) -> float:
    text = raw(server.http, "GET", "/metrics")[2].decode()
    return next(float(line.split()[1]) for line in text.splitlines()
                if line.startswith(f'kvdock_spans_total{{outcome="{outcome}"}}'))


def namespaces_of(server: ServerProcess) -> list[NamespaceView]:
    with Client(server.unix) as client:
        return client.namespaces().namespaces


def own_of(span: dict[str, Any]) -> dict[str, Any]:
    """Its attributes without those that name the session."""
    return {name: value for name, value in span["attributes"].items() if name not in OF_SESSIONS}


def undocumented(spans: list[dict[str, Any]]) -> list[str]:
    """Spans whose attributes are not those of the documents, where a word in capitals stands for any."""
    wrong = []
    table = (ROOT / "docs/operate/events.md").read_text().partition("| span |")[2]
    rows = dict(re.findall(r"^\| (\w+) \|.*\| ([^|]*) \|$", table, re.M))
    for span in spans:
        words = re.findall(r"`([\w.]+)`", rows[span["name"].removeprefix("kvdock.")])
        named = {word if word.startswith("gen_ai.") else f"kvdock.{word}" for word in words}
        always = {name for name in named if not name.endswith(("SOURCE", "REASON"))}
        some = {name.rpartition(".")[0] for name in named - always}
        own = set(own_of(span))
        rest = {name for name in own - always if name.rpartition(".")[0] not in some}
        wrong += [span["name"]] if rest or not always <= own or not span["attributes"].keys() >= OF_SESSIONS else []
    return wrong


def served(engine: Engine, tokens: list[int], request_id: str, parent: str) -> None:
    engine.add_request(tokens, sampling(4), request_id, traceparent=f"00-{TRACE}-{parent}-01")
    run(engine)
    assert engine.drain(20.0)


def test_the_whole_tree_of_a_request_comes_to_the_collector(collector: Collector, server: ServerProcess) -> None:
    tokens = prompt(1, 4 * CHUNK)
    storing, loading = engine_over(server.unix, label="stores"), engine_over(server.unix, label="loads")
    try:
        served(storing, tokens, "first", PARENT)
        served(loading, tokens, "second", PARENT[::-1])
    finally:
        storing.close()
        loading.close()
    wanted = {(f"kvdock.{name}", PARENT) for name in ("lookup", "store", "request")}
    wanted |= {(f"kvdock.{name}", PARENT[::-1]) for name in ("lookup", "load", "request")}
    eventually(lambda: {(span["name"], span["parent_id"]) for span in collector.spans()} >= wanted)
    found = collector.spans()
    by_parent: dict[str, dict[str, dict[str, Any]]] = {}
    for span in found:
        assert span["trace_id"] == TRACE
        by_parent.setdefault(span["parent_id"], {})[span["name"]] = span
    assert set(by_parent) == {PARENT, PARENT[::-1]}, "nobody else's child, and no span begins a trace"
    first, second = by_parent[PARENT], by_parent[PARENT[::-1]]
    missed, store = first["kvdock.lookup"]["attributes"], first["kvdock.store"]["attributes"]
    assert missed.items() >= {
        "kvdock.request": "first", "kvdock.label": "stores", "kvdock.hit_tokens": 0, "kvdock.why": "never_stored",
        "kvdock.missed_tokens": missed["kvdock.tokens"],
    }.items() and missed["kvdock.tokens"] > 0
    assert store["kvdock.chunks"] > 0 and store["kvdock.bytes"] > 0
    hit, load = second["kvdock.lookup"]["attributes"], second["kvdock.load"]["attributes"]
    assert hit.items() >= {
        "kvdock.request": "second", "kvdock.label": "loads", "kvdock.hit_tokens": hit["kvdock.tokens"],
        "kvdock.missed_tokens": 0, "kvdock.why": "",
    }.items()
    assert load["kvdock.chunks"] == hit["kvdock.tokens"] // CHUNK and load["kvdock.bytes"] > 0
    tokens_of = {"gen_ai.usage.input_tokens": 4 * CHUNK, "kvdock.local_tokens": 0, "kvdock.reloaded_tokens": 0}
    assert missed["kvdock.tokens"] == 4 * CHUNK
    assert own_of(first["kvdock.request"]) == {
        "kvdock.request": "first", **tokens_of, "gen_ai.usage.cache_read.input_tokens": 0,
        "kvdock.computed.never_stored": 4 * CHUNK,
    }
    assert own_of(second["kvdock.request"]) == {
        "kvdock.request": "second", **tokens_of, "gen_ai.usage.cache_read.input_tokens": 4 * CHUNK,
        "kvdock.loaded.memory": 4 * CHUNK,
    }
    models = {one.manifest.model for one in namespaces_of(server)}
    for span in found:
        assert 0 < span["start_ns"] <= span["end_ns"] and span["status"] == 0
        assert {span["attributes"]["gen_ai.request.model"]} == models
        assert span["resource"].items() >= {
            "service.name": "kvdock", "host.name": socket.gethostname(),
            "service.instance.id": f"{socket.gethostname()}:{server.unix.removeprefix('unix:')}",
        }.items()
    assert not undocumented([*first.values(), *second.values()])
    assert second["kvdock.lookup"]["start_ns"] <= second["kvdock.load"]["start_ns"] + 1_000_000
    eventually(lambda: spans_of(server, "sent") == len(found))
    assert {(span["name"], span["parent_id"]) for span in found} == wanted and spans_of(server, "dropped") == 0


@pytest.mark.parametrize("broken", [
    "hello", "00-" + "0" * 32 + f"-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
    f"00-{TRACE.upper()}-{PARENT}-01",
])
def test_what_is_no_traceparent_is_ignored(broken: str, collector: Collector, server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client)
        engine.client.lookup(s.Lookup(
            session=engine.session, member=engine.member, request="r", keys=keys(1), traceparent=broken
        ))
        eventually(lambda: len(collector.spans()) == 1)
        (span,) = collector.spans()
        assert span["parent_id"] == "" and span["trace_id"] != TRACE, "it begins a trace of its own"
        engine.close()


def test_a_later_version_may_say_more_and_an_unsampled_request_is_left_out(
    collector: Collector, server: ServerProcess
) -> None:
    with Client(server.unix) as client:
        engine = attach(client)
        for number, traceparent in enumerate((f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what-comes")):
            client.lookup(s.Lookup(
                session=engine.session, member=engine.member, request=str(number), keys=keys(1),
                traceparent=traceparent,
            ))
        eventually(lambda: len(collector.spans()) == 1)
        (span,) = collector.spans()
        assert (span["trace_id"], span["attributes"]["kvdock.request"]) == (TRACE, "1")
        with pytest.raises(ApiError) as refused:
            client.lookup(s.Lookup(
                session=engine.session, member=engine.member, request="r", keys=keys(1), traceparent="0" * 257
            ))
        assert refused.value.code == "invalid_body"
        engine.close()


def test_what_is_given_up_is_an_error(collector: Collector, server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(2, "a"))
        found, granted = engine.lookup(keys(2, "a"), "r"), engine.reserve(keys(2, "b"), store="b")
        assert found.lease and granted.reservation
        client.cancel(found.lease, engine.session, engine.member)
        client.abort(granted.reservation, s.Abort(session=engine.session, ranks=[0]))

        def errors() -> list[tuple[str, str]]:
            return sorted((span["name"], span["attributes"].get("kvdock.store", "")) for span in collector.spans()
                          if span["status"] == 2)

        eventually(lambda: errors() == [("kvdock.load", ""), ("kvdock.store", "b")])
        engine.close()


def test_so_many_wait_for_the_collector_and_the_rest_is_dropped() -> None:
    traces = Traces("http://127.0.0.1:9", version="0", instance="here")
    for number in range(QUEUE_EVENTS + 5):
        traces.take(Loaded(session="s", label="", request=str(number), lease="0" * 16, chunks=1, bytes=1, took_us=1))
    assert traces.spans == {"sent": 0, "failed": 0, "dropped": 5}
    traces.close()


@pytest.mark.parametrize(("given", "said"), [
    ({"observe": "log,traces"}, "for observe='log,traces'; found none"),
    ({"observe": "traces", "traces_endpoint": "collector:4318"}, "for observe='traces'; found another"),
    ({"traces_endpoint": "http://collector:4318"}, "wanted traces in observe="),
])
def test_half_a_wish_is_refused(given: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OTLP_VARIABLE, raising=False)
    with pytest.raises(SettingsError) as refused:
        Settings.load(given)
    assert said in str(refused.value)


def test_the_endpoint_of_all_exporters_counts_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OTLP_VARIABLE, "http://collector:4318")
    assert Settings.load({"observe": "traces"}).traces_endpoint == "http://collector:4318"
    assert Settings.load({}).observers == list(DEFAULT_OBSERVERS), "it switches nothing on"


def test_without_the_package_the_server_does_not_start_and_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
        "from kvdock.__main__ import main; main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "serve", "--observe", "traces", "--traces-endpoint", "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=60,
    )
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert "pip install 'kvdock[traces]'" in found.stderr


def test_a_server_without_traces_imports_nothing_of_them() -> None:
    code = "import sys, kvdock.api.server; sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("what", ["fail", "hang"])
def test_a_collector_that_fails_or_hangs_holds_up_nothing(
    what: str, collector: Collector, server: ServerProcess
) -> None:
    collector.now(what)
    with Client(server.unix) as client:
        engine = attach(client)
        for number in range(20):
            engine.lookup(keys(1), f"r{number}")
        if what == "fail":
            eventually(lambda: spans_of(server, "failed") == 20)
        assert spans_of(server, "sent") == 0 and client.status().counters["lookups"] == 20
        engine.close()
    assert server.stop() == 0
