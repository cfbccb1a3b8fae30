"""What is refused, and the manifest: what a worker knows once its KV tensors are there.

The scheduler's side gets the manifest from the workers, so the two cannot disagree about the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.vllm.config import NotSupportedError, Settings
from kvdock.connectors.vllm.groups import KVGroup, signature, step_tokens
from kvdock.connectors.vllm.identity import revision
from kvdock.protocol.schemas import Group, Manifest

DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
DRAFTS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark")
"""What the target model accepts is the target's: their KV can be wrong at no other cost than drafts refused."""
MOST_RANKS = 128


@dataclass(frozen=True)
class Place:
    """Of one worker among those of its engine. `rank` counts the pipeline stages first: where all workers of a stage
    hold the same bytes (MLA), ranks 0 … writers - 1 are one of each stage, and rank r reads part r mod writers."""

    rank: int
    ranks: int
    writers: int
    heads_split: int
    """Over how many workers of a stage the bytes of a token are spread."""


@dataclass(frozen=True)
class EngineTraits:
    """What a worker has to know of the engine around it."""

    takes_failed_requests: bool
    """Failed loads can be reported by request."""
    undoes_steps: bool
    """vLLM runs a step again after we report that the step read blocks that failed to load."""
    loads_by_layer: bool
    """vLLM asks for each layer's KV before it reads it."""
    reports_early: bool
    """A load may be reported before it has ended, on a GPU."""
    hash_threads: int
    """CPU threads that hash the end of a load that is reported early."""


def place_of(parallel: Any, groups: Sequence[KVGroup]) -> Place:
    """`parallel`: the worker's own ParallelConfig, whose rank counts the tensor-parallel workers first."""
    shards, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, shard = divmod(parallel.rank % (shards * stages), shards)
    split = 1 if all(group.latent for group in groups) else shards
    return Place(shard * stages + stage, shards * stages, split * stages, split)


def workers_here(vllm_config: Any) -> int:
    """Of this engine and of those beside it in data parallelism, on this machine."""
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def refuse_what_is_not_supported(vllm_config: Any, kv_groups: int) -> None:
    """NotSupportedError, one sentence each. `kv_groups`: how many KV cache groups there are."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise NotSupportedError(f'kvdock is a cache: kv_role is "kv_both", found "{transfer.kv_role}".')
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        found = getattr(parallel, name, 1)
        if found > 1:
            raise NotSupportedError(f"kvdock does not serve context parallelism: {name} is {found}, and 1 is wanted.")
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if ranks > MOST_RANKS:
        raise NotSupportedError(f"kvdock serves up to {MOST_RANKS} workers an engine, found {ranks}.")
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS_WITHOUT_KV + DRAFTS_WITH_KV:
        raise NotSupportedError(
            f"kvdock does not know what the speculative method {drafts.method!r} keeps in its KV cache: one of "
            f"{', '.join(DRAFTS_WITHOUT_KV + DRAFTS_WITH_KV)} is wanted."
        )
    if parallel.pipeline_parallel_size > 1:
        _refuse_unequal_stages(vllm_config, kv_groups)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise NotSupportedError("kvdock cannot share KV whose scales are found at run time: calculate_kv_scales is on.")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise NotSupportedError("kvdock does not serve sleep mode yet: enable_sleep_mode is on, and off is wanted.")


def _refuse_unequal_stages(vllm_config: Any, kv_groups: int) -> None:
    """Parts of a group are of one size, and a stage's part is what it has of a chunk."""
    if kv_groups > 1:
        raise NotSupportedError(
            f"kvdock serves pipeline parallelism with one KV cache group, found {kv_groups}: use tensor parallelism."
        )
    drafts = drafts_with_kv(vllm_config)
    if drafts is not None:
        raise NotSupportedError(
            f"kvdock does not serve {drafts.method!r} drafts with pipeline parallelism, where the last stage alone "
            "holds their KV: use tensor parallelism."
        )
    parallel, layers = copy(vllm_config.parallel_config), []
    for stage in range(parallel.pipeline_parallel_size):
        parallel.rank = stage * parallel.tensor_parallel_size
        first, end = vllm_config.model_config.get_layers_start_end_indices(parallel)
        layers.append(end - first)
    if len(set(layers)) > 1:
        raise NotSupportedError(
            f"kvdock needs pipeline stages of equally many layers, found {layers}: choose a pipeline_parallel_size "
            f"that divides {sum(layers)}, and leave VLLM_PP_LAYER_PARTITION unset."
        )


