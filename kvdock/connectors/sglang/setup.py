"""Decisions that are made once, when the linker is made: the settings, and whether kvdock can serve the engine.

Invariant: a kind of engine that is not known to work is refused, with one sentence that names the value found and the
value wanted. An untested version of SGLang causes only a warning.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.settings import MOST_TIER_WAIT_S, EngineSettings, checked, of_environment

log = logging.getLogger("kvdock.sglang")

EXTRA = "linker_extra_config"
PAGES = (64, 128, 256)
"""The page sizes, in tokens, that kvdock serves, because a page is a chunk: finding a smaller one costs more than
computing it."""
WANTED_PAGES = "64, 128 or 256"
MOST_STAGES = 2
"""With more, the first stage could wait for a load of the last one, which waits for the first."""
DRAFTS_WITHOUT_KV = (None, "NGRAM")


@dataclass(frozen=True)
class Settings(EngineSettings):
    """The limits of loads count tokens that the engine's own cache lacks, because SGLang looks up no others."""

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        **EngineSettings.RANGES, "verify_wait_s": (0.0, MOST_TIER_WAIT_S), "trust_s": (0.0, math.inf),
        "early_load_tokens": (0, math.inf),
    }

    verify_wait_s: float = 2.0
    """How long a request may wait until found pages are hashed; SGLang computes pages that were not verified by
    then."""
    trust_s: float = 600.0
    """Pages whose hashes were right within this time are promised without being hashed again; 0: every page is hashed
    for every lookup."""
    early_load_tokens: int = 0
    """While requests run, a hit of at least so many tokens is loaded before SGLang admits its request (early.py); 0:
    none is. On an H200 this spared running requests nothing, since a load overlaps its own batch (bench/LOG.md)."""

    @classmethod
    def load(cls, extra: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
        """`extra`: SGLang's linker_extra_config. Raises NotSupportedError for a name that is no setting, a value of
        another type, a value out of range."""
        return cls.of(of_environment(environ) | checked(extra, cls.types(), EXTRA), EXTRA)


def refuse_what_is_not_supported(args: Any, params: Any, model: Any, components: Collection[str]) -> None:
    """Raises NotSupportedError when kvdock cannot serve the engine; its message is one sentence. `args`, `params`,
    `model`: SGLang's ServerArgs, CacheInitParams and ModelConfig; `components`: the names of the components of SGLang's
    tree."""
    if params.page_size not in PAGES:
        raise NotSupportedError(
            f"kvdock stores whole pages: --page-size is {params.page_size}, and {WANTED_PAGES} is wanted."
        )
    for what, found in (
        ("context parallelism of attention", params.attn_cp_size),
        ("context parallelism of decoding", getattr(args, "dcp_size", 1) or 1),
        ("pipelines over several nodes", getattr(args, "nnodes", 1) if params.pp_size > 1 else 1),
    ):
        if found > 1:
            raise NotSupportedError(f"kvdock does not serve {what} under SGLang: found {found}, and 1 is wanted.")
    if params.pp_size > 1:
        _refuse_stages(args, params, model, components)
    if "MAMBA" in components and "SWA" in components:
        raise NotSupportedError(
            "kvdock does not serve recurrent states (Mamba, linear attention) beside sliding windows under SGLang: one "
            "of the two is wanted."
        )
    if params.mtp_draft_mamba_pools:
        raise NotSupportedError(
            f"kvdock does not serve drafts with recurrent states of their own under SGLang: found "
            f"{len(params.mtp_draft_mamba_pools)} pools of them, and drafts of attention alone are wanted."
        )
    if args.speculative_algorithm not in DRAFTS_WITHOUT_KV and not drafts_of(params):
        raise NotSupportedError(
            f"kvdock does not know where the drafts of --speculative-algorithm {args.speculative_algorithm} have their "
            "KV under SGLang: an algorithm whose draft model has a pool (EAGLE, STANDALONE), NGRAM or none is wanted."
        )
    if getattr(model, "is_multimodal", False) and (model.is_encoder_decoder or not model.is_generation):
        raise NotSupportedError(
            "kvdock does not serve encoders of images or sound under SGLang, whose KV depends on more than the tokens: "
            "a model that generates text behind them is wanted, or --enable-multimodal false."
        )
    for name, why in UNSERVED.items():
        if is_set(args, name):
            raise NotSupportedError(f"kvdock does not serve {setting_named(args, name)} under SGLang: {why}.")


def _refuse_stages(args: Any, params: Any, model: Any, components: Collection[str]) -> None:
    """Raises NotSupportedError unless all stages have parts of equal size: a part is the KV of a page in one stage."""
    if params.pp_size > MOST_STAGES:
        raise NotSupportedError(
            f"kvdock serves pipelines of up to {MOST_STAGES} stages under SGLang: --pp-size is {params.pp_size}."
        )
    if {*components} != {"FULL"}:
        found = ", ".join(sorted({*components} - {"FULL"}))
        raise NotSupportedError(
            f"kvdock serves pipeline parallelism with one kind of KV under SGLang, and found {found} beside it: tensor "
            "parallelism is wanted."
        )
    if args.speculative_algorithm is not None:
        raise NotSupportedError(
            "kvdock does not serve pipeline parallelism beside --speculative-algorithm "
            f"{args.speculative_algorithm} under SGLang, where the last stage alone has drafts: tensor parallelism is "
            "wanted."
        )
    if getattr(args, "disaggregation_mode", None) == "prefill":
        raise NotSupportedError(
            "kvdock does not serve pipeline parallelism beside --disaggregation-mode prefill under SGLang, whose loop "
            "then is another one: tensor parallelism is wanted."
        )
    from sglang.srt.distributed.utils import get_pp_indices

    ends = [get_pp_indices(model.num_hidden_layers, stage, params.pp_size) for stage in range(params.pp_size)]
    layers = [end - first for first, end in ends]
    if len(set(layers)) > 1:
        raise NotSupportedError(
            f"kvdock needs pipeline stages of equally many layers, found {layers}: a --pp-size that divides "
            f"{sum(layers)} is wanted, and no SGLANG_PP_LAYER_PARTITION."
        )


def is_set(args: Any, name: str) -> bool:
    """Whether one of SGLang's settings that are off by default is on, and not as in SERVED."""
    return getattr(args, name, None) not in (None, False, "", "null", SERVED.get(name))


def setting_named(args: Any, name: str) -> str:
    """One of SGLang's settings as people give it, with its value if it is a word."""
    value = getattr(args, name, None)
    return f"--{name.replace('_', '-')}" + (f" {value}" if isinstance(value, str) else "")


def drafts_of(params: Any) -> tuple[Any, ...]:
    """The KV pools of draft models, which have the same pages as the target's pool."""
    return (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)


UNSERVED = {
    "enable_memory_saver": "it takes KV memory away while copies may be in flight",
    "enable_unified_memory": "SGLang refuses any linker beside it, for its pages move in memory while it runs",
    "enable_hisparse": "part of its KV is elsewhere",
    "dllm_algorithm": "a diffusion model's KV depends on later tokens",
    "disaggregation_mode": "an engine that decodes gets its KV from one that computes prompts, and that one is served",
    "enable_pd_role_switch": "an engine that decodes gets its KV from one that computes prompts",
    "enable_return_routed_experts": "SGLang keeps the experts of each slot beside its KV, and a load has KV alone",
    "enable_return_indexer_topk": "SGLang keeps an indexer's choice beside each slot's KV, and a load has KV alone",
}
"""Settings for which the engine is refused if they are set, with the reason."""

SERVED = {"disaggregation_mode": "prefill"}
"""Values of settings in UNSERVED that are served."""

VERSIONS = (0, 5, 23), (0, 5, 23)
"""The first and the last version of SGLang that were tested."""


def warn_of_version(version: str) -> None:
    """Warns if `version`, that of SGLang, is outside VERSIONS."""
    first, last = VERSIONS
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not first <= tuple(map(int, found.groups())) <= last:
        tried = ".".join(map(str, first))
        log.warning("found SGLang %s, and kvdock was tried with %s: watch for errors", version, tried)
