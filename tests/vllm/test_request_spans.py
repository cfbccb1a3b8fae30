"""One trace: a real collector gets vLLM's span of each request, and kvdock's spans of it as children of that one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_helpers import ServerProcess, comes_true
from otlp_collector import Collector
from schedulers import Schedulers, every_version
from served_engine import NAME, ServedEngine
from whole_engines import prompts_of

from kvdock.client.events import read_events
from kvdock.client.transport import Address

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ENGINE = (
    "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "32",
    "--num-gpu-blocks-override", "100", "--max-num-seqs", "8",
)
CONNECTOR = {
    "kv_connector": "KvdockConnector", "kv_role": "kv_both",
    # How busy the machine is decides as little as can be set.
    "kv_connector_extra_config": {"lookup_wait_s": 1.0, "timeout_s": 30.0, "load_if_cheaper": False},
}
PROMPT = prompts_of(0)[2]
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SKEW_NS = 2_000
"""Events have microseconds."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started
def contexts_at(server: ServerProcess) -> dict[str, set[str]]:
    """The trace contexts of the events of each request: what kvdock's spans have for their parent."""
    found: dict[str, set[str]] = {}
    for one in read_events(Address.parse(server.unix), kinds="looked_up,leased,loaded,request_ended"):
        found.setdefault(one.event["request"].removesuffix("-1"), set()).add(one.event["traceparent"])
    return found


def contexts_of(spans: dict[str, list[str]]) -> dict[str, set[str]]:
    return {name: {f"00-{trace}-{span}-01"} for name, (trace, span, _) in spans.items()}


