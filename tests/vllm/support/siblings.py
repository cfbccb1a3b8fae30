"""Connectors that vLLM's MultiConnector has beside kvdock's: each does one thing that others of their kind do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

FAILS = "fails"
"""Requests whose loads fail have names that begin so."""
SLOW_S = 0.1
"""Long enough for the background to reserve, copy and publish."""


@dataclass
class Payload(KVConnectorHandshakeMetadata):
    """What workers of Handshakes tell its scheduler's side."""


@dataclass
class Blocks(KVConnectorMetadata):
    """To be loaded in the step, by request."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class Idle(KVConnectorBase_V1, SupportsHMA):
    """Has nothing to load and stores nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class Handshakes(Idle):
    """Exchanges a handshake of its own and accepts no other, as connectors that disaggregate prefill do."""

    def get_handshake_metadata(self) -> Payload:
        return Payload()

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for one in metadata.values():
            if not isinstance(one, Payload):
                raise ValueError(f"a Payload was wanted, found {one!r}")
        self.is_introduced = True

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))


class FailingLoads(Idle):
    """Promises 64 tokens of a request that FAILS, once, and loads nothing. `load_async`, a setting: in the background.
    It tells of the failure as late as it may, and holds up the next step before that computes: what others do in the
    background is done by then."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._in_background = bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get("load_async"))
        self._promised: set[str] = set()
        self._begun: dict[str, list[int]] = {}
        self._failed: dict[str, list[int]] = {}
        self._has_failed = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not request.request_id.startswith(FAILS) or request.request_id in self._promised or num_computed_tokens:
            return 0, False
        return 64, self._in_background

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            self._begun[request.request_id] = blocks.get_block_ids()[0][: num_external_tokens // 16]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        begun, self._begun = self._begun, {}
        return Blocks(begun)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Blocks)
        time.sleep(SLOW_S if self._has_failed else 0.0)
        self._has_failed = bool(metadata.loads)
        self._failed.update(metadata.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        time.sleep(SLOW_S if self._failed else 0.0)
        return None, set(self._failed) if self._in_background and self._failed else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, {}
        return {block for blocks in failed.values() for block in blocks}
