"""SGLang's device pools as kvdock's groups and layouts. A page is a chunk, and a chunk is one block of each group.

Full attention is one group. The layers with a sliding window have a pool of their own, which is a second group: SGLang
keeps only the last tokens of the window, and asks for no others. A draft model's layers are a group that has the same
pages as the target's full attention. So are the keys of the indexer of sparse attention (DSA), which chooses the tokens
that are attended to. Of recurrent states (Mamba, linear attention), SGLang keeps for each node of its
tree the state after the node's last token, in a slot. So a hit can end only after such a token. kvdock describes a
state as a window of one token, and each tensor of the state as a group. DeepSeek-V4 has several pools of compressed KV,
which are a group each, and its window another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.heads import CannotShareSizes, HeadParts, head_parts
from kvdock.connectors.worker import WorkerConnector
from kvdock.datapath.errors import LayoutError
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.protocol.schemas import Group

FULL, SWA, STATES = "kv", "swa", "mamba"
"""SGLang's names of the transfers (PoolName)."""
BY_HEADS = "TWO_X_NL_X_NBBS_NH_HS"
"""The format of pools that have heads."""
ALIKE = "NL_X_NBBS_ONE_HS"
"""The format of pools that have the same for all heads."""
SPARSE = "DSATokenToKVPool"
"""SGLang's pool of latents (MLA) with an indexer's keys (DeepSeek-V3.2, GLM-5)."""
CHOSEN_BLOCKS = "MiniMaxSparseKVPool"
"""SGLang's pool of attention with an indexer that chooses blocks of tokens (MiniMax-M3)."""
WORK = ("intermediate_ssm", "intermediate_conv_window")
"""What SGLang keeps of recurrent states while drafts are verified: it depends on no earlier step."""
COMPRESSED = "DeepSeekV4TokenToKVPool"
"""SGLang's pools of attention to compressed KV (DeepSeek-V4)."""


@dataclass(frozen=True)
class KVGroup:
    """`transfer`: SGLang's name of the group's transfers; `planes`: for each layer, by its number in the forward pass,
    the last of its planes in `layout`; `window_tokens` None: full attention."""

    transfer: str
    layout: PagedLayout
    planes: Mapping[int, int]
    window_tokens: int | None = None
    is_latent: bool = False
    is_draft: bool = False

    @property
    def has_slots(self) -> bool:
        """Whether SGLang's indices are those of slots instead of tokens."""
        return self.transfer == STATES

    @property
    def described(self) -> Group:
        """The group's description in the manifest, if a rank stores its KV as one part."""
        part_bytes = self.layout.part_bytes(1)
        if self.window_tokens is None:
            return Group(part_bytes=part_bytes)
        return Group(kind="window", window_tokens=self.window_tokens, part_bytes=part_bytes)

    def pages_of(self, indices: Any) -> list[int]:
        """The ids of the blocks that SGLang's indices name. Waits for the GPU if the indices are on it."""
        pages: list[int] = self._ids(indices).tolist()
        return pages

    def pages_soon(self, indices: Any) -> Any:
        """The same as an int64 tensor in host memory. If the indices are on a GPU, it has its values once the present
        work of the current stream has ended."""
        return self._ids(indices).to("cpu", non_blocking=True)

    def _ids(self, indices: Any) -> Any:
        flat, size = indices.reshape(-1), self.layout.block_tokens
        return flat if self.has_slots else flat.reshape(-1, size)[:, 0] // size


def divided(groups: Sequence[KVGroup], heads: int, ranks: int, device: str) -> HeadParts:
    """How KV is divided for all tensor-parallel sizes. `heads`: the model's KV heads. Raises CannotShareSizes."""
    parts = head_parts(heads, ranks)
    if device == "cpu" and heads % ranks:
        raise CannotShareSizes(
            f"on a CPU SGLang adds empty heads for {ranks} ranks, and as many ranks as divide {heads} heads are wanted"
        )
    for group in groups:
        if group.layout.name != BY_HEADS:
            kept = "a recurrent state" if group.has_slots else "latents"
            raise CannotShareSizes(f"a KV group keeps {kept}, not heads")
        tensors: Any = group.layout.tensors
        for tensor in chain(*tensors):
            if tensor.shape[1] != parts.heads_of_worker:
                raise CannotShareSizes(f"a rank has {tensor.shape[1]} heads, and {parts.heads_of_worker} are wanted")
    return parts


def part_layouts(groups: Sequence[KVGroup], parts: HeadParts) -> list[PagedLayout]:
    """For each part of a rank in turn, where each group has the part's heads. Raises LayoutError."""
    layouts = []
    for part in range(parts.of_worker):
        for group in groups:
            tensors: Any = group.layout.tensors
            own = [[one.narrow(1, part * parts.heads, parts.heads) for one in of_kind] for of_kind in tensors]
            layouts.append(paged_layout(BY_HEADS, own, block_tokens=group.layout.block_tokens))
    return layouts