@pytest.mark.every_minor
@every_version
def test_what_kvdock_hears_of_a_request_is_the_id_of_the_span_that_vllm_makes_later(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    headers = [{"traceparent": f"00-{TRACE}-{CLIENT}-01"}] * 2 + [{"traceparent": "hello"}, None]
    found = schedulers.run(version, "spans", server.unix, headers, module="span_scenarios")
    assert found["said"] == []
    spans = found["spans"]
    assert contexts_at(server) == contexts_of(spans) and len(spans) == 4
    assert [spans[name][0] == TRACE for name in "0123"] == [True, True, False, False]
    assert [spans[name][2] for name in "0123"] == [CLIENT, CLIENT, "", ""]
    assert len({span for _, span, _ in spans.values()}) == 4 and len({trace for trace, _, _ in spans.values()}) == 3


@every_version
def test_of_a_request_that_is_not_sampled_neither_makes_a_span(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    headers = [{"traceparent": f"00-{TRACE}-{CLIENT}-00"}, None, {"traceparent": f"00-{TRACE}-{CLIENT}-01"}]
    found = schedulers.run(version, "spans", server.unix, headers, sampled_share=0.0, module="span_scenarios")
    assert list(found["spans"]) == ["2"]
    said = contexts_at(server)
    assert [{one[-2:] for one in said[name]} for name in "012"] == [{"00"}, {"00"}, {"01"}]


@every_version
@pytest.mark.parametrize("lacks", ["add_request", "do_tracing"])
def test_a_vllm_with_other_methods_is_left_alone_and_one_line_says_so(
    lacks: str, version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    client = f"00-{TRACE}-{CLIENT}-01"
    found = schedulers.run(
        version, "spans", server.unix, [{"traceparent": client}, None], lacks=lacks, module="span_scenarios"
    )
    (line, again) = found["said"]
    assert line == again and f"OutputProcessor.{lacks}(" in line and "beside vLLM's own" in line
    assert contexts_at(server) == {"0": {client}, "1": {""}}


@every_version
def test_in_a_program_a_request_without_a_trace_may_stand_under_the_programs_span(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "spans", server.unix, [None], in_program=True, module="span_scenarios")
    assert found["spans"].keys() == {"0"} and contexts_at(server) == {"0": {""}}


def ask(engine: ServedEngine, traceparent: str = "", **how: Any) -> str:
    """Its id, as the answer has it."""
    headers = {"traceparent": traceparent} if traceparent else {}
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **how}
    answered = httpx.post(f"{engine.url}/v1/completions", json=asked, headers=headers, timeout=120)
    assert answered.status_code == 200, answered.text
    httpx.post(f"{engine.url}/reset_prefix_cache", timeout=60).raise_for_status()  # the next one loads
    return str(answered.json()["id"])


def children(spans: list[dict[str, Any]], of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, without what the names of kvdock's spans begin with."""
    found = [one for one in spans if (one["trace_id"], one["parent_id"]) == (of["trace_id"], of["span_id"])]
    return {one["name"].removeprefix("kvdock."): one for one in found}


def lies_within(span: dict[str, Any], around: dict[str, Any]) -> bool:
    return bool(around["start_ns"] - SKEW_NS <= span["start_ns"] <= span["end_ns"] <= around["end_ns"] + SKEW_NS)


def test_all_that_kvdock_did_for_a_request_stands_under_vllms_span_of_it(
    models: dict[str, Path], tmp_path: Path, collector: Collector
) -> None:
    with ServerProcess(
        observe="log,stream,metrics,traces", traces_endpoint=collector.endpoint, pool_bytes=64 << 20,
        segment_bytes=64 << 20,
    ) as server, ServedEngine(
        models["llama"], tmp_path, *ENGINE, "--kv-transfer-config", json.dumps(CONNECTOR),
        "--otlp-traces-endpoint", f"{collector.endpoint}/v1/traces",
        environ={
            "KVDOCK_ADDRESS": server.unix, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "200", "VLLM_SERVER_DEV_MODE": "1",
        },
    ) as engine:
        engine.wait_ready()
        stores = ask(engine, f"00-{TRACE}-{CLIENT}-01")
        loads = ask(engine, f"00-{TRACE}-{CLIENT[::-1]}-01")
        alone = ask(engine)
        twice = ask(engine, f"00-{TRACE}-{CLIENT}-01", n=2, temperature=1.0)
        unsampled = ask(engine, f"00-{TRACE[::-1]}-{CLIENT}-00")

        def of_requests() -> list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
            spans = collector.spans()
            return [(one, children(spans, one)) for one in spans if one["name"] == "llm_request"]

        assert comes_true(lambda: len(of_requests()) == 5 and all("request" in under for _, under in of_requests())), (
            f"{collector.spans()}\n{engine.log_text()[-4000:]}"
        )
        by_id: dict[str, list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]] = {}
        for own, under in of_requests():
            by_id.setdefault(own["attributes"]["gen_ai.request.id"].rsplit("-", 1)[0], []).append((own, under))
            assert all(own["attributes"]["gen_ai.request.id"] in one["attributes"].get("kvdock.request", "")
                       for name, one in under.items() if name != "store")
            assert lies_within(under["lookup"], own)
            # A load ends when its lease has been given back, for which no request waits.
            assert own["start_ns"] - SKEW_NS <= under.get("load", own)["start_ns"] <= own["end_ns"]
            # A store may begin later still: vLLM's span ends with the answer, whatever the engine has left to do.
            assert own["start_ns"] <= under.get("store", own)["start_ns"]
        assert {name: len(found) for name, found in by_id.items()} == {stores: 1, loads: 1, alone: 1, twice: 2}
        assert unsampled not in by_id
        ((first, stored),), ((second, loaded),), ((root, of_root),) = by_id[stores], by_id[loads], by_id[alone]
        assert (first["trace_id"], first["parent_id"]) == (TRACE, CLIENT) and set(stored) == {
            "lookup", "store", "request"
        }
        assert (second["trace_id"], second["parent_id"]) == (TRACE, CLIENT[::-1]) and set(loaded) == {
            "lookup", "load", "request"
        }
        assert root["parent_id"] == "" and root["trace_id"] != TRACE and set(of_root) == {"lookup", "load", "request"}
        one, other = (own for own, _ in by_id[twice])
        assert one["span_id"] != other["span_id"] and one["parent_id"] == other["parent_id"] == CLIENT
        known = {own["span_id"] for own, _ in of_requests()}
        ours = [span for span in collector.spans() if span["name"].startswith("kvdock.")]
        assert ours and {span["parent_id"] for span in ours} <= known, "nobody else's child, and none begins a trace"
        assert "kvdock's spans of a request stand beside" not in engine.log_text()
