"""What is refused, and the manifest: what a worker knows once its KV tensors are there.

The scheduler's side gets the manifest from the workers, so the two cannot disagree about the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvdock.api.schemas import Group, Manifest
from kvdock.connectors.vllm.config import NotSupported
from kvdock.connectors.vllm.groups import KVGroup, signature
from kvdock.connectors.vllm.identity import revision

DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


def refuse_what_is_not_supported(vllm_config: Any) -> None:
    """NotSupported, one sentence each."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise NotSupported(f'kvdock is a cache: kv_role is "kv_both", found "{transfer.kv_role}".')
    for name, meaning in (
        ("tensor_parallel_size", "tensor parallelism"), ("pipeline_parallel_size", "pipeline parallelism"),
        ("decode_context_parallel_size", "context parallelism"),
        ("prefill_context_parallel_size", "context parallelism"),
    ):
        found = getattr(parallel, name, 1)
        if found > 1:
            raise NotSupported(f"kvdock does not serve {meaning} in vLLM yet: {name} is {found}, and 1 is wanted.")
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.method not in DRAFTS_WITHOUT_KV:
        raise NotSupported(
            f"kvdock does not serve draft models with KV of their own: method is {drafts.method!r}, and one of "
            f"{', '.join(DRAFTS_WITHOUT_KV)} is wanted."
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise NotSupported("kvdock cannot share KV whose scales are found at run time: calculate_kv_scales is on.")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise NotSupported("kvdock does not serve sleep mode yet: enable_sleep_mode is on, and off is wanted.")


def manifest_of(
    vllm_config: Any, version: str, groups: Sequence[KVGroup], tensors: Mapping[str, Any], *,
    num_blocks: int, chunk_tokens: int, weights_digest: str,
) -> Manifest:
    model = vllm_config.model_config
    per_chunk = [chunk_tokens // group.block_tokens for group in groups]
    planes = [
        {tensors[name].data_ptr(): page for name, page in group.page_bytes.items()} for group in groups
    ]
    return Manifest(
        model=model.served_model_name if isinstance(model.served_model_name, str) else str(model.model)[-128:],
        revision=revision(vllm_config, weights_digest),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        layers=sum(len(group.page_bytes) for group in groups),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        token_order=f"vllm {'.'.join(version.split('.')[:2])} {_backends(vllm_config, groups)} "
        f"{signature(groups, tensors, num_blocks)}",
        chunk_tokens=chunk_tokens,
        block_tokens=groups[0].block_tokens,
        groups=tuple(
            Group(part_bytes=sum(pages.values()) * blocks) if group.window_tokens is None
            else Group(kind="window", window_tokens=group.window_tokens, part_bytes=sum(pages.values()) * blocks)
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