@dataclass(frozen=True)
class RankPools:
    """A rank's pools, and the worker connector that copies from and to them. `stream`: returns the CUstream on which
    the forward pass runs; None: the pools are on a CPU."""

    worker: WorkerConnector
    groups: Sequence[KVGroup]
    page_tokens: int
    stream: Callable[[], int] | None = None


def groups_of(
    kvcache: Any, page_tokens: int, window_tokens: int | None, drafts: Sequence[Any] = (), requests: Any = None
) -> tuple[KVGroup, ...]:
    """`kvcache`: the pool of SGLang's allocator of KV pages; `drafts`: the pools of draft models; `requests`: SGLang's
    pool of requests, which has the recurrent states. Raises NotSupportedError for a pool that is not known."""
    groups = list(_targets(kvcache, page_tokens, window_tokens, requests))
    if type(kvcache).__name__ == COMPRESSED:
        if drafts:
            raise NotSupportedError(
                f"kvdock does not serve drafts beside a {COMPRESSED} under SGLang, which may keep their window by "
                "request: no --speculative-algorithm is wanted."
            )
        return tuple(groups)  # SGLang gives each pool room for all pages, and some have more
    for draft in drafts:
        groups += [replace(group, is_draft=True) for group in _of_pages(draft, page_tokens)]
    for group in groups:
        if group.transfer == FULL and group.layout.num_blocks != groups[0].layout.num_blocks:
            whose = "a draft" if group.is_draft else "an indexer"
            raise NotSupportedError(
                f"kvdock finds {group.layout.num_blocks} pages of {whose}'s KV, and as many as the target's "
                f"{groups[0].layout.num_blocks} are wanted."
            )
    return tuple(groups)


def _targets(
    kvcache: Any, page_tokens: int, window_tokens: int | None, requests: Any
) -> tuple[KVGroup, ...]:
    if type(kvcache).__name__ == "HybridLinearKVPool":
        of_attention = sorted(kvcache.full_attention_layer_id_mapping, key=kvcache.full_attention_layer_id_mapping.get)
        attention = _group(FULL, kvcache.full_kv_pool, page_tokens, of_attention)
        return (attention, *_states(requests, page_tokens))
    if type(kvcache).__name__ == COMPRESSED:
        return _of_compressed(kvcache, page_tokens, window_tokens)
    if type(kvcache).__name__ != "SWAKVPool":
        return _of_pages(kvcache, page_tokens)
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


def refuse_groups_of_stages(groups: Sequence[KVGroup]) -> None:
    """Raises NotSupportedError if there is more than one group: the stages of a pipeline could then have parts of
    different sizes."""
    if len(groups) > 1:
        raise NotSupportedError(
            f"kvdock serves pipelines with one KV group under SGLang, and found {len(groups)}: tensor parallelism is "
            "wanted."
        )


def _of_pages(pool: Any, page_tokens: int) -> tuple[KVGroup, ...]:
    """The groups of a pool of full attention."""
    if type(pool).__name__ == CHOSEN_BLOCKS:
        return _of_chosen_blocks(pool, page_tokens)
    group = _group(FULL, pool, page_tokens, range(_layers_of(pool)))
    if type(pool).__name__ != SPARSE:
        return (group,)
    if pool.index_kpool != 1:
        raise NotSupportedError(
            f"kvdock does not serve an indexer with one key for {pool.index_kpool} tokens under SGLang, which keeps "
            "the last tokens of each request elsewhere: one key for each token is wanted."
        )
    keys = pool.index_k_with_scale_buffer
    layers = [layer for layer, of_layer in enumerate(keys) if of_layer.shape[0]]  # the others use the choice of these
    if not layers:
        return (group,)
    layout = _layout_of_rows([keys[layer] for layer in layers], page_tokens, "keys of an indexer")
    return group, KVGroup(FULL, layout, {layer: at for at, layer in enumerate(layers)}, is_latent=True)


def _of_chosen_blocks(pool: Any, page_tokens: int) -> tuple[KVGroup, ...]:
    """The groups of a pool that has the KV of an indexer beside that of attention: its keys and values for some layers,
    and its keys alone for others."""
    groups = [_group(FULL, pool.main_pool, page_tokens, range(_layers_of(pool.main_pool)))]
    for indexer, mapped in (
        (pool.index_kv_pool, pool.index_kv_layer_id_mapping), (pool.index_k_pool, pool.index_k_layer_id_mapping),
    ):
        if indexer is not None:
            layers = [layer - pool.start_layer for layer in sorted(mapped, key=mapped.get)]
            groups.append(_group(FULL, indexer, page_tokens, layers))
    return tuple(groups)


