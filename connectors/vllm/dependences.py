"""What the bytes of KV depend on beside tokens and weights: tables of vLLM's settings, each with its reason.

A row is here if it changes which function of the tokens the model computes, or to how many bits. Not here is what
computes the same function in another order (kernels, graphs, compilation, cascade attention, data and expert
parallelism), what other parts of the manifest say (the KV's type, shapes, strides, attention backends, the split over
workers), and what makes requests bypass the cache (adapters, images). A setting at its usual value says nothing, so
that versions of vLLM that lack it need no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvdock.connectors.errors import NotSupportedError

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
    "VLLM_BATCH_INVARIANT": (OFF, "who asks for the same bits in every batch gets none of another engine's"),
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
"""Variables: the values that change nothing, in lower case, and the reason."""
NEVER = (
    "default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope", "bailing_mrope", "ntk",
    "openpangu", "proportional", "mllama4", "xdrope", "telechat3-yarn",
)
"""Kinds of rotary embedding that turn a position alike whatever max_model_len is. One that is not known may not."""
MOVING = ("longrope", "dynamic")
"""Kinds that Transformers' own models choose anew in each batch, and vLLM's once."""
ORIGINAL, TRAINED = "original_max_position_embeddings", "max_position_embeddings"
LLAMA4_TOKENS = 32768
"""Llama 4 weighs attention by the distance of tokens when max_model_len is more, if nobody says otherwise."""


def unusual_of(model: Any) -> dict[str, str]:
    return dict(_unusual(model, UNUSUAL_MODEL))


def unusual_around(vllm_config: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """What is set beside the model, of the configuration and of `environ`, the process's environment variables."""
    switches = {
        name: environ[name] for name, (usual, _) in UNUSUAL_ENVIRONMENT.items()
        if environ.get(name, "").strip().lower() not in usual
    }
    return {**dict(_unusual(vllm_config, UNUSUAL_ENGINE)), **switches}


def _unusual(config: Any, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for path in rows:
        found = config
        for name in path.split("."):
            found = getattr(found, name, None)
        if found not in (None, False, "", "auto", [], {}):
            yield path, str(found)


def positions_of(config: Mapping[str, Any], model: Any) -> list[Any]:
    """What max_model_len does to how positions are seen: nothing, for nearly all models. `config`: of `model`, which
    is vLLM's ModelConfig. NotSupportedError where a position is seen otherwise from batch to batch."""
    # None for a max_model_len of -1: the model was made for a length that vLLM has since shortened to what fits.
    longest = None if getattr(model, "original_max_model_len", 0) == -1 else int(model.max_model_len)
    told: list[Any] = []
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
            told.append([kind, longest])
        elif kind == "longrope":  # one of two sets of factors, for all positions
            told.append([kind, is_beyond])
        elif "alpha" not in rope:  # some models take max_model_len, if it is less, for their own length
            told.append([kind, limit if is_beyond else longest])
    if any(kind.startswith("llama4") for kind in _model_types(config)):
        told.append(["llama4", longest and longest > LLAMA4_TOKENS])
    return told


def _is_transformers(model: Any) -> bool:
    asked = getattr(model, "using_transformers_backend", None)
    return asked is not None and bool(asked())


def _ropes(config: Any) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(kind, its parameters, the configuration that it is in) of each rotary embedding, also those of single kinds of
    layers."""
    for around in _mappings(config):
        for name in ("rope_parameters", "rope_scaling"):
            for rope in _mappings(around.get(name)):
                kind = rope.get("rope_type", rope.get("type"))
                if isinstance(kind, str):
                    yield kind, rope, around


def _model_types(config: Any) -> Iterator[str]:
    return (str(one["model_type"]) for one in _mappings(config) if "model_type" in one)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """`value` and what is in it, at any depth."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _mappings(item)
