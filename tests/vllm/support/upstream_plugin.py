"""pytest plugin for vLLM's own tests of connectors: what they make has kvdock's, at the server KVDOCK_ADDRESS.

The tests make engines with functions of theirs. Before the tests are imported, three of these are replaced: the
configuration names kvdock, the Scheduler is handed a real worker's handshake, and the connector that only counts calls
hands them on to the real one. What steps bring is still made up by the tests. So the worker is at work only when a test
has ended: it makes the stores that were planned, and then the server must have nothing that did not come, and the
connector must have forgotten all requests.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sched_engine import CONFIG
from tests.v1.kv_connector.unit import utils as theirs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvdock.connectors.vllm.connector import KvdockConnector, Metadata

SKIPPED = {"test_p_side_chunked_prefill_mamba": "NIXL alone cuts the last token off a prompt, for who takes its state"}

LONGEST_S = 20.0
"""What planned stores, and an answer, may take on a busy machine."""


class UpstreamConnector(KvdockConnector):
    """kvdock's, with two additions. It promises what a test says that another engine holds, once. And it remembers
    what it was told: `valid` has by request how many of its first tokens came or were computed, if not all."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.seen: dict[str, Any] = {}
        self.planned: list[Metadata] = []
        self.valid: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}

    def on_new_request(self, request: Any) -> None:
        self.seen[request.request_id] = request
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            promised = request.num_prompt_tokens - num_computed_tokens
            return promised, promised > 0
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._blocks[request.request_id] = blocks.get_block_ids()[0]
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            computed = self.seen[request_id].num_computed_tokens
            if computed <= self.valid.get(request_id, -1):
                self.valid[request_id] = computed + count
        self.planned.append(super().build_connector_meta(scheduler_output))
        return self.planned[-1]

    def update_connector_output(self, connector_output: Any) -> None:
        block_tokens = self._config.cache_config.block_size
        for request_id, blocks in self._blocks.items():
            bad = [at for at, block in enumerate(blocks) if block in connector_output.invalid_block_ids]
            if bad:
                self.valid[request_id] = min(bad[0] * block_tokens, self.valid.get(request_id, 1 << 62))
            if request_id in connector_output.failed_recving:
                self.valid[request_id] = 0
        super().update_connector_output(connector_output)


class Upstream:
    """A Scheduler of a test, and both sides of its connector."""

    def __init__(self, config: Any, scheduler: Any) -> None:
        self.scheduler, self.connector = scheduler, scheduler.connector
        cache = scheduler.kv_cache_config
        with set_current_vllm_config(config):
            self.worker = KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.WORKER, kv_cache_config=cache
            )
        self.worker.register_kv_caches({
            layer: torch.zeros((cache.num_blocks, group.kv_cache_spec.page_size_bytes), dtype=torch.uint8)
            for group in cache.kv_cache_groups for layer in group.layer_names
        })
        told = self.worker.get_handshake_metadata()
        if told is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})

    def check(self) -> None:
        """The test has ended."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._store()
        found = {name: self._found(request) for name, request in list(self.connector.seen.items())}
        wrong = {name: tokens for name, tokens in found.items() if tokens > self.connector.valid.get(name, tokens)}
        assert not wrong, f"the server has {wrong} tokens, of which {self.connector.valid} came"
        side = self.connector._scheduler
        if side is not None:
            lookups, early = side._connector.lookups, side._arrivals.early
            kept = (side._tracked, side._outcomes._stories, lookups._sent, early._waiting)
            assert not any(kept), f"requests that have ended are remembered: {kept}"

    def close(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()

    def _store(self) -> None:
        """The worker makes what steps have planned, and what empty ones still plan. Loads are the tests' own."""
        end = time.monotonic() + LONGEST_S
        while self.connector.planned or self.connector.has_pending_push_work():
            assert time.monotonic() < end, "stores do not end"
            if not self.connector.planned:
                self.connector.build_connector_meta(SchedulerOutput.make_empty())
                time.sleep(0.001)  # they end in other threads
            orders = Metadata(replace(self.connector.planned.pop(0).orders, loads=()))
            self.worker.handle_preemptions(orders)
            self.worker.bind_connector_metadata(orders)
            self.worker.start_load_kv(None)
            self.worker.get_finished(set())
            told = self.worker.build_connector_worker_meta()
            self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))

    def _found(self, request: Any) -> int:
        """How many of its tokens the server has."""
        again = copy.copy(request)
        again.request_id, again.kv_transfer_params = f"again-{request.request_id}", None
        self.connector.on_new_request(again)
        end, found = time.monotonic() + LONGEST_S, None
        while found is None:
            assert time.monotonic() < end, "no answer"
            found, _ = self.connector.get_num_new_matched_tokens(again, 0)
        self.connector.request_finished(again, [])
        return found


made: list[Upstream] = []


def create_vllm_config(**wanted: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        config = real_config(model=folder, **wanted | {
            "kv_connector": UpstreamConnector.__name__, "kv_connector_module_path": __name__, "kv_role": "kv_both",
            "kv_connector_extra_config": {"weights_digest": os.urandom(8).hex()},  # a namespace of its own
        })
    config.model_config.skip_tokenizer_init = True
    return config


def create_scheduler(vllm_config: Any, *arguments: Any, **named: Any) -> Any:
    with set_current_vllm_config(vllm_config):
        scheduler = real_scheduler(vllm_config, *arguments, **named)
    made.append(Upstream(vllm_config, scheduler))
    return scheduler


def create_mock_connector() -> Mock:
    """Calls reach the connector of the test's Scheduler, whatever the test says that they return; but where it says
    what they do, as for lookups, that counts."""
    real = made[-1].connector
    methods = [name for name in dir(type(real)) if not name.startswith("_") and callable(getattr(type(real), name))]
    return Mock(requires_kv_delivery=False, **{f"{name}.side_effect": getattr(real, name) for name in methods})


real_config, real_scheduler = theirs.create_vllm_config, theirs.create_scheduler
for replaced in (create_vllm_config, create_scheduler, create_mock_connector):
    setattr(theirs, replaced.__name__, replaced)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if item.originalname in SKIPPED:
            item.add_marker(pytest.mark.skip(reason=SKIPPED[item.originalname]))


@pytest.fixture(autouse=True)
def nothing_wrong_is_stored() -> Iterator[None]:
    yield
    running, made[:] = made[:], []
    for upstream in running:
        try:
            upstream.check()
        finally:
            upstream.close()
