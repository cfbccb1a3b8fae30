"""The facts on which the KV of all requests depends: the model and its settings, in the manifest and its revision.
request_tag.py has the facts that differ between requests.

Keys are made from vLLM's hashes of blocks if other processes compute the same hashes, and otherwise from the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import UNSET

from kvdock.connectors.dependences import counted, described
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.heads import HeadParts
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
    read_all: bool = False, head_parts: HeadParts | None = None,
) -> Manifest:
    """The manifest, which is equal on all workers. `tensor_parallel` and `writers` describe how KV is split, so with
    MLA `tensor_parallel` is 1 for any number of workers. `model` is the architecture, not the served name. `hashing`:
    see hashing_of; `head_parts`: how KV is divided for all tensor-parallel sizes; the other arguments and
    NotSupportedError: see revision."""
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
        f"{signature(groups, tensors, num_blocks, head_parts.heads if head_parts is not None else None)}",
        chunk_tokens=chunk_tokens,
        block_tokens=step_tokens(groups),
        tensor_parallel=place.heads_split,
        writers=place.writers,
        any_tensor_parallel=True if head_parts is not None else UNSET,
        hash_function=hashing[0],
        hash_seed=hashing[1],
        groups=tuple(
            Group(
                kind="full" if group.window_tokens is None else "window", window_tokens=group.window_tokens or 0,
                block_tokens=group.block_tokens,
                part_bytes=sum(pages.values()) * blocks // (head_parts.of_worker if head_parts is not None else 1),
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


# --------------------------------------------------------------------------- settings on which KV depends

# The settings of vLLM on which the bytes of KV depend, beside tokens and weights, each with its reason.
#
# A setting has a row here if it changes which function of the tokens the model computes, or with how many bits. A
# setting has no row if it only changes the order in which the same function is computed (graphs, compilation, cascade
# attention, data and expert parallelism, the kernels that vLLM chooses by itself), if other parts of the manifest cover
# it (the KV's type, shapes, strides, attention backends, the split over workers), or if requests that use it bypass the
# cache (adapters, images). A setting at its usual value is left out, so versions of vLLM that lack it need no rule. For
# environment variables, which choose single kernels, the rule is the opposite: all count except those that are known to
# change nothing (kvdock/connectors/dependences.py).

UNUSUAL_MODEL = {
    "quantization": "weights are rounded, or were before they were saved",
    "quantization_config": "how weights are rounded while they are read",
    "dtype": "what is computed is rounded to it",
    "override_attention_dtype": "attention is computed in it",
    "architecture": "the class that computes: vLLM's own, or the one around Transformers' (model_impl)",
    "model_class_overrides": "another class computes",
}
"""Fields of vLLM's ModelConfig, the target's and the draft's."""
UNUSUAL_ENGINE = {
    "cache_config.kv_cache_dtype_skip_layers": "which layers' KV is not rounded: they are in a group of their own",
    "attention_config.use_non_causal": "tokens see those after them",
    "attention_config.disable_flashinfer_q_quantization": "queries are not rounded with the KV",
    "attention_config.use_prefill_query_quantization": "queries are rounded",
    "attention_config.indexer_kv_dtype": "how the keys are rounded that choose the tokens of sparse attention",
    "attention_config.use_fp4_indexer_cache": "the same in vLLM 0.24",
    "mamba_config.enable_stochastic_rounding": "recurrent states are rounded at random",
    "mamba_config.stochastic_rounding_philox_rounds": "how random that is",
    "kernel_config.moe_backend": "some round activations, and some do not",
    "kernel_config.linear_backend": "some round activations, and some do not",
    "kernel_config.linear_backend_per_quant": "some round activations, and some do not",
    "additional_config": "settings of platforms and plug-ins: what they do is not known",
}
"""Fields of vLLM's VllmConfig."""
OFF, ON = ("", "0", "false", "none"), ("", "1", "true")
UNUSUAL_ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": (OFF, "an engine that computes the same bits in every batch loads none of others"),
    "VLLM_FLOAT32_MATMUL_PRECISION": (("", "highest"), "products are rounded"),
    "VLLM_MARLIN_INPUT_DTYPE": (OFF, "activations are rounded"),
    "VLLM_TEST_FORCE_FP8_MARLIN": (OFF, "activations are not rounded"),
    "VLLM_CPU_INT4_W4A8": (ON, "activations are rounded"),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": (OFF, "weights are rounded while they are read"),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": (OFF, "activations are rounded"),
    "VLLM_HUMMING_USE_F16_ACCUM": (OFF, "sums are rounded"),
    "VLLM_B12X_MOE_FP4_FORCE_A16": (OFF, "activations are not rounded"),
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": (OFF, "what goes to experts is rounded"),
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": (OFF, "what comes from experts is rounded"),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": (OFF, "experts are not chosen by the model"),
    "VLLM_USE_DEEP_GEMM_E8M0": (ON, "scales are rounded to powers of two"),
    "VLLM_DISABLED_KERNELS": (OFF, "those that remain may round otherwise"),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": (OFF, "what workers add up is rounded"),
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": (ON, "what workers add up is rounded"),
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": (OFF, "attention is computed in fewer bits"),
    "VLLM_ROCM_USE_AITER_FP8BMM": (("",), "weights of latent attention are rounded; versions differ in what is usual"),
    "VLLM_ROCM_USE_AITER_FP4BMM": (("",), "the same"),
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": (OFF, "activations are rounded"),
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": (OFF, "weights are rounded while they are read"),
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": (("", "fp32"), "sums are rounded"),
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": (OFF, "another order of the elements inside a page"),
}
"""Variables: the values that change nothing, in lower case, and the reason why others do. Those of vLLM that are not
here and not in HARMLESS_VARIABLES count with every value: kvdock/connectors/dependences.py."""
_HARMLESS_VARIABLES = """
    VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY
    VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_BUILD_COMMIT
    VLLM_BUILD_PIPELINE VLLM_CACHE_ROOT VLLM_CHAT_TEMPLATE_FUEL VLLM_CI_USE_S3
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT
    VLLM_CPU_CI_ENV VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
    VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH
    VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DIST_IDENT VLLM_DOCKER_BUILD_CONTEXT
    VLLM_DO_NOT_TRACK VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_COHERE_API VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_V1_MULTIPROCESSING
    VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FORCE_AOT_LOAD VLLM_GC_DEBUG
    VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPU_NIC_PCIE_MAPPING
    VLLM_GPU_SYNC_CHECK VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_TAG
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_CACHE_LAYOUT VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_PREFIX
    VLLM_LOGGING_STREAM VLLM_LOG_MODEL_INSPECTION VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
    VLLM_MAX_STOP_STRINGS VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
    VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MM_HASHER_ALGORITHM VLLM_MODEL_REDIRECT_PATH
    VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB
    VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NIC_SELECTION_VARS VLLM_NIXL_SIDE_CHANNEL_HOST
    VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_MAX_PEERS
    VLLM_P2P_SIDE_CHANNEL_HOST VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS VLLM_PREFIX_CACHE_RETENTION_INTERVAL
    VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES
    VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RPC_BASE_PATH
    VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_P2P_CHECK
    VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_SYSTEM_START_DATE VLLM_TARGET_DEVICE
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TRACE_FUNCTION VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USAGE_SOURCE
    VLLM_USAGE_STATS_SERVER VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_MODELSCOPE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
    VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
    VLLM_WORKER_MULTIPROC_METHOD VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH
"""
HARMLESS_VARIABLES = frozenset(_HARMLESS_VARIABLES.split())
"""Variables of vLLM 0.24 to 0.33: servers and their processes, logs, paths, limits of requests, sampling, and settings
that the manifest covers otherwise (the order of KV's elements, images by their content)."""
NEVER = (
    "default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "bailing_mrope", "ntk",
    "openpangu", "proportional", "mllama4", "xdrope", "telechat3-yarn",
)
"""Kinds of rotary embedding that do not depend on max_model_len. Any other kind may depend on it."""
MOVING = ("longrope", "dynamic")
"""Kinds whose factors Transformers' models choose again for each batch, and vLLM's models once."""
ORIGINAL, TRAINED = "original_max_position_embeddings", "max_position_embeddings"
LLAMA4_TOKENS = 32768
"""Llama 4 weighs attention by the distance of tokens when max_model_len is more, unless it is configured otherwise."""


