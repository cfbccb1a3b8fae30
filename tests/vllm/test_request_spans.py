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
from served_engine import NAME, ServedEngine
from whole_engines import prompts_of

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
            assert lies_within(under["lookup"], own) and lies_within(under.get("load", own), own)
            assert own["start_ns"] <= under.get("store", own)["start_ns"] <= own["end_ns"]
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
        assert server_info(engine)["scheduler_config"]["async_scheduling"]
