"""Offers the states at branches of SGLang's tree.

Where a second prompt leaves the path of a first one, SGLang keeps a recurrent state when the second one is computed.
The pages of that path were offered before, without the state, and SGLang offers no node of its tree twice. So when the
tree takes a state for a node that it does not offer by itself, the linker is offered the node once more. The server has
the node's KV, and the state alone is copied.

Such an offer stands in SGLang's list of pending ones, as all do, because SGLang hears of their ends in this order. It
publishes no node, so SGLang's tree does not depend on whether it succeeds.

Threads: SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any


def offer_state(
    cache: Any, params: Any, result: Any, pending: int,
    offering: Callable[[Sequence[str]], AbstractContextManager[None]],
) -> None:
    """SGLang's tree has inserted `params`, with that result. All ranks do the same, because their trees are equal.
    `pending`: how many offers SGLang had pending before; `offering`: see Naming."""
    if params.mamba_value is None or result.mamba_exist:
        return
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import _PendingOffload

    wrapper, core, node = cache.linker, cache.tree_core, result.last_device_node
    is_pending = any(one.lock_node_id == node for one in wrapper.pending_offloads[pending:])
    if is_pending or core.build_external_linker_offload_transfers(node) is not None:
        return
    above = cache.get_prefix_hash_values(node)
    transfers = _transfers(cache, node, params.key, above)
    lock = cache.inc_lock_ref(node).to_dec_params()
    with offering(above):
        is_queued = wrapper.cache_linker.offload(transfers)
    if is_queued:
        wrapper.pending_offloads.append(_PendingOffload(node, lock, []))
    else:
        cache.dec_lock_ref(node, lock)


def _transfers(cache: Any, node: Any, key: Any, above: Sequence[str]) -> list[Any]:
    """What SGLang offers of a node: the KV of its pages, and the state at its end. `key`: SGLang's RadixKey that ends
    with the node; `above`: the hashes of the pages before it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    size, own = cache.page_size, key.page_aligned(cache.page_size)
    pages = get_storage_hash_str(own[len(above) * size :], above[-1] if above else None, page_size=size)
    kv, state = (
        cache.tree_core.get_component_device_value(node, component)
        for component in (ComponentType.FULL, ComponentType.MAMBA)
    )
    return [
        PoolTransfer(name=PoolName.KV, device_indices=kv, keys=list(pages)),
        PoolTransfer(name=PoolName.MAMBA, device_indices=state, keys=[pages[-1]]),
    ]
