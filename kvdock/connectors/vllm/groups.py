"""Translates vLLM's KV cache groups into kvdock's: which tokens of each group a hit needs, and where its pages are.

A page is one layer's part of one block. It is copied whole, and its content is never interpreted: its address comes
from the tensor's own strides, its size from the spec, and the order of the elements inside it goes into the manifest as
a signature, so that engines whose pages differ inside never share. Layers at one address are one plane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvdock import _core
from kvdock.connectors.errors import CannotCacheError, NotSupportedError
from kvdock.datapath.layout import PagedLayout, Plane

FULL = ("FullAttentionSpec", "MLAAttentionSpec")
WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")
LOCAL = ("ChunkedLocalAttentionSpec",)
STATE = ("MambaSpec",)
KINDS = f"{', '.join((*FULL, *WINDOW, *LOCAL, *STATE))}, or uniform groups of these"


@dataclass(frozen=True)
class KVGroup:
    """One KV cache group. `window_tokens`: how many tokens before a prefix's end the next token reads at most; None:
    all."""

    window_tokens: int | None
    block_tokens: int
    page_bytes: Mapping[str, int]
    """By layer, the bytes of a page."""
    latent: bool
    """MLA: every rank holds the same bytes."""
    local_tokens: int | None = None
    """Chunked local attention: the length of a piece. A token sees the tokens of its own piece, up to itself. None for
    all other kinds of groups."""
    state: str = ""
    """The types and shapes of the tensors of a recurrent state in a page (groups.py). Empty: the page holds KV."""

    def left_behind(self, tokens: int) -> int:
        """How many of the first `tokens` tokens no later token reads, so that vLLM frees their blocks."""
        if self.window_tokens is None:
            return 0
        if self.local_tokens is not None:
            return tokens // self.local_tokens * self.local_tokens
        return max(0, tokens - self.window_tokens)


def groups_of(kv_cache_config: Any) -> tuple[KVGroup, ...]:
    """The KV cache groups of vLLM's `kv_cache_config`. Raises CannotCacheError for kinds of KV that kvdock does not
    know."""
    groups = tuple(_group(group) for group in kv_cache_config.kv_cache_groups)
    if not groups:
        raise CannotCacheError("kvdock has nothing to cache: this model keeps no KV.")
    return groups


def _group(group: Any) -> KVGroup:
    spec = group.kv_cache_spec
    inner = getattr(spec, "kv_cache_specs", None)
    specs = dict(inner) if inner is not None else dict.fromkeys(group.layer_names, spec)
    kinds = {type(one).__name__ for one in specs.values()}
    first, window, local, state = next(iter(specs.values())), None, None, ""
    if kinds <= set(WINDOW):
        window = max(1, _one([one.sliding_window for one in specs.values()]) - 1)  # the next token sees itself as well
    elif kinds <= set(LOCAL):
        local = _one([one.attention_chunk_size for one in specs.values()])
        window = max(1, local - 1)
    elif kinds <= set(STATE):
        window, state = 1, " ".join(dict.fromkeys(_state(one) for one in specs.values()))
    elif not kinds <= set(FULL):
        raise CannotCacheError(f"kvdock cannot cache KV of kind {', '.join(sorted(kinds))}; it knows {KINDS}.")
    pages = {name: int(specs[name].page_size_bytes) for name in group.layer_names if name in specs}
    return KVGroup(window, int(first.block_size), pages, all("MLA" in kind for kind in kinds), local, state)


def _state(spec: Any) -> str:
    if len(spec.dtypes) != len(spec.shapes):
        raise CannotCacheError(
            f"kvdock cannot cache a recurrent state of {len(spec.shapes)} tensors with {len(spec.dtypes)} types: one "
            "for each is wanted."
        )
    tensors = zip(spec.dtypes, spec.shapes, strict=True)
    return f"{spec.mamba_type} {'+'.join(f'{dtype}{list(shape)}' for dtype, shape in tensors)}"


def _one(windows: Sequence[int]) -> int:
    if len(set(windows)) > 1:
        raise NotSupportedError(f"kvdock needs one window in a KV cache group, found {sorted(set(windows))} tokens.")
    return windows[0]


def step_tokens(groups: Sequence[KVGroup]) -> int:
    """The smallest number of tokens that is whole blocks in every group. vLLM's own hits are multiples of it."""
    return lcm(*(group.block_tokens for group in groups))