def unusual_of(model: Any) -> dict[str, str]:
    return dict(_unusual(model, UNUSUAL_MODEL))


STATE_VARIABLES = frozenset({"VLLM_SSM_CONV_STATE_LAYOUT"})
"""Variables that set the layout of recurrent states in memory. For other models they change nothing, and vLLM sets them
by itself for some connectors."""


def unusual_around(vllm_config: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """The unusual settings outside the model's configuration: fields of `vllm_config`, and variables of `environ`, the
    process's environment."""
    usual = {name: values for name, (values, _) in UNUSUAL_ENVIRONMENT.items()}
    has_states = getattr(vllm_config.model_config, "has_inner_state", True)
    harmless = HARMLESS_VARIABLES if has_states else HARMLESS_VARIABLES | STATE_VARIABLES
    switches = counted(environ, ("VLLM_",), harmless, usual)
    return {**dict(_unusual(vllm_config, UNUSUAL_ENGINE)), **switches}


def _unusual(config: Any, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for path in rows:
        found = config
        for name in path.split("."):
            found = getattr(found, name, None)
        if found not in (None, False, "", "auto", [], {}):
            yield path, str(found)


def positions_of(config: Mapping[str, Any], model: Any) -> list[Any]:
    """How max_model_len changes the encoding of positions: not at all, for nearly all models. `config`: of `model`,
    which is vLLM's ModelConfig. Raises NotSupportedError where the encoding differs from batch to batch."""
    # None for a max_model_len of -1: the model was made for a length that vLLM has since shortened to what fits.
    longest = None if getattr(model, "original_max_model_len", 0) == -1 else int(model.max_model_len)
    found_kinds: list[Any] = []
    for kind, rope, around in _ropes(config):
        if kind in NEVER:
            continue
        limit = (rope.get(ORIGINAL) or around.get(ORIGINAL)) if kind == "longrope" else around.get(TRAINED)
        is_beyond = longest is None or limit is None or longest > limit
        if kind in MOVING and is_beyond and _is_transformers(model):
            raise NotSupportedError(
                f"kvdock cannot share KV of Transformers' {kind!r} rotary embedding, which depends on the longest "
                f"request of each batch: a max_model_len of at most {limit} is wanted, or model_impl vllm."
            )
        if kind not in MOVING or limit is None or longest is None:
            found_kinds.append([kind, longest])
        elif kind == "longrope":  # one of two sets of factors, for all positions
            found_kinds.append([kind, is_beyond])
        elif "alpha" not in rope:  # some models take max_model_len, if it is less, for their own length
            found_kinds.append([kind, limit if is_beyond else longest])
    if any(kind.startswith("llama4") for kind in _model_types(config)):
        found_kinds.append(["llama4", longest and longest > LLAMA4_TOKENS])
    return found_kinds


def _is_transformers(model: Any) -> bool:
    asked = getattr(model, "using_transformers_backend", None)
    return asked is not None and bool(asked())


def _ropes(config: Any) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(kind, its parameters, the configuration that it is in) of each rotary embedding, including those for some kinds
    of layers only."""
    for around in _mappings(config):
        for name in ("rope_parameters", "rope_scaling"):
            for rope in _mappings(around.get(name)):
                kind = rope.get("rope_type", rope.get("type"))
                if isinstance(kind, str):
                    yield kind, rope, around


def _model_types(config: Any) -> Iterator[str]:
    return (str(one["model_type"]) for one in _mappings(config) if "model_type" in one)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings in `value`, itself included, at any depth."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _mappings(item)
