"""SGLang's device pools as kvdock's groups and layouts. A page is a chunk, and a chunk is one block of each group.

Full attention is one group. The layers of a sliding window have a pool of their own, which is a second group: SGLang
keeps its last tokens only, and asks for no more. A draft model's layers are a group that has the same pages as the
target's full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvdock.connectors.errors import NotSupportedError
from kvdock.datapath.errors import LayoutError
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.protocol.schemas import Group

FULL, SWA = "kv", "swa"
"""What SGLang calls the transfers of the two groups (PoolName)."""


@dataclass(frozen=True)
class KVGroup:
    """`transfer`: the name of its transfers; `planes`: for each layer, as the forward pass counts them, the last of its
    planes in `layout`; `window_tokens` None: full attention. A draft's layers have numbers behind the target's, which
    SGLang never asks for: loads.py orders them."""

    transfer: str
    layout: PagedLayout
    planes: Mapping[int, int]
    window_tokens: int | None = None
    is_latent: bool = False
    is_draft: bool = False

    @property
    def described(self) -> Group:
        """As the manifest has it."""
        part_bytes = self.layout.part_bytes(1)
        if self.window_tokens is None:
            return Group(part_bytes=part_bytes)
        return Group(kind="window", window_tokens=self.window_tokens, part_bytes=part_bytes)


def groups_of(
    kvcache: Any, page_tokens: int, window_tokens: int | None, drafts: Sequence[Any] = ()
) -> tuple[KVGroup, ...]:
    """`kvcache`: what SGLang's allocator of KV pages gives; `drafts`: the pools of draft models. NotSupportedError for
    a pool that is not known."""
    groups = list(_targets(kvcache, page_tokens, window_tokens))
    for draft in drafts:
        first = 1 + max(layer for group in groups for layer in group.planes)
        group = _group(FULL, draft, page_tokens, range(first, first + _layers_of(draft)))
        if group.layout.num_blocks != groups[0].layout.num_blocks:
            raise NotSupportedError(
                f"kvdock finds {group.layout.num_blocks} pages of a draft's KV, and as many as the target's "
                f"{groups[0].layout.num_blocks} are wanted."
            )
        groups.append(replace(group, is_draft=True))
    return tuple(groups)


def _targets(kvcache: Any, page_tokens: int, window_tokens: int | None) -> tuple[KVGroup, ...]:
    if type(kvcache).__name__ != "SWAKVPool":
        layers = range(_layers_of(kvcache))
        return (_group(FULL, kvcache, page_tokens, list(layers)),)
    if window_tokens is None:
        raise NotSupportedError("kvdock finds a pool of a sliding window, and no length of the window.")
    mapped = kvcache.layers_mapping
    full, swa = (
        [layer for layer, (_, is_swa) in sorted(mapped.items(), key=lambda one: one[1][0]) if is_swa is of_window]
        for of_window in (False, True)
    )
    if not full:
        raise NotSupportedError("kvdock does not serve models of which all layers have a sliding window, under SGLang.")
    return (
        _group(FULL, kvcache.full_kv_pool, page_tokens, full),
        _group(SWA, kvcache.swa_kv_pool, page_tokens, swa, window_tokens),
    )


def _layers_of(pool: Any) -> int:
    return len(getattr(pool, "k_buffer", None) or getattr(pool, "kv_buffer", None) or ())


def _group(
    transfer: str, pool: Any, page_tokens: int, layers: Sequence[int], window_tokens: int | None = None
) -> KVGroup:
    """`layers`: the number of each of the pool's layers among all of the model."""
    kind = type(pool).__name__
    try:
        if kind == "MHATokenToKVPool" and getattr(pool, "k_scale_buffer", None) is None:
            layout = paged_layout(
                "TWO_X_NL_X_NBBS_NH_HS", [list(pool.k_buffer), list(pool.v_buffer)], block_tokens=page_tokens
            )
            return KVGroup(
                transfer, layout, {layer: 2 * at + 1 for at, layer in enumerate(layers)}, window_tokens
            )
        if kind == "MLATokenToKVPool":
            layout = paged_layout("NL_X_NBBS_ONE_HS", list(pool.kv_buffer), block_tokens=page_tokens)
            return KVGroup(transfer, layout, {layer: at for at, layer in enumerate(layers)}, window_tokens, True)
    except LayoutError as error:
        raise NotSupportedError(f"kvdock cannot describe SGLang's {kind}: {error}.") from error
    raise NotSupportedError(
        f"kvdock does not know what SGLang keeps in a {kind}: an MHATokenToKVPool without scales, an MLATokenToKVPool "
        "or a SWAKVPool of these is wanted."
    )


def pages_of(indices: Any, page_tokens: int) -> list[int]:
    """The pages of SGLang's indices, one a token. Waits for the GPU, if they are there."""
    firsts = indices.reshape(-1, page_tokens)[:, 0]
    pages: list[int] = (firsts // page_tokens).tolist()
    return pages
