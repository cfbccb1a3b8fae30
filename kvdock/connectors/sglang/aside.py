"""The linker of an engine that kvdock cannot serve on this machine: it finds, loads and stores nothing, so SGLang runs
as without it."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvdock.connectors.sglang.loads import LayerCounter
from kvdock.connectors.sglang.pools import FULL


class AsideLinker(UnifiedCacheLinker):
    def __init__(self, kvcache: Any, forward_stream: Any = None) -> None:
        self.forward_stream, self.pools = forward_stream, {PoolName(FULL): kvcache}
        self.layer_done_counter = LayerCounter(kvcache.layer_num, lambda batch, layer: None)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        return False

    def reset(self) -> None: ...

    def close(self) -> None: ...
