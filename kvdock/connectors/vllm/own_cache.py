"""What one request has loaded, and others find in vLLM's own prefix cache once it has come
(kvdock/connectors/load_once.py).

vLLM names what its cache has by hashes of its own: an adapter's name and a client's name of an image are in them, so
that requests whose KV is the same, and whose keys are equal, may have other hashes. Then neither finds what the other
has loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.vllm.groups import KVGroup, step_tokens
from kvdock.connectors.vllm.setup import drafts_with_kv


@dataclass(frozen=True)
class OwnCache:
    """`hash_tokens`: how many tokens each of vLLM's hashes stands for; `lost_tokens` and `whole`: as LoadOnce has
    them."""

    hash_tokens: int
    lost_tokens: int = 0
    whole: bool = False

    def shares(self, first: Any, second: Any, tokens: int) -> bool:
        """Whether the first `tokens` tokens of two requests have one name."""
        at = tokens // self.hash_tokens - 1
        names, others = first.block_hashes, second.block_hashes
        return 0 <= at < min(len(names), len(others)) and bool(names[at] == others[at])


def own_cache_of(vllm_config: Any, groups: Sequence[KVGroup], hash_tokens: int) -> OwnCache | None:
    """None: other requests do not find what one has loaded. Nor is it known of recurrent states, of which a load brings
    one alone; and with drafts' KV vLLM wants one block more before the end than a window needs, which is not loaded."""
    has_windows = any(group.window_tokens is not None for group in groups)
    has_drafts = drafts_with_kv(vllm_config) is not None
    if not vllm_config.cache_config.enable_prefix_caching or any(group.state for group in groups):
        return None
    if has_windows and has_drafts:
        return None
    return OwnCache(hash_tokens, step_tokens(groups) if has_drafts else 0, has_windows)