def chunk_tokens(groups: Sequence[KVGroup], wanted: int) -> int:
    """The tokens of a chunk: `wanted`, rounded up to whole blocks of every group. With recurrent states it is
    step_tokens(), so that a hit can end at every state."""
    step = step_tokens(groups)
    if any(group.state for group in groups):
        return step
    return -(-wanted // step) * step


HEAD_AXES = {4: 1, 5: 3}
"""The axis of the heads by the number of axes: [block, head, token, K and V], and before vLLM 0.33 also
[block, K or V, token, head, element]."""


def signature(
    groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, heads: int | None = None
) -> str:
    """The order of the elements inside the pages: sizes and axes by falling stride, the block's axis left out. `heads`:
    how many heads a part has; None: those of a page."""
    orders = []
    for group in groups:
        for name in group.page_bytes:
            tensor = tensors[name]
            axes = sorted(range(1, len(tensor.shape)), key=lambda axis: -tensor.stride(axis))
            sizes = list(tensor.shape)
            if heads is not None:
                sizes[HEAD_AXES[len(sizes)]] = heads
                axes = [axis for axis in axes if sizes[axis] > 1]  # where one head is, the order has no meaning
            order = ".".join(f"{axis}:{sizes[axis]}" for axis in axes)
            split = tensor.shape[0] // num_blocks
            orders.append(f"{tensor.dtype}/{order}/{split}{group.state and f'/{group.state}'}")
    if len(set(orders)) == 1:
        return orders[0]
    return hashlib.sha256("\n".join(orders).encode()).hexdigest()


def layouts_of(
    groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, token_order: str
) -> list[PagedLayout]:
    """Where each group has its pages. Raises NotSupportedError for a page that is not contiguous."""
    layouts = []
    for group in groups:
        planes = {plane_of(name, tensors[name], page, num_blocks): None for name, page in group.page_bytes.items()}
        core = _core.PagedLayout(tuple(planes), num_blocks=num_blocks, block_tokens=group.block_tokens)
        held = [tensors[name] for name in group.page_bytes]
        layouts.append(
            PagedLayout("pages", token_order, tuple(planes), num_blocks, group.block_tokens, held, core)
        )
    return layouts


def planes_of(groups: Sequence[KVGroup], tensors: Mapping[str, Any]) -> list[dict[str, int]]:
    """For each group, the number of each layer's plane in the group's layout. Layers at one address share a plane."""
    planes = []
    for group in groups:
        places = {name: tensors[name].data_ptr() for name in group.page_bytes}
        order = list(dict.fromkeys(places.values()))
        planes.append({name: order.index(place) for name, place in places.items()})
    return planes


def plane_of(name: str, tensor: Any, page_bytes: int, num_blocks: int) -> Plane:
    """The plane of a layer's pages. Raises NotSupportedError for a page that is not contiguous."""
    if not hasattr(tensor, "data_ptr"):
        raise NotSupportedError(f"kvdock copies one tensor a layer, and layer {name} has {type(tensor).__name__}.")
    split, rest = divmod(tensor.shape[0], num_blocks)
    if rest or split < 1:
        raise NotSupportedError(
            f"kvdock needs the block as the first axis of a KV tensor: layer {name} has shape {tuple(tensor.shape)} "
            f"for {num_blocks} blocks."
        )
    element = tensor.element_size()
    content = element  # grows from the innermost axis outwards while they continue each other
    for axis in sorted(range(1, len(tensor.shape)), key=tensor.stride):
        if tensor.shape[axis] > 1:
            if tensor.stride(axis) * element != content:
                raise NotSupportedError(
                    f"kvdock copies whole pages, and those of layer {name} are not contiguous: shape "
                    f"{tuple(tensor.shape)}, strides {tuple(tensor.stride())}."
                )
            content *= tensor.shape[axis]
    step = tensor.stride(0) * element
    if split > 1 and step != content:
        raise NotSupportedError(f"kvdock copies whole pages, and layer {name} has its blocks in {split} pieces apart.")
    if content * split > page_bytes or step * split < page_bytes:
        raise NotSupportedError(
            f"kvdock copies whole pages: layer {name} has {content * split} bytes a block, {step * split} apart, and "
            f"its page is {page_bytes} bytes."
        )
    return (tensor.data_ptr(), step * split, page_bytes, 1, page_bytes)


def whole_blocks(groups: Sequence[KVGroup], table: Sequence[list[int | None]], tokens: int) -> list[list[int | None]]:
    """Per KV group, the blocks of a request that hold its first `tokens` tokens and nothing else."""
    return [column[: tokens // group.block_tokens] for column, group in zip(table, groups, strict=True)]


# --------------------------------------------------------------------------- recurrent states

# Recurrent states (Mamba, linear attention, short convolutions): a step changes them, where attention adds to its KV.
#
# With mamba_cache_mode "align" a request has its state in the block of its newest token, and only there. A step reads
# the state in the block of the last token before it, and leaves it in the block of its own last token. So - a step that
# ends at the boundary of a block leaves a state there that no step changes any more: the next one leaves   its own in
# another block, and vLLM frees this one, as it frees the blocks that a window has left behind; - a step that starts at
# such a boundary reads the state there; - the content of every other block is not known: a state inside the block, or
# another request's KV. Stored are the states at such boundaries (`settled` in tables.py), and the states that vLLM
# itself reports to connectors, because newer kernels leave a state at a boundary inside a step. A hit ends where a
# state was stored, and its load fills the one block that the next step reads. So a state is stored like a window of one
# token, and a chunk is one block.
#
# Draft tokens that are rejected would already have changed the state, so with drafts nothing is stored.



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
