"""Decisions that are made once, when the connector starts: settings, refusals, the engine's traits, logging.

Invariant: an engine whose settings are not known to work is refused, in one sentence that names the value found and the
value wanted. An untested version of vLLM causes only a warning.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.session import Attachment, ServerEpoch
from kvdock.connectors.settings import EngineSettings, checked, of_environment
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.steps import NOWHERE
from kvdock.protocol.access import CONNECTOR_PREFIX

log = logging.getLogger("kvdock.vllm")

EXTRA = "kv_connector_extra_config"
BY_LAYER = ("eager", "piecewise", "never")
ON_RESET = ("clear", "apart", "leave")


@dataclass(frozen=True)
class Settings(EngineSettings):
    ABOVE_ZERO: ClassVar[tuple[str, ...]] = (*EngineSettings.ABOVE_ZERO, "chunk_tokens")

    load_once: bool = True
    """If another request of this engine is loading the same tokens, whether a request waits for that load and takes the
    tokens from vLLM's own prefix cache, instead of loading them as well (kvdock/connectors/waits.py)."""
    chunk_tokens: int = 128
    """The tokens of a chunk, rounded up to whole blocks; with recurrent states it is one block."""
    load_async: bool = True
    """Whether requests are loaded in the background. False: a request is loaded in the step that runs it, and delays
    that step."""
    load_by_layer: str = "never"
    """When each layer waits only for its own KV of a load, instead of for all of the load. "eager": if vLLM runs
    without CUDA graphs; "piecewise": always, and vLLM uses no full graphs; "never". See loads_by_layer."""
    on_reset: str = "clear"
    """What vLLM's reset of the connector means. "clear": the server clears the namespace of this engine; "apart": the
    weights may have changed, so this engine shares nothing that was stored before; "leave": the weights are the same.
    Sleep mode needs one of the last two."""
    recompute_failed_loads: bool = True
    """Tokens that could not be loaded are computed, whatever vLLM's kv_load_failure_policy is, unless other connectors
    are used as well: then that policy applies."""

    @classmethod
    def load(cls, extra: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
        """`extra`: vLLM's kv_connector_extra_config, which wins over the environment. Raises NotSupportedError for a
        name that is no setting, a value of another type, a value out of range."""
        known = cls.types()
        shared = of_environment(environ)
        values = {**shared, **from_environment(environ, known)}
        where = EXTRA if values.keys() <= {*shared, *extra} else f"{EXTRA} and {CONNECTOR_PREFIX}…"
        made = cls.of(values | checked(extra, known, EXTRA), where)
        for name, choices in (("load_by_layer", BY_LAYER), ("on_reset", ON_RESET)):
            if (found := getattr(made, name)) not in choices:
                raise NotSupportedError(f"{where}: {name} is {found!r}, and one of {', '.join(choices)} is wanted.")
        return made


DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
DRAFTS_WITH_KV = ("eagle", "eagle3", "mtp", "draft_model", "dflash", "dspark")
"""Methods whose drafts keep KV. The target model checks every draft, so wrong KV of drafts costs speed, and never
changes tokens."""
MOST_RANKS = 128


@dataclass(frozen=True)
class RankPosition:
    """A worker's position among those of its engine. `rank` counts the pipeline stages first: where all workers of a
    stage hold the same bytes (MLA), ranks 0 … writers - 1 are one of each stage; rank r reads part r mod writers."""

    rank: int
    ranks: int
    writers: int
    heads_split: int
    """Over how many parts of a stage the bytes of a token are spread."""
    own_ranks: tuple[int, ...] = ()
    """The ranks of the manifest that the worker takes: several if it has the heads of several parts
    (kvdock/connectors/heads.py)."""


@dataclass(frozen=True)
class EngineTraits:
    """The facts about the engine that a worker needs."""

    takes_failed_requests: bool
    """Whether failed loads can be reported by request."""
    undoes_steps: bool
    """Whether vLLM computes a step again if kvdock reports that the step read blocks that failed to load."""
    loads_by_layer: bool
    """Whether vLLM asks for each layer's KV before it reads this KV."""
    reports_early: bool
    """Whether a load may be reported before it has ended, on a GPU."""
    hash_threads: int
    """CPU threads that hash the end of a load that is reported early."""
    zeroes_blocks: bool = False
    """Whether vLLM zeroes the blocks that it allocates, on its own stream: loads must run after that."""


def place_of(parallel: Any, groups: Sequence[KVGroup]) -> RankPosition:
    """`parallel`: the worker's own ParallelConfig, whose rank counts the tensor-parallel workers first."""
    shards, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, shard = divmod(parallel.rank % (shards * stages), shards)
    split = 1 if all(group.latent for group in groups) else shards
    rank = shard * stages + stage
    return RankPosition(rank, shards * stages, split * stages, split, (rank,))


def workers_here(vllm_config: Any) -> int:
    """The number of workers that this engine and its data-parallel peers have on this machine."""
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * max(1, parallel.data_parallel_size_local))


