"""The cases in which vLLM itself does not reuse prefixes. In these cases nothing is loaded, and one log line says so.

A user who turns the prefix cache off by --no-enable-prefix-caching is no such case: loads are correct, and are made.
vLLM does not show whether the user or vLLM turned it off, so vLLM's own reasons are checked again here. The kinds of
reasons are:

- KV depends on later tokens (attention that is not causal, encoders): it is no function of a prefix. Nothing is stored
  either, because kvdock stands aside.
- The model's output depends on all hidden states, as a mean over the prompt does: an engine that computes only the end
  of a prompt lacks the other states. The KV is correct, and is stored.
- A block has data beside KV that only the engine that computed it has: routed experts.

For single requests vLLM decides by skip_reading_prefix_cache, which scheduler.py reads.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from kvdock.connectors.errors import CannotCacheError

log = logging.getLogger("kvdock.vllm")

UNLOADED = "kvdock loads nothing in this engine, and stores what it computes: %s"
INVARIANT_WITHOUT = ("FLASHINFER", "TRITON_MLA")
"""Attention backends with which vLLM turns its prefix cache off where VLLM_BATCH_INVARIANT asks for the same bits."""


def refuse_what_is_no_prefix(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises CannotCacheError where KV depends on more than the tokens before it."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None) or {}
        if any(getattr(one, "non_causal", False) for one in (spec, *inner.values())):
            raise CannotCacheError(
                "kvdock cannot cache KV of attention that is not causal, where tokens see those behind them: "
                f"{', '.join(group.layer_names[:2])}."
            )
    kind = getattr(vllm_config.model_config, "attn_type", "decoder")
    if kind not in ("decoder", "hybrid") and not _supports_prefixes(vllm_config.model_config):
        raise CannotCacheError(f"kvdock caches KV of decoders, and vLLM says that this model is {kind!r}.")


def why_unfit(vllm_config: Any, token_order: str, environ: Mapping[str, str]) -> str:
    """The reason why nothing may be loaded; "": there is none. `token_order`: the manifest's, which names attention
    backends; `environ`: the process's environment variables."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    aux = getattr(vllm_config, "aux_output_config", None)
    if getattr(aux, "enabled", False) or getattr(model, "enable_return_routed_experts", False):
        return (
            "it returns more of each block than tokens and KV (--enable-return-routed-experts), and only the engine "
            "that computed a block has that."
        )
    if not _supports_prefixes(model):
        return f"vLLM says that its model does not support prefix caching ({_pooling(model)})."
    if environ.get("VLLM_BATCH_INVARIANT", "") not in ("", "0") and any(
        backend in token_order for backend in INVARIANT_WITHOUT
    ):
        return f"vLLM has no prefix cache with VLLM_BATCH_INVARIANT and {' or '.join(INVARIANT_WITHOUT)}."
    if cache.enable_prefix_caching:
        return ""
    if vllm_config.device_config.device_type == "cpu" and getattr(model, "use_mla", False):
        return "vLLM has no prefix cache for latent attention (MLA) on this CPU."
    if _model_turns_it_off(vllm_config):
        return f"vLLM turns its prefix cache off for {model.architecture}."
    return ""


def _supports_prefixes(model: Any) -> bool:
    return bool(getattr(model, "is_prefix_caching_supported", True))


def _pooling(model: Any) -> str:
    pooler = getattr(model, "pooler_config", None)
    found = [getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type")]
    return f"pooling {'/'.join(str(one) for one in found if one)}" if pooler is not None else "no pooling model"


def _model_turns_it_off(vllm_config: Any) -> bool:
    """Whether vLLM's rules for this architecture turn a prefix cache off that is on. They are asked about a copy of the
    configuration; if they raise, the answer is True."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # not where settings are read without vLLM

    rules = MODELS_CONFIG_MAP.get(str(vllm_config.model_config.architecture))
    if rules is None:
        return False
    asked = copy.copy(vllm_config)
    for name, part in vars(vllm_config).items():
        if dataclasses.is_dataclass(part):
            object.__setattr__(asked, name, copy.copy(part))
    try:
        asked.cache_config.enable_prefix_caching = True
        rules.verify_and_update_config(asked)
    except Exception as error:  # whatever another version's rules raise, nothing is loaded then
        log.info("vLLM's rules for the model cannot be asked about a prefix cache: %s", error)
        return True
    return not asked.cache_config.enable_prefix_caching
