"""KV cache events as vLLM publishes them (`--kv-events-config`), for routers that send requests where their prefix is.

A chunk is the blocks of each group of full attention, with the hashes that vLLM's own events name them by. The medium
is "CPU", as for vLLM's own offloading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvdock.connectors.session import EngineSession
from kvdock.connectors.vllm.announcer import Announcer, Told
from kvdock.connectors.vllm.groups import KVGroup

MEDIUM = "CPU"


class Events:
    """Of an engine of `kv_cache_config`, from what `announcer` says; vLLM makes a hash of `hash_tokens` tokens."""

    def __init__(self, announcer: Announcer, groups: Sequence[KVGroup], kv_cache_config: Any, hash_tokens: int) -> None:
        self.announcer, self._hash_tokens = announcer, hash_tokens
        kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups]
        self._groups = [
            (index, kind, max(1, group.block_tokens // hash_tokens))
            for index, (group, kind) in enumerate(zip(groups, kinds, strict=True)) if group.window_tokens is None
        ]

    def take(self) -> list[KVCacheEvent]:
        """Of chunks that can be loaded since they were last taken, and that cannot any more."""
        return [self._event(told, *group) for told in self.announcer.take() for group in self._groups]

    def _event(self, told: Told, group: int, kind: str, step: int) -> KVCacheEvent:
        # Each hash covers all tokens before it: that of a block is that of its last tokens.
        hashes = [maybe_convert_block_hash(BlockHash(one)) for one in told.chunk.hashes[step - 1 :: step]]
        if not told.is_there:
            return BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=group)
        before = told.chunk.parent
        parent = maybe_convert_block_hash(BlockHash(before)) if before is not None else None
        return BlockStored(
            block_hashes=hashes, parent_block_hash=parent, token_ids=list(told.chunk.tokens),
            block_size=step * self._hash_tokens, lora_id=None, lora_name=None, medium=MEDIUM, group_idx=group,
            kv_cache_spec_kind=kind,
        )


def events_of(
    config: Any, kv_cache_config: Any, groups: Sequence[KVGroup], session: EngineSession, hash_tokens: int
) -> Events | None:
    """None when this engine publishes no events."""
    wanted = config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    announcer = Announcer(session, session.manifest.chunk_tokens, hash_tokens)
    return Events(announcer, groups, kv_cache_config, hash_tokens)