def _of_compressed(pool: Any, page_tokens: int, window_tokens: int | None) -> tuple[KVGroup, ...]:
    """The groups of DeepSeek-V4's pools, as SGLang describes them to its own linkers: of each page, the compressed KV
    of its tokens and an indexer's keys; of the window, latents, and the states from which the next tokens are
    compressed. What SGLang keeps for each request besides is empty at the end of a page."""
    if window_tokens is None or pool._unified_kv or pool.request_window is not None or not {*pool.kv_pools} <= {4, 128}:
        raise NotSupportedError(
            f"kvdock serves a {COMPRESSED} under SGLang with pages of the sliding window and ratios of 4 and 128 "
            "alone: no unified KV, no window by request and no lower ratio is wanted."
        )
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _build_deepseek_v4_device_pool_group

    try:
        entries = _build_deepseek_v4_device_pool_group(pool, page_tokens).entries
    except ValueError as why:
        raise NotSupportedError(f"kvdock cannot describe SGLang's {COMPRESSED}: {why}") from why
    groups = []
    for entry in entries:
        transfer, (buffers,) = str(entry.indices_from_pool), entry.components
        layout = _layout_of_rows([one.view(torch.uint8) for one in buffers], page_tokens, f"pool {entry.name}")
        window = window_tokens if transfer == SWA else None
        groups.append(KVGroup(transfer, layout, dict(entry.layer_mapping), window, is_latent=True))
    return tuple(sorted(groups, key=lambda group: group.transfer != FULL))


def _layout_of_rows(rows: Sequence[Any], page_tokens: int, what: str) -> PagedLayout:
    """Describes tensors of bytes. `rows`: a tensor for each layer, with a row for each block; `what`: their name in
    errors. Raises NotSupportedError."""
    try:
        layout = paged_layout("NL_X_NB_BS_HS", [one.unsqueeze(1) for one in rows], block_tokens=1)
    except LayoutError as error:
        raise NotSupportedError(f"kvdock cannot describe SGLang's {what}: {error}.") from error
    return layout.with_block_tokens(page_tokens)


def _states(requests: Any, page_tokens: int) -> list[KVGroup]:
    """A group for each tensor of the recurrent states, described as bytes: for each layer, a row for each slot."""
    pool = requests.mamba_pool
    known = ("conv", "temporal")
    unknown = [name for name, of in vars(pool.mamba_cache).items() if name not in (*known, *WORK) and of is not None]
    unknown += [type(beside).__name__ for beside in pool._slot_siblings]
    unknown += [
        name for name in ("short_conv_pool", "ngram_pool")
        if getattr(getattr(requests, name, None), "enabled", False)
    ]
    unknown += ["mamba_ckpt_pool"] if getattr(requests, "mamba_ckpt_pool", None) is not None else []
    if type(pool).__name__ != "MambaPool" or unknown:
        raise NotSupportedError(
            f"kvdock does not know all that SGLang keeps of recurrent states: found a {type(pool).__name__} with "
            f"{', '.join([*known, *unknown])}, and a MambaPool with {' and '.join(known)} alone is wanted."
        )
    layers = sorted(requests.mamba_map, key=requests.mamba_map.get)
    groups = []
    for state in (pool.mamba_cache.temporal, *pool.mamba_cache.conv):
        if not state.numel():
            continue  # short convolutions have no temporal state
        rows = [of_layer.flatten(1).view(torch.uint8) for of_layer in state]
        if rows[0].data_ptr() != state.data_ptr():  # a copy: what is written to it would be lost
            raise NotSupportedError(
                "kvdock cannot describe recurrent states whose bytes are not in order within a slot: a MambaPool whose "
                "tensors are contiguous is wanted."
            )
        layout = _layout_of_rows(rows, page_tokens, "recurrent states")
        planes = {layer: at for at, layer in enumerate(layers)}
        groups.append(KVGroup(STATES, layout, planes, window_tokens=1))
    return groups


def _layers_of(pool: Any) -> int:
    return len(getattr(pool, "k_buffer", None) or getattr(pool, "kv_buffer", None) or ())


def _group(
    transfer: str, pool: Any, page_tokens: int, layers: Sequence[int], window_tokens: int | None = None
) -> KVGroup:
    """`layers`: for each of the pool's layers, its number among the model's layers."""
    kind = type(pool).__name__
    try:
        if kind == "MHATokenToKVPool" and getattr(pool, "k_scale_buffer", None) is None:
            layout = paged_layout(
                BY_HEADS, [list(pool.k_buffer), list(pool.v_buffer)], block_tokens=page_tokens
            )
            return KVGroup(
                transfer, layout, {layer: 2 * at + 1 for at, layer in enumerate(layers)}, window_tokens
            )
        planes = {layer: at for at, layer in enumerate(layers)}
        if kind in ("MLATokenToKVPool", SPARSE):
            layout = paged_layout(ALIKE, list(pool.kv_buffer), block_tokens=page_tokens)
            return KVGroup(transfer, layout, planes, window_tokens, is_latent=True)
        if kind == "MHATokenToKOnlyPool":
            return KVGroup(transfer, paged_layout(ALIKE, list(pool.k_buffer), block_tokens=page_tokens), planes)
    except LayoutError as error:
        raise NotSupportedError(f"kvdock cannot describe SGLang's {kind}: {error}.") from error
    raise NotSupportedError(
        f"kvdock does not know what SGLang keeps in a {kind}: an MHATokenToKVPool without scales, an MLATokenToKVPool, "
        f"a {SPARSE}, a {CHOSEN_BLOCKS}, a {COMPRESSED} or a SWAKVPool of the first two is wanted."
    )