def refuse_what_is_not_supported(vllm_config: Any, kv_groups: int, settings: Settings) -> None:
    """Raises NotSupportedError, with one sentence for the first reason, if kvdock cannot serve this engine.
    `kv_groups`: the number of KV cache groups."""
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
    _refuse_what_the_cpu_lays_out_wrong(vllm_config)
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        _refuse_to_sleep(settings)


def _refuse_what_the_cpu_lays_out_wrong(vllm_config: Any) -> None:
    """vLLM's CPU backend writes blocks that have scales of their own 8,192 bytes apart, and reports 4,096. GPUs are not
    affected."""
    device = getattr(vllm_config, "device_config", None)
    kind = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    if kind.endswith("_per_token_head") and getattr(device, "device_type", "") == "cpu":
        raise NotSupportedError(
            f"kvdock cannot share KV of --kv-cache-dtype {kind} on a CPU, where vLLM lays it out in another way "
            "than it reports: auto or fp8 is wanted."
        )


def _refuse_to_sleep(settings: Settings) -> None:
    """Raises NotSupportedError, unless `on_reset` defines the effect of a sleep on the pool and vLLM reports when it
    frees the KV memory."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if settings.on_reset == "clear":
        raise NotSupportedError(
            "kvdock: enable_sleep_mode is on, and on_reset is 'clear', so each sleep would clear what other instances "
            "share; wanted: 'leave' if the weights come back as they were, 'apart' if they may change."
        )
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        raise NotSupportedError(
            "kvdock: enable_sleep_mode is on, and this vLLM does not notify connectors when it frees the KV memory; "
            "wanted: off, or vLLM 0.33."
        )


def _refuse_unequal_stages(vllm_config: Any, kv_groups: int) -> None:
    """Raises NotSupportedError unless all stages have parts of equal size: a part is the KV of a chunk in one stage."""
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
    parallel, layers = copy.copy(vllm_config.parallel_config), []
    for stage in range(parallel.pipeline_parallel_size):
        parallel.rank = stage * parallel.tensor_parallel_size
        first, end = vllm_config.model_config.get_layers_start_end_indices(parallel)
        layers.append(end - first)
    if len(set(layers)) > 1:
        raise NotSupportedError(
            f"kvdock needs pipeline stages of equally many layers, found {layers}: choose a pipeline_parallel_size "
            f"that divides {sum(layers)}, and leave VLLM_PP_LAYER_PARTITION unset."
        )


VERSIONS = (0, 24), (0, 33)
"""The first and the last minor version of vLLM that were tested."""


def warn_of_version(version: str) -> None:
    """Warns if `version`, that of vLLM, is outside VERSIONS."""
    first, last = VERSIONS
    found = re.match(r"(\d+)\.(\d+)\.", version)
    if found is None or not first <= (int(found[1]), int(found[2])) <= last:
        log.warning(
            "found vLLM %s, and kvdock was tried with %d.%d to %d.%d: watch for errors, or choose one of those",
            version, *first, *last,
        )


def warn_of_policy(policy: str, place: RankPosition) -> None:
    """Warns in one worker of an engine unless `policy`, its kv_load_failure_policy, is "recompute"."""
    if policy != "recompute" and place.rank == 0:
        log.warning(
            'kv_load_failure_policy is "%s", so requests whose KV is lost on the way fail: "recompute" is better, at '
            "the top of --kv-transfer-config", policy,
        )


def drafts_with_kv(vllm_config: Any) -> Any:
    """vLLM's SpeculativeConfig if its method keeps KV of drafts; else None."""
    drafts = vllm_config.speculative_config
    return drafts if drafts is not None and drafts.method in DRAFTS_WITH_KV else None


def loads_by_layer(vllm_config: Any, settings: Settings, groups: Sequence[KVGroup]) -> bool:
    """Whether vLLM asks for each layer's KV before it reads it, in every step. It does so only for attention layers: an
    indexer reads its KV without asking, and vLLM asks for drafts' layers too late."""
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


def reports_early(vllm_config: Any, kv_cache_config: Any, place: RankPosition) -> bool:
    """Whether a load may be reported before it has ended. Not if other ranks store on this rank's behalf: they would
    publish bytes that only this rank has verified. Not in a pipeline, where another stage may be waiting although a
    step computes nothing. Not where vLLM zeroes the blocks that it gives out, which is not ordered after loads."""
    one_stage = vllm_config.parallel_config.pipeline_parallel_size == 1
    return place.ranks <= place.writers and one_stage and not zeroes_blocks(kv_cache_config)


def zeroes_blocks(kv_cache_config: Any) -> bool:
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def keeps_blocks_back(vllm_config: Any) -> bool:
    """Whether vLLM reuses a request's blocks only after the steps in which the request ran have ended
    (defer_block_free). All tested versions do so for connectors that load."""
    from vllm.v1.core.sched.scheduler import Scheduler  # imported here: settings are also read without vLLM

    return hasattr(Scheduler, "_drain_deferred_frees") and bool(vllm_config.kv_transfer_config.is_kv_consumer)


