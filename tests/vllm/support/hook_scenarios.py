"""vLLM's statistics, reset and sleep hooks around a real Scheduler.

Each has a namespace of its own at the server. Statistics take the way they take in vLLM: out of the step's output,
packed and unpacked as between its processes, into its own Prometheus and text loggers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sched_engine
import torch
from sched_engine import BLOCK, SchedEngine
from sched_scenarios import prompt
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from warnings_heard import warnings_heard

from kvdock.connectors.vllm.setup import ON_RESET
from kvdock.connectors.waits import MOST_EARLY


def own_engine(address: str, **settings: Any) -> SchedEngine:
    """In a namespace that no other has."""
    return SchedEngine(address, weights_digest=os.urandom(8).hex(), **settings)


def tell(engine: SchedEngine) -> tuple[dict[str, float], list[str]]:
    """(samples of our Prometheus metrics that are not zero, lines of the text log), as they come: read them later."""
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    packer, unpacker = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    prometheus, text = PrometheusStatLogger(engine.config, [0]), KVConnectorLogging(engine.config.kv_transfer_config)
    samples: dict[str, float] = {}
    lines: list[str] = []
    update = engine.scheduler.update_from_output

    def told(out: Any, result: Any) -> Any:
        outputs = update(out, result)
        for made in outputs.values():
            stats = unpacker.decode(packer.encode(made)).scheduler_stats
            if stats is not None:
                prometheus.record(stats, None, engine_idx=0)
                if stats.kv_connector_stats:
                    text.observe(stats.kv_connector_stats)
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("vllm:kvdock") and sample.value and "le" not in sample.labels:
                    if sample.name.endswith("_created"):
                        continue
                    assert sample.labels["engine"] == "0" and "model_name" in sample.labels
                    samples[sample.name.removeprefix("vllm:kvdock_")] = sample.value
        text.log(lambda form, *words: lines.append(form % words))
        return outputs

    engine.scheduler.update_from_output = told
    return samples, lines


def statistics(address: str) -> dict[str, Any]:
    """Cold, and loaded after the engine's own prefix cache was dropped."""
    engine = own_engine(address)
    samples, lines = tell(engine)
    engine.complete("cold", prompt(1, 150))
    cold = dict(samples)
    engine.forget_prefixes()
    engine.complete("warm", prompt(1, 150))
    engine.step()  # figures of what ended last
    found = {"cold": cold, "warm": dict(samples), "lines": lines}
    engine.close()
    return found


