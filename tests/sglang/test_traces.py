"""One trace: a real collector gets a whole SGLang engine's span of each request, and kvdock's spans of that request as
its children."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from engines import TP2, Engine
from otlp_collector import Collector
from whole_engines import HITS, PROMPTS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT, HIT = PROMPTS[2:], HITS[2:]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture
def server(collector: Collector) -> Iterator[ServerProcess]:
    with ServerProcess(
        observe="log,stream,metrics,traces", traces_endpoint=collector.endpoint, pool_bytes=64 << 20,
        segment_bytes=64 << 20,
    ) as started:
        yield started


def ask(engine: Engine, cached: list[int], context: str = "") -> None:
    headers = {"external_trace_header": {"traceparent": context}} if context else {}
    assert engine.generate(PROMPT, **headers)[1] == cached
    engine.drain()
    engine.flush()


def under(spans: list[dict[str, Any]], span: dict[str, Any]) -> set[str]:
    """The names of kvdock's spans that are children of `span`."""
    context = span["trace_id"], span["span_id"]
    return {
        one["name"] for one in spans
        if (one["trace_id"], one["parent_id"]) == context and one["name"].startswith("kvdock.")
    }


@pytest.mark.parametrize("how", [
    {}, {"environ": {"SGLANG_TRACE_ASYNC": "1"}}, TP2,
], ids=["one rank", "spans are made elsewhere", "two ranks"])
def test_all_that_kvdock_did_for_a_request_stands_under_sglangs_span_of_it(
    how: dict[str, Any], models: dict[str, Path], server: ServerProcess, collector: Collector
) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "200",
        **how.get("environ", {}),
    }
    tracing = {"enable_trace": True, "otlp_traces_endpoint": f"{collector.endpoint}/v1/traces", **how.get("engine", {})}
    with Engine(models["llama"], server.unix, engine=tracing, environ=environ) as engine:
        ask(engine, [0], f"00-{TRACE}-{CLIENT}-01")
        ask(engine, HIT, f"00-{TRACE[::-1]}-{CLIENT[::-1]}-01")
        ask(engine, HIT)

        def of_requests() -> dict[str, tuple[str, set[str]]]:
            """By trace, the parent of SGLang's span, and what stands under it."""
            spans = collector.spans()
            return {
                one["trace_id"]: (one["parent_id"], under(spans, one)) for one in spans if "rid" in one["attributes"]
            }

        assert comes_true(lambda: [len(names) for _, names in of_requests().values()] == [3, 3, 3]), collector.spans()
        found = of_requests()
        loads = {"kvdock.lookup", "kvdock.load", "kvdock.request"}
        assert found.pop(TRACE) == (CLIENT, {"kvdock.lookup", "kvdock.store", "kvdock.request"})
        assert found.pop(TRACE[::-1]) == (CLIENT[::-1], loads)
        assert list(found.values()) == [("", loads)]


def test_a_request_of_an_engine_that_traces_nothing_begins_a_trace(
    models: dict[str, Path], server: ServerProcess, collector: Collector
) -> None:
    with Engine(models["llama"], server.unix) as engine:
        ask(engine, [0], f"00-{TRACE}-{CLIENT}-01")
        assert comes_true(lambda: len(collector.spans()) == 3)
        assert {span["parent_id"] for span in collector.spans()} == {""}