def undoes_steps(vllm_config: Any) -> bool:
    """Whether this engine computes a step again if it read blocks that failed to load. An engine that schedules ahead
    keeps the next step's token all the same, and so does a pipeline, where a prompt's next chunk is already in
    progress. The second model runner does not correct its count of computed tokens."""
    runs_ahead = vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1
    return not runs_ahead and not getattr(vllm_config, "use_v2_model_runner", True)


# ---------------------------------------------------------------------- log lines

OURS, THEIRS = logging.getLogger("kvdock"), logging.getLogger("vllm")


class _AmongTheirs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # a wrong log call must not end the thread
            self.handleError(record)
            return
        named = copy.copy(record)
        named.msg, named.args = text if text.startswith("kvdock") else f"kvdock: {text}", None
        for handler in THEIRS.handlers:
            if named.levelno >= handler.level:
                handler.handle(named)


def log_among_theirs() -> None:
    """From now on kvdock's log lines go to vLLM's handlers. Changes nothing where kvdock's logger is configured, or
    where vLLM configures none."""
    if THEIRS.handlers and not OURS.handlers and OURS.level == logging.NOTSET:
        OURS.addHandler(_AmongTheirs())
        OURS.setLevel(THEIRS.getEffectiveLevel())
        OURS.propagate = False


# --------------------------------------------------------------------------------
# The server to which each worker of an engine is attached. No load is promised until it is the scheduler's for all.
#
# A lease is valid only at the server that granted it. A worker is attached to another server than the scheduler if it
# runs on another machine, or with another address. A worker that has not yet noticed that its server was replaced is
# only late: it reports the new server within its next steps.

FIRST_STEPS = 3
"""After this many steps every worker that is attached has had time to report it."""


class Attached:
    """`ranks`: how many workers there are. `steps_ahead`: how many steps are in progress when vLLM plans another one.
    """

    def __init__(self, ranks: int, steps_ahead: int = 0) -> None:
        self._ranks, self._first_steps, self._steps = ranks, FIRST_STEPS + 2 * steps_ahead, 0
        self._own_epoch: ServerEpoch | None = None
        self._epochs: dict[int, ServerEpoch] = {}
        self._own_pools: set[str] = set()
        self._logged: set[int] = set()

    def planned(self) -> None:
        """vLLM plans a step."""
        self._steps += 1

    def reported(self, epochs: Mapping[int, ServerEpoch]) -> None:
        """Workers have reported the servers to which they are attached."""
        self._epochs.update(epochs)

    @property
    def is_early(self) -> bool:
        """Whether some workers may not have had time to report yet: at the start, and after a server was replaced, when
        a request is the first that could load."""
        return self._steps < self._first_steps

    def everywhere(self, attachment: Attachment | None) -> bool:
        """Whether every worker has reported that it is attached to the same server epoch as the scheduler
        (`attachment`)."""
        if attachment is None:
            return False
        self._own_pools.add(attachment.epoch.pool_id)
        if attachment.epoch != self._own_epoch:
            self._own_epoch, self._steps = attachment.epoch, 0
        if len(self._epochs) < self._ranks:
            return False
        elsewhere = {rank for rank, epoch in self._epochs.items() if self._is_elsewhere(epoch)}
        if elsewhere - self._logged:
            self._logged |= elsewhere
            log.warning(
                "nothing is loaded: the workers of ranks %s are attached to another kvdock server than the scheduler. "
                "All processes of an engine must run on one machine and use one address (KVDOCK_ADDRESS)",
                ", ".join(str(rank) for rank in sorted(elsewhere)),
            )
        return set(self._epochs.values()) == {attachment.epoch}

    def _is_elsewhere(self, epoch: ServerEpoch) -> bool:
        return epoch != NOWHERE and epoch.pool_id not in self._own_pools


# --------------------------------------------------------------------------------
# Settings of the connector from the environment: KVDOCK_VLLM_CHUNK_TOKENS is chunk_tokens.
#
# All processes of vLLM have the same environment, except workers that Ray starts on other machines.

TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def from_environment(environ: Mapping[str, str], known: Mapping[str, type]) -> dict[str, object]:
    """`known`: the type of each setting. Raises NotSupportedError for a variable that names no setting, or whose text
    is not of the setting's type."""
    found: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(CONNECTOR_PREFIX):
            continue
        name = variable.removeprefix(CONNECTOR_PREFIX).lower()
        if name not in known:
            raise NotSupportedError(f"{variable}: {name!r} is no setting of kvdock, which has {', '.join(known)}.")
        try:
            found[name] = TRUTHS[text.lower()] if known[name] is bool else known[name](text)
        except (KeyError, ValueError) as error:
            wanted = "true or false" if known[name] is bool else known[name].__name__
            raise NotSupportedError(f"{variable} is {text!r}, and {wanted} is wanted.") from error
    return found
