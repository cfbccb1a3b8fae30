"""Translates vLLM's KV cache groups into kvdock's: which tokens of each group a hit needs, and where its pages are.

A page is one layer's part of one block. It is copied whole, and its content is never interpreted: its address comes
from the tensor's own strides, its size from the spec, and the order of the elements inside it goes into the manifest as
a signature, so that engines whose pages differ inside never share. Layers at one address are one plane.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
    """The types and shapes of the tensors of a recurrent state in a page (states.py). Empty: the page holds KV."""

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


def signature(groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int) -> str:
    """The order of the elements inside the pages: sizes and axes by falling stride, the block's axis left out."""
    orders = []
    for group in groups:
        for name in group.page_bytes:
            tensor = tensors[name]
            axes = sorted(range(1, len(tensor.shape)), key=lambda axis: -tensor.stride(axis))
            order = ".".join(f"{axis}:{tensor.shape[axis]}" for axis in axes)
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
        planes = {_plane(name, tensors[name], page, num_blocks): None for name, page in group.page_bytes.items()}
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


def _plane(name: str, tensor: Any, page_bytes: int, num_blocks: int) -> Plane:
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
