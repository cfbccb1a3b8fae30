"""The facts on which the KV of all requests depends: the model and its settings, in the manifest and its revision.
request_tag.py has the facts that differ between requests.

Keys are made from vLLM's hashes of blocks if other processes compute the same hashes, and otherwise from the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvdock.connectors.dependences import described
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.vllm.dependences import positions_of, unusual_around, unusual_of
from kvdock.connectors.vllm.groups import KVGroup, signature, step_tokens
from kvdock.connectors.vllm.setup import RankPosition, drafts_with_kv
from kvdock.connectors.weights import FindSnapshot, hub_snapshot, weights_of
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.schemas import Group, Manifest

MOST_LETTERS = 128
"""The most characters of a model's name."""
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
"""vLLM's hash algorithms for which it is infeasible to find two prompts with one hash."""


def hashing_of(algorithm: str, *, seed: str | None, fixed_seed: str | None) -> tuple[str, str]:
    """The manifest's `hash_function` and `hash_seed`. They name vLLM's own hashes if `algorithm` is cryptographic and
    every process computes the same hashes, which needs a known root: `seed`, the value of PYTHONHASHSEED, or else this
    vLLM's `fixed_seed`. Without both, the root is random."""
    root = seed if seed is not None else fixed_seed
    if algorithm not in CRYPTOGRAPHIC or root is None:
        return HASH_FUNCTION, ""
    return f"vllm {algorithm}", root


def revision(
    vllm_config: Any, weights_digest: str, drafts: Any, *, environ: Mapping[str, str] = MappingProxyType({}),
    find_snapshot: FindSnapshot = hub_snapshot, read_all: bool = False,
) -> str:
    """The digest of the weights and of all settings on which KV depends, of the model and of a draft model that has KV
    of its own (`drafts`: vLLM's SpeculativeConfig then, else None). Raises NotSupportedError when the weights cannot be
    identified, or the encoding of positions differs from batch to batch.

    `weights_digest`: the user's name for the weights, in place of a digest of the model's files. `read_all`: whether
    that digest covers all their bytes. `environ`: the process's environment variables.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    weights = weights_of(model, load, weights_digest, find_snapshot, whole=read_all)
    fields = {**_described(model), **weights, **unusual_around(vllm_config, environ)}
    if drafts is not None:
        draft = drafts.draft_model_config
        is_inside = draft.model == model.model and draft.revision == model.revision
        # Which of the two lengths counts for drafts differs from method to method.
        lengths = positions_of(_config_of(draft), model)
        fields["draft"] = {"method": drafts.method, "lengths": lengths, **_described(draft)} | (
            weights if is_inside else _draft_weights(drafts, load, weights_digest, find_snapshot, read_all)
        )
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _described(model: Any) -> dict[str, Any]:
    config = _config_of(model)
    return {"hf_config": described(config), "positions": positions_of(config, model), **unusual_of(model)}


def _config_of(model: Any) -> Any:
    return json.loads(model.hf_config.to_json_string(use_diff=False))


def _draft_weights(
    drafts: Any, load: Any, weights_digest: str, find_snapshot: FindSnapshot, read_all: bool
) -> dict[str, Any]:
    """The fields that identify the draft's weights if they are not part of the model's files. If their own files cannot
    be read, `weights_digest` names them, too."""
    own = getattr(drafts, "draft_load_config", None) or load
    try:
        return weights_of(drafts.draft_model_config, own, "", find_snapshot, whole=read_all)
    except NotSupportedError:
        if not weights_digest:
            raise
        return {"weights": weights_digest}


def manifest_of(
    vllm_config: Any, version: str, groups: Sequence[KVGroup], tensors: Mapping[str, Any], place: RankPosition, *,
    num_blocks: int, chunk_tokens: int, weights_digest: str, hashing: tuple[str, str],
    environ: Mapping[str, str] = MappingProxyType({}), find_snapshot: FindSnapshot = hub_snapshot,
    read_all: bool = False,
) -> Manifest:
    """The manifest, which is equal on all workers. `tensor_parallel` and `writers` describe how KV is split, so with
    MLA `tensor_parallel` is 1 for any number of workers. `model` is the architecture, not the served name. `hashing`:
    see hashing_of; the last three arguments and NotSupportedError: see revision."""
    model = vllm_config.model_config
    per_chunk = [chunk_tokens // group.block_tokens for group in groups]
    planes = [
        {tensors[name].data_ptr(): page for name, page in group.page_bytes.items()} for group in groups
    ]
    return Manifest(
        model=str(model.architecture)[:MOST_LETTERS],
        revision=revision(
            vllm_config, weights_digest, drafts_with_kv(vllm_config), environ=environ, find_snapshot=find_snapshot,
            read_all=read_all,
        ),
        kv_dtype=_kv_dtype(str(vllm_config.cache_config.cache_dtype), model, tensors),
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


def served_name(model: Any) -> str:
    """The users' name of the model: --served-model-name, or else the name that was given. `model`: vLLM's ModelConfig.
    """
    name = model.served_model_name
    return (name if isinstance(name, str) else str(model.model))[-MOST_LETTERS:]


def _kv_dtype(kind: str, model: Any, tensors: Mapping[str, Any]) -> str:
    """"auto" is the model's own type, unless its checkpoint asks for another."""
    own = _plain(model.dtype)
    return own if kind == "auto" and {_plain(tensor.dtype) for tensor in tensors.values()} == {own} else kind


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _backends(vllm_config: Any, groups: Sequence[KVGroup]) -> str:
    """The backends of each group's attention layers, only once if all groups have the same. Some backends reorder the
    elements of a page, which the page's shape does not show."""
    layers = vllm_config.compilation_config.static_forward_context
    found = []
    for group in groups:
        held = [layers.get(name) for name in group.page_bytes]
        names = {layer.get_attn_backend().get_name() if layer is not None else "unknown" for layer in held}
        found.append("+".join(sorted(names)))
    return found[0] if len(set(found)) == 1 else "|".join(found)