def drafts_with_kv(vllm_config: Any) -> Any:
    """vLLM's SpeculativeConfig if what drafts keeps KV; else None."""
    drafts = vllm_config.speculative_config
    return drafts if drafts is not None and drafts.method in DRAFTS_WITH_KV else None


def loads_by_layer(vllm_config: Any, settings: Settings, groups: Sequence[KVGroup]) -> bool:
    """Whether vLLM asks for each layer's KV before it reads it, in every step. It does of attention layers alone: an
    indexer reads its own before anybody asks; and drafts' layers it asks for too late."""
    layerwise = settings.load_by_layer == "piecewise" or (
        settings.load_by_layer == "eager" and vllm_config.model_config.enforce_eager
    )
    on_gpu = vllm_config.device_config.device_type == "cuda"
    if not (layerwise and on_gpu and settings.load_async and drafts_with_kv(vllm_config) is None):
        return False
    layers = vllm_config.compilation_config.static_forward_context
    return all(_asks(layers.get(name)) for group in groups for name in group.page_bytes)


def _asks(layer: object) -> bool:
    return any(kind.__name__ in ("Attention", "MLAAttention") for kind in type(layer).__mro__)


def reports_early(vllm_config: Any, kv_cache_config: Any, place: Place) -> bool:
    """Whether a load may be reported before it has ended. Not by a rank that others store for: each publishes what it
    saw to be whole, and nobody what others did. Not in a pipeline, where a step that computes nothing is no sign that
    nobody waits. Not where vLLM zeroes blocks that it gives out, before anything was ordered after a load."""
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return place.ranks == place.writers and vllm_config.parallel_config.pipeline_parallel_size == 1 and not zeroes


def undoes_steps(vllm_config: Any) -> bool:
    """Whether this engine computes a step again that read what did not load. One that schedules ahead keeps the next
    step's token all the same, and so does a pipeline, where a prompt's next chunk is under way by then; and the second
    model runner does not take its count of computed tokens back."""
    runs_ahead = vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1
    return not runs_ahead and not getattr(vllm_config, "use_v2_model_runner", True)


def manifest_of(
    vllm_config: Any, version: str, groups: Sequence[KVGroup], tensors: Mapping[str, Any], place: Place, *,
    num_blocks: int, chunk_tokens: int, weights_digest: str, hashing: tuple[str, str],
) -> Manifest:
    """Alike on every worker. Its `tensor_parallel` and `writers` name the split, so that of MLA is 1 in all sizes.
    `hashing`: as hashing_of has it."""
    model = vllm_config.model_config
    per_chunk = [chunk_tokens // group.block_tokens for group in groups]
    planes = [
        {tensors[name].data_ptr(): page for name, page in group.page_bytes.items()} for group in groups
    ]
    return Manifest(
        model=model.served_model_name if isinstance(model.served_model_name, str) else str(model.model)[-128:],
        revision=revision(vllm_config, weights_digest, drafts_with_kv(vllm_config)),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        layers=sum(len(group.page_bytes) for group in groups) * (place.writers // place.heads_split),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        token_order=f"vllm {'.'.join(version.split('.')[:2])} {_backends(vllm_config, groups)} "
        f"{signature(groups, tensors, num_blocks)}",
        chunk_tokens=chunk_tokens,
        block_tokens=step_tokens(groups),
        tensor_parallel=place.heads_split,
        writers=place.writers,
        hash_function=hashing[0],
        hash_seed=hashing[1],
        groups=tuple(
            Group(
                kind="full" if group.window_tokens is None else "window", window_tokens=group.window_tokens or 0,
                block_tokens=group.block_tokens, part_bytes=sum(pages.values()) * blocks,
            )
            for group, pages, blocks in zip(groups, planes, per_chunk, strict=True)
        ),
    )


def _backends(vllm_config: Any, groups: Sequence[KVGroup]) -> str:
    """Of every attention layer: some backends reorder the elements of a page without its shape showing it."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for group in groups:
        for name in group.page_bytes:
            layer = layers.get(name)
            names.add(layer.get_attn_backend().get_name() if layer is not None else "unknown")
    return "+".join(sorted(names))