def two_workers(address: str) -> dict[str, Any]:
    """vLLM's aggregator over the outputs of two workers, one of which has nothing to say; then over two that have."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvdock.connectors.vllm.exports import KvdockStats

    def output(data: dict[str, Any] | None) -> ModelRunnerOutput:
        stats = None if data is None else KvdockStats.of(data)
        return ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(kv_connector_stats=stats)
        )

    sums = []
    one = {"load_bytes": 5, "load_seconds": [0.5]}
    two = {"load_bytes": 7, "load_seconds": [0.25], "fence_seconds": 0.125}
    for workers in ([None, one], [one, two], [None, None]):
        done = KVOutputAggregator(2).aggregate([output(data) for data in workers])
        stats = done.kv_connector_output.kv_connector_stats
        sums.append(None if stats is None else stats.data)
    return {"sums": sums, "untouched": one}


@contextmanager
def other_weights(engine: SchedEngine) -> Iterator[None]:
    """What is computed has other fingerprints from now on: what was stored before is wrong when it is read."""
    real = sched_engine.fingerprints
    sched_engine.fingerprints = lambda group, tokens, known: real(group + 100, tokens, known)
    engine._prints.clear()
    try:
        yield
    finally:
        sched_engine.fingerprints = real


def loaded(engine: SchedEngine, name: str) -> int:
    """Tokens loaded for the prompt that all share."""
    before = engine.loaded_tokens
    engine.complete(name, prompt(1, 150))
    return engine.loaded_tokens - before


def refused(address: str) -> dict[str, Any]:
    """vLLM receives more requests than are asked about early, and its scheduler hears of none. Then others run."""
    engine = own_engine(address)
    loaded(engine, "cold")
    engine.forget_prefixes()
    connector = engine.scheduler.connector
    half, client = connector._scheduler, connector._scheduler._session.client
    connector.set_xfer_handshake_metadata({0: engine.worker.get_handshake_metadata()})  # as when vLLM wakes
    assert connector._scheduler is half

    def leases(count: int) -> int:
        """Once there are so many, or after a while."""
        until_s = time.monotonic() + 10.0
        while (found := len(client.leases().leases)) != count and time.monotonic() < until_s:
            time.sleep(0.01)  # calls end in the background
        return found

    for number in range(MOST_EARLY + 1):
        for _ in range(2):
            connector.kvdock_received(engine.made(f"never-{number}", prompt(1, 150)))
    asked = leases(MOST_EARLY)
    hit = loaded(engine, "taken")
    engine.complete("long", prompt(2, 40), max_tokens=12)
    early = half._arrivals.early
    left = {"tracked": len(half._tracked), "open": len(early._open), "waiting": len(early._waiting)}
    left |= {"asked": len(half._outcomes._asked), "stories": len(half._outcomes._stories)}
    found = {"leases": [asked, leases(0)], "hit": hit, "left": left}
    engine.close()
    return found


def reset(address: str) -> dict[str, Any]:
    """What was stored is loaded, until vLLM resets the connector; then what was stored after it."""
    engine = own_engine(address)
    hits = [loaded(engine, "cold")]
    engine.forget_prefixes()
    hits.append(loaded(engine, "before"))
    with other_weights(engine):
        answer = engine.scheduler.reset_prefix_cache(reset_connector=True)
        hits.append(loaded(engine, "after"))
        engine.forget_prefixes()
        hits.append(loaded(engine, "again"))
    engine.close()
    return {"hits": hits, "answer": answer, "bad_reads": len(engine.bad_reads)}


def reset_during_store(address: str) -> dict[str, Any]:
    """A store that a worker is at work on when vLLM resets: its reservation is closed, so it publishes nothing."""
    from kvdock.connectors.worker import WorkerConnector

    engine = own_engine(address)
    real, begun, go_on = WorkerConnector.finish_store, threading.Event(), threading.Event()
    published = []

    def held(self: WorkerConnector, storing: Any, **how: Any) -> int:
        begun.set()
        assert go_on.wait(20)
        published.append(real(self, storing, **how))
        return published[-1]

    WorkerConnector.finish_store = held  # type: ignore[method-assign]  # the real store, a moment later
    try:
        engine.add("cold", prompt(1, 150), 2)
        while not begun.is_set():
            engine.step()
        while not engine.requests["cold"].is_finished():
            engine.step()
        answer = engine.scheduler.reset_prefix_cache(reset_connector=True)
        go_on.set()
        engine.run()
    finally:
        WorkerConnector.finish_store = real  # type: ignore[method-assign]  # as it was
    hits, clearing = [], engine.scheduler.connector._scheduler._resets.clearing
    with other_weights(engine):
        for name in ("after", "again", "more"):
            hits.append(loaded(engine, name))
            engine.forget_prefixes()
            until = time.monotonic() + 20
            while not clearing.is_over and time.monotonic() < until:  # what was stored late is cleared once more
                engine.step()
    engine.close()
    return {
        "hits": hits, "answer": answer, "stores": len(published), "published": sum(published),
        "bad_reads": len(engine.bad_reads),
    }


def reset_running(address: str, *, preempts: bool) -> dict[str, Any]:
    """A request runs while the connector is reset. Unless it starts anew, nothing that it computes is stored."""
    engine = own_engine(address, budget=64)
    request = engine.add("runs", prompt(1, 150), 300)
    while request.num_computed_tokens < 128 or engine.scheduler.connector.has_pending_push_work():
        engine.step()
        time.sleep(0.05)  # stores end in other threads, and 300 tokens have to outlast them
    assert not request.is_finished()
    hits = []
    if not preempts:  # what it computes is neither old nor new
        answer = engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.run()
    with other_weights(engine):
        if preempts:
            answer = engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
            engine.run()
        for name in ("after", "again"):
            engine.forget_prefixes()
            hits.append(loaded(engine, name))
    engine.close()
    return {"hits": hits, "answer": answer, "bad_reads": len(engine.bad_reads)}


def sleep(address: str) -> dict[str, Any]:
    """Whether an engine with sleep mode starts: what vLLM and the connector say, by `on_reset`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    engine = own_engine(address)
    engine.config.model_config.enable_sleep_mode = True  # no platform of this machine lets it be asked for
    said = {}
    for on_reset in ON_RESET:
        engine.config.kv_transfer_config.kv_connector_extra_config["on_reset"] = on_reset
        try:
            getattr(engine.config, "_verify_kv_transfer_compat", lambda: None)()
            KVConnectorFactory.create_connector(
                config=engine.config, role=KVConnectorRole.WORKER, kv_cache_config=engine.worker._kv_cache_config
            )
            said[on_reset] = ""
        except ValueError as error:
            said[on_reset] = str(error)
    engine.worker.unregister_kv_caches()
    engine.worker.unregister_kv_caches()  # vLLM may say so twice
    engine.close()
    return said


class RecurrentEngine(SchedEngine):
    """Half of its layers keep a recurrent state. Nothing is computed."""

    def spec(self, window: int | None, size: int) -> Any:
        if window is None:
            return super().spec(window, size)
        return MambaSpec(block_size=size, shapes=((BLOCK, 4),), dtypes=(torch.float16,))

    def _remembered(self) -> int:
        return len(self.scheduler.connector._early.requests)

    def _forward(self, out: Any) -> ModelRunnerOutput:
        names = list(out.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7]] * len(names),
        )


def aside(address: str) -> dict[str, Any]:
    """A model with recurrent states: what is said of it, and what its requests become."""
    with warnings_heard() as said:
        engine = RecurrentEngine(
            address, windows=(None, 0), sizes=(BLOCK, sched_engine.LONGEST), prefix_caching=False, states="none"
        )
    for name in ("first", "second"):
        engine.complete(name, prompt(1, 150))
    made = [request.num_output_tokens for request in engine.requests.values()]
    connector = engine.scheduler.connector
    told = connector.get_kv_connector_stats(), connector.reset_cache(), connector.has_pending_push_work()
    engine.close()
    return {"said": said, "made": made, "loaded": engine.loaded_tokens, "told": told, "remembered": engine.remembered}
