"""The facts on which the bytes of vLLM's own offload depend, for secondary_tier.py.

A chunk of the offload is all workers' KV of some blocks of one group, as vLLM lays it out. Engines share chunks if they
run the same weights with the same settings (identity.py), lay chunks out alike, and compute the same hashes.
"""

from __future__ import annotations

import json
import logging
import sys
import uuid
from collections.abc import Mapping
from hashlib import sha256
from types import FrameType
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.session import Identity
from kvdock.connectors.settings import EngineSettings
from kvdock.connectors.vllm.identity import MOST_LETTERS, hashing_of, revision, served_name
from kvdock.connectors.vllm.setup import drafts_with_kv
from kvdock.protocol.keys import HASH_FUNCTION
from kvdock.protocol.schemas import Group, Manifest

log = logging.getLogger("kvdock.vllm")


def vllm_config_around(config: Any) -> VllmConfig:
    """The engine's VllmConfig. vLLM gives a tier only an extract, without the weights and most settings on which KV
    depends; the calls in progress, which make the tier, have all of it. `config`: the extract. Raises
    NotSupportedError."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for found in frame.f_locals.values():
            transfer = found.kv_transfer_config if isinstance(found, VllmConfig) else None
            if transfer is not None and transfer.engine_id == config.engine_id:
                return found
        frame = frame.f_back
    raise NotSupportedError(
        f"kvdock finds no VllmConfig of engine {config.engine_id!r} in the calls that make its tier: it does not know "
        f"the OffloadingConnector of vLLM {vllm.__version__}, and that of 0.32 or 0.33 is wanted."
    )


def manifest_of_rows(
    vllm_config: Any, config: Any, row_bytes: int, settings: EngineSettings, environ: Mapping[str, str]
) -> Manifest:
    """`config`: vLLM's OffloadingConfig; `row_bytes`: of a chunk of the primary tier, over all workers. Raises
    NotSupportedError when the weights cannot be identified, or vLLM's hashes differ from process to process."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    hashing = hashing_of(
        cache.prefix_caching_hash_algo, seed=environ.get("PYTHONHASHSEED"),
        fixed_seed=getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None),
    )
    if hashing[0] == HASH_FUNCTION:
        raise NotSupportedError(
            f"kvdock as a secondary tier needs hashes that all engines compute alike: prefix_caching_hash_algo is "
            f"{cache.prefix_caching_hash_algo!r} and PYTHONHASHSEED {environ.get('PYTHONHASHSEED')!r}, and sha256 or "
            "sha256_cbor and a number are wanted."
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise NotSupportedError("kvdock cannot share KV whose scales are found at run time: calculate_kv_scales is on.")
    private = ""
    if vllm_config.lora_config is not None:
        log.warning("vLLM's hashes name adapters, not their weights: this engine shares its offload with no other one")
        private = uuid.uuid4().hex
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    return Manifest(
        model=str(model.architecture)[:MOST_LETTERS],
        revision=revision(
            vllm_config, settings.weights_digest, drafts_with_kv(vllm_config), environ=environ,
            read_all=settings.read_all_weights,
        ),
        kv_dtype=f"{cache.cache_dtype} {str(model.dtype).removeprefix('torch.')}",
        layers=sum(len(group.layer_names) for group in config.groups),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        token_order=f"vllm {'.'.join(vllm.__version__.split('.')[:2])} offload {_layout(vllm_config, config)}",
        chunk_tokens=tokens,
        block_tokens=tokens,
        groups=(Group(part_bytes=row_bytes),),
        hash_function=f"{hashing[0]} offload",
        hash_seed=f"{hashing[1]}{private}",
    )


def _layout(vllm_config: Any, config: Any) -> str:
    """A digest of all that decides where a chunk has which bytes. Workers choose their attention backends by the
    device, and the tier does not see which: so devices of different kinds do not share."""
    parallel = config.parallel
    sizes = [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    facts = [
        [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        config.cache.tokens_per_hash, config.cache.blocks_per_chunk, config.worker_kv_bytes_per_block,
        # What vLLM itself takes to be the same bytes for all sizes is shared by all.
        None if parallel.is_parallelism_agnostic else sizes, config.replicated_layout, config.canonical_layout,
        config.kv_cache_layout, config.model.dtype, str(vllm_config.attention_config.backend),
        current_platform.device_type, str(current_platform.get_device_capability()),
    ]
    return sha256(json.dumps(facts).encode()).hexdigest()[:32]


def identity_of(vllm_config: Any, engine_id: str) -> Identity:
    name = served_name(vllm_config.model_config)
    return Identity(
        instance=f"vllm-{engine_id}", member=f"offload-{uuid.uuid4().hex[:12]}", ranks=(0,), scheduler=True,
        label=f"vLLM {vllm.__version__} offload {name} {engine_id[:8]}", served_model_name=name,
    )
