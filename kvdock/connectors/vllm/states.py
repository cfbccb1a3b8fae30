"""Recurrent states (Mamba, linear attention, short convolutions): a step changes them, where attention adds to its KV.

With mamba_cache_mode "align" a request has its state in the block of its newest token, and only there. A step reads the
state in the block of the last token before it, and leaves it in the block of its own last token. So
- a step that ends at the boundary of a block leaves a state there that no step changes any more: the next one leaves
  its own in another block, and vLLM frees this one, as it frees the blocks that a window has left behind;
- a step that starts at such a boundary reads the state there;
- the content of every other block is not known: a state inside the block, or another request's KV.
Stored are the states at such boundaries (`settled` in tables.py), and the states that vLLM itself reports to
connectors, because newer kernels leave a state at a boundary inside a step. A hit ends where a state was stored, and
its load fills the one block that the next step reads. So a state is stored like a window of one token, and a chunk is
one block.

Draft tokens that are rejected would already have changed the state, so with drafts nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvdock.connectors.errors import CannotCacheError, NotSupportedError
from kvdock.connectors.vllm.groups import KVGroup, step_tokens


def refuse_unreconciled_hits(vllm_config: Any, kv_cache_config: Any, *, reconciles: bool) -> None:
    """Raises NotSupportedError where vLLM would read states that it does not have. `reconciles`: whether vLLM's own
    hits end where all groups have what they need even if there is a connector. Otherwise any connector, even one that
    stands aside, makes vLLM compute wrong tokens."""
    has_states = getattr(kv_cache_config, "has_mamba_layers", False) and len(kv_cache_config.kv_cache_groups) > 1
    if has_states and vllm_config.cache_config.enable_prefix_caching and not reconciles:
        raise NotSupportedError(
            "this vLLM computes wrong tokens for a model with recurrent states when its prefix cache is on beside any "
            "connector: --no-enable-prefix-caching is wanted, or vLLM 0.32 or newer."
        )


def refuse_states(vllm_config: Any, groups: Sequence[KVGroup], *, load_async: bool) -> None:
    """Raises CannotCacheError, in one sentence, for states that are not known to be stored and loaded right."""
    if any(group.state for group in groups):
        for what, found, wanted in _unserved(vllm_config, groups, load_async):
            raise CannotCacheError(f"kvdock cannot cache recurrent states here: {what} is {found}, and {wanted}.")


def _unserved(vllm_config: Any, groups: Sequence[KVGroup], load_async: bool) -> Iterator[tuple[str, object, str]]:
    """(setting, value found, what is wanted) for each reason not to cache states."""
    cache, drafts = vllm_config.cache_config, vllm_config.speculative_config
    if not cache.enable_prefix_caching:
        yield "prefix caching", "off", "--enable-prefix-caching --mamba-cache-mode align is wanted"
    if cache.mamba_cache_mode != "align":
        yield "mamba_cache_mode", repr(cache.mamba_cache_mode), "--mamba-cache-mode align is wanted"
    if drafts is not None:
        yield "the speculative method", repr(drafts.method), "none is wanted: drafts move a state on"
    for name in ("use_replayssm", "use_kda_recoverssm"):
        if getattr(cache, name, False):
            yield name, "on", "off is wanted: a block holds more than a state then"
    if not load_async:
        yield "load_async", "false", "true is wanted: vLLM counts too few blocks for a load in the step that runs it"
    if all(group.window_tokens is not None for group in groups):
        yield "full attention", "in no KV cache group", "one is wanted"
    step = step_tokens(groups)
    for size in {group.block_tokens for group in groups if group.state} - {step}:
        yield "the block of a state", f"{size} tokens", f"{step} are wanted, whole blocks of every group"
