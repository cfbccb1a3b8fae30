"""vLLM's spans of requests, around a real Scheduler that plans a step ahead: vLLM's own OutputProcessor is before and
behind it, and requests and outputs are packed and unpacked as between vLLM's processes. A real tracer provider keeps
the spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hook_scenarios import own_engine
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from sched_engine import SchedEngine
from sched_scenarios import prompt
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from warnings_heard import warnings_heard

from kvdock.connectors.vllm import request_spans

REAL = OutputProcessor.add_request, OutputProcessor.do_tracing


@contextmanager
def provided(sampled_share: float) -> Iterator[InMemorySpanExporter]:
    """What is kept of the spans of all that is started meanwhile."""
    kept, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBasedTraceIdRatio(sampled_share))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    before, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, provider  # OpenTelemetry lets a process set it once
    try:
        yield kept
    finally:
        trace._TRACER_PROVIDER = before
        OutputProcessor.add_request, OutputProcessor.do_tracing = REAL


class Served:
    """An engine, and what vLLM's API process has of it."""

    def __init__(self, engine: SchedEngine) -> None:
        self.engine, self.processor = engine, OutputProcessor(None, log_stats=True, tracing_enabled=True)
        self._pack = MsgpackEncoder().encode
        self._learn, engine.scheduler.update_from_output = engine.scheduler.update_from_output, self._told

    def ask(self, name: str, headers: Mapping[str, str] | None) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        asked = EngineCoreRequest(
            request_id=f"{name}-1", prompt_token_ids=prompt(1, 150), mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
            trace_headers=headers, external_req_id=name,
        )
        self.processor.add_request(asked, None)
        came = MsgpackDecoder(EngineCoreRequest).decode(self._pack(asked))
        request = Request.from_engine_core_request(came, self.engine._hasher)
        self.engine.requests[request.request_id] = request
        self.engine.scheduler.add_request(request)
        self.engine.run()
        self.engine.forget_prefixes()

    def _told(self, out: Any, result: Any) -> Any:
        outputs = self._learn(out, result)
        for made in outputs.values():
            came = MsgpackDecoder(EngineCoreOutputs).decode(self._pack(made))
            self.processor.process_outputs(came.outputs, came.timestamp, IterationStats())
        return outputs


def spans(
    address: str, headers: Sequence[Mapping[str, str] | None], *, sampled_share: float = 1.0, lacks: str = "",
    in_program: bool = False,
) -> dict[str, Any]:
    """vLLM's spans of requests with these trace headers, named 0, 1, …: by name, (trace, id, parent). `lacks`: a method
    that this vLLM has under another name; `in_program`: the caller is no server."""
    engine = own_engine(address, overlap=True)
    engine.config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:9"  # nobody sends there
    with provided(sampled_share) as kept, warnings_heard() as said:
        if lacks:
            setattr(OutputProcessor, lacks, lambda self, *args, **more: None)
        for _ in range(2):  # as for each engine of a process
            PrometheusStatLogger(engine.config, [0])
        if lacks:
            OutputProcessor.add_request = REAL[0]
        served = Served(engine)

        def asks() -> None:
            for number, one in enumerate(headers):
                served.ask(str(number), one)

        async def in_server() -> None:
            asks()

        asks() if in_program else asyncio.run(in_server())
    engine.close()
    found = {}
    for span in kept.get_finished_spans():
        assert span.name == request_spans.SPAN and span.context is not None and span.attributes is not None
        parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
        name = str(span.attributes["gen_ai.request.id"])
        found[name] = [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent]
    return {"spans": found, "said": said}


SCENARIOS = {"spans": spans}
