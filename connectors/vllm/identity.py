"""What KV depends on: the model and its set-up (the manifest's revision), and what a request adds of its own.

Keys come from vLLM's hashes of blocks where other processes make the same ones, else from the tokens. Of an adapter the
former cover a name, and the latter nothing. So a request whose KV depends on more than model and tokens is not cached:
neither looked up nor stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdock.connectors.vllm.groups import KVGroup, signature, step_tokens
from kvdock.connectors.vllm.setup import Place, drafts_with_kv
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.schemas import Group, Manifest

SAMPLE_BYTES = 1 << 16
SAMPLES = 64
"""Evenly spread pieces of each weights file are hashed: other weights differ in nearly every byte."""
CRYPTOGRAPHIC = ("sha256", "sha256_cbor")
"""vLLM's hash algorithms under which nobody can find two prompts that have one hash."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def hashing_of(algorithm: str, *, seed: str | None, fixed_seed: str | None) -> tuple[str, str]:
    """The manifest's `hash_function` and `hash_seed`. vLLM's own when the next process makes the same hashes: `seed`,
    PYTHONHASHSEED, or else this vLLM's `fixed_seed` has to stand for their root. Otherwise the root is random."""
    root = seed if seed is not None else fixed_seed
    if algorithm not in CRYPTOGRAPHIC or root is None:
        return HASH_FUNCTION, ""
    return f"vllm {algorithm}", root


def depends_on_more_than_tokens(request: Any) -> bool:
    """Adapters, images, salts, embeddings, and prompts that grow while the request runs."""
    return bool(
        getattr(request, "lora_request", None) is not None
        or getattr(request, "mm_features", None)
        or getattr(request, "cache_salt", None)
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "resumable", False)
        or request.prompt_token_ids is None
    )


def revision(vllm_config: Any, weights_digest: str, drafts: Any) -> str:
    """Digest of weights and of all of the configuration that can change KV: the model's, and the draft model's when
    it has KV of its own (`drafts`: vLLM's SpeculativeConfig then, else None).

    `weights_digest`: takes the place of a look at the model's files.
    """
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    told = {
        **_described(model, weights_digest),
        "load_format": load_format,
        "seed": model.seed if load_format.endswith("dummy") else None,
    }
    if drafts is not None:
        draft = drafts.draft_model_config
        is_inside = draft.model == model.model and draft.revision == model.revision
        told["draft"] = {"method": drafts.method, **_described(draft, told["weights"] if is_inside else "")}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _described(model: Any, weights_digest: str) -> dict[str, Any]:
    config = json.loads(model.hf_config.to_json_string(use_diff=False))
    named = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return {
        "hf_config": {
            name: value for name, value in config.items()
            if not name.startswith("_") and name != "transformers_version"
        },
        "weights": weights_digest or _weights(model.model, named),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
    }


def _weights(model: str, named_revision: str | None) -> str:
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{named_revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS and path.is_file():
            _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: Any) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for piece in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


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
    """The backends of all attention layers: some reorder the elements of a page without its shape showing it."""
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for group in groups:
        for name in group.page_bytes:
            layer = layers.get(name)
            names.add(layer.get_attn_backend().get_name() if layer is not None else "unknown")
    return "+".join(sorted(names))
