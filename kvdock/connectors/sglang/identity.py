"""The facts on which the KV of all requests depends: the model and its settings, in the manifest and its revision.

Adapters, salts and a caller's extra key are part of SGLang's own hashes of pages, from which keys are made. An adapter
of SGLang's command line enters them as a hash of its name and path, which does not cover its files, so the revision
contains the digest of its files. An adapter that is loaded later has an id that no other engine uses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from kvdock.connectors.dependences import counted, described
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.heads import HeadParts
from kvdock.connectors.sglang.pools import KVGroup
from kvdock.connectors.weights import FindSnapshot, digest_of_folder, hub_snapshot, weights_of
from kvdock.protocol.schemas import Manifest

MOST_LETTERS = 128
"""The most characters of the model's name in the manifest."""
HASHES = "sglang sha256 pages"
"""SGLang computes its hashes of pages from the tokens, the adapter and salts alone, so they are the same in every
process."""


def revision(
    args: Any, model: Any, settings: Mapping[str, str], *, weights_digest: str,
    find_snapshot: FindSnapshot = hub_snapshot, read_all: bool = False,
) -> str:
    """The digest of the weights and of everything else on which KV depends. Raises NotSupportedError when the weights
    or an adapter cannot be identified. `args`, `model`: SGLang's ServerArgs and ModelConfig; `settings`: the settings
    and variables that identity.py finds; `read_all`: whether the digest of the weights covers all bytes of their
    files.
    """
    load = SimpleNamespace(
        load_format=args.load_format, download_dir=args.download_dir,
        model_loader_extra_config=getattr(args, "model_loader_extra_config", ""),
    )
    about = SimpleNamespace(
        model=args.model_path, revision=args.revision, hf_config=model.hf_config, seed=args.random_seed,
        model_weights="",
    )
    fields = {
        "hf_config": described(json.loads(model.hf_config.to_json_string(use_diff=False))),
        "dtype": str(model.dtype), "quantization": str(model.quantization),
        "settings": dict(settings), "adapters": adapters_of(args.lora_paths, find_snapshot),
        "draft": draft_of(args, about, load, weights_digest, find_snapshot, read_all=read_all),
        **weights_of(about, load, weights_digest, find_snapshot, whole=read_all),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def draft_of(
    args: Any, target: Any, load: Any, weights_digest: str, find_snapshot: FindSnapshot, *, read_all: bool = False
) -> dict[str, Any]:
    """The facts on which the KV of a draft model depends, if the model is no part of the target: how drafts are made,
    and its weights. `weights_digest`, if it is given, names the draft's weights, too."""
    path = getattr(args, "speculative_draft_model_path", None)
    if path in (None, args.model_path):
        return {}
    about = SimpleNamespace(**{
        **vars(target), "model": path, "revision": args.speculative_draft_model_revision,
        "hf_config": None,  # the target's configuration has the target's commit
    })
    own = args.speculative_draft_load_format or args.load_format
    load = SimpleNamespace(**{**vars(load), "load_format": own})
    weights = weights_of(about, load, weights_digest, find_snapshot, whole=read_all)
    return {"algorithm": args.speculative_algorithm, **weights}


def adapters_of(given: Any, find_snapshot: FindSnapshot) -> list[list[str]]:
    """The name, path and digest of the files of each adapter that SGLang was started with: SGLang's page hashes contain
    a hash of name and path."""
    found = []
    for one in given.items() if isinstance(given, Mapping) else given or ():
        name, path = _named(one)
        folder = Path(path) if Path(path).is_dir() else find_snapshot(path, None, None)
        if folder is None:
            raise NotSupportedError(
                f"kvdock cannot tell the adapter {name!r} from others: {path} is neither a folder nor in the hub's "
                "cache on this machine."
            )
        found.append([name, path, digest_of_folder(folder)])
    return sorted(found)


def _named(adapter: Any) -> tuple[str, str]:
    """Name and path of an adapter, in each form that SGLang accepts: NAME=PATH, PATH, a mapping or a LoRARef."""
    if isinstance(adapter, str):
        name, _, path = adapter.rpartition("=")
        return name or path, path
    if isinstance(adapter, tuple):
        adapter = {"lora_name": adapter[0], "lora_path": getattr(adapter[1], "lora_path", adapter[1])}
    if isinstance(adapter, Mapping):
        return str(adapter["lora_name"]), str(adapter["lora_path"])
    return str(adapter.lora_name), str(adapter.lora_path)


def manifest_of(
    model: Any, version: str, groups: Sequence[KVGroup], *, revision: str, page_tokens: int, shards: int, stages: int,
    kv_dtype: str, parts: HeadParts | None = None,
) -> Manifest:
    """The manifest, which is equal on all ranks. Its token order names SGLang, so that no other engine shares its KV:
    even if the order of elements is the same, SGLang's kernels round differently. `groups`: those of a stage;
    `shards`: the ranks of a stage; `stages`: of the pipeline; `parts`: how KV is divided for all tensor-parallel sizes.
    """
    of_rank = parts.of_worker if parts is not None else 1
    writers = 1 if all(group.is_latent for group in groups) else parts.parts if parts is not None else shards
    writers *= stages
    return Manifest(
        model=str((model.hf_config.architectures or ["unknown"])[0])[:MOST_LETTERS],
        revision=revision,
        kv_dtype=kv_dtype.removeprefix("torch."),
        layers=sum(len(group.planes) for group in groups) * stages,
        kv_heads=model.get_total_num_kv_heads(),
        head_size=max(1, int(model.head_dim)),
        token_order=f"sglang {'.'.join(version.split('.')[:2])} {signature(groups, parts)}",
        chunk_tokens=page_tokens,
        block_tokens=page_tokens,
        tensor_parallel=writers,
        writers=writers,
        any_tensor_parallel=True if parts is not None else UNSET,
        hash_function=HASHES,
        groups=tuple(
            replace(group.described, part_bytes=group.described.part_bytes // of_rank) for group in groups
        ),
    )


def signature(groups: Sequence[KVGroup], parts: HeadParts | None = None) -> str:
    """For each group, the order of elements, the layers, and the run lengths and counts of its planes; with `parts` the
    bytes of a part's planes, and how many heads these are."""
    def inside(group: KVGroup) -> str:
        runs = {(run, count) for _, _, run, count, _ in group.layout.planes}
        if parts is None:
            return str(sorted(runs))
        return f"{parts.heads} heads {sorted({run * count // parts.of_worker for run, count in runs})}"

    return "|".join(
        f"{group.layout.token_order}[{','.join(str(layer) for layer in sorted(group.planes))}]{inside(group)}"
        for group in groups
    )


# --------------------------------------------------------------------------- settings on which KV depends

# The settings and environment variables of SGLang on which the bytes of KV depend, beside tokens and weights.
#
# SGLang has some four hundred settings and as many variables, and each release adds some. So the rule for settings is
# the opposite of vLLM's: every setting that is not at its default is part of the manifest, except those that are known
# to change no byte of KV, or that another part of the manifest covers. Engines that differ in an unknown setting share
# nothing.

_HARMLESS = """
    model_path tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init load_format trust_remote_code revision served_model_name dtype kv_cache_dtype page_size
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    prefill_decode_interval enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
    schedule_conservativeness swa_full_tokens_ratio max_mamba_cache_size mamba_full_memory_ratio
    mamba_max_states_per_path radix_eviction_policy radix_eviction_policy_config
    pp_max_micro_batch_size
    disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk nccl_port
    dist_timeout dist_init_addr gated_launch_port nnodes node_rank tp_size dp_size attn_dp_size load_balance_method
    enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head device base_gpu_id gpu_id_step
    random_seed watchdog_timeout soft_watchdog_timeout sleep_on_idle numa_node gc_threshold host port
    fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args skip_server_warmup
    warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
    ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key weight_version chat_template
    trust_request_chat_template hf_chat_template_name completion_template file_storage_path enable_cache_report
    return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs strip_thinking_cache
    enable_strict_thinking tool_call_parser tool_server sampling_defaults preferred_sampling_params
    allow_auto_truncate stream_interval batch_notify_size stream_response_default_include_usage
    incremental_streaming_output log_level log_level_http log_requests log_requests_level log_requests_format
    log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
    smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
    kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
    forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint export_metrics_to_file
    export_metrics_to_file_dir stat_loggers constrained_json_whitespace_pattern
    constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt sampling_backend grammar_backend
    cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode
    cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill disable_prefill_cuda_graph
    disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph
    enable_cudagraph_gc debug_cuda_graph enable_unified_cache_external_linker unified_cache_external_linker_backend
    unified_cache_external_linker_config lora_paths max_loaded_loras max_loras_per_batch lora_eviction_policy
    disaggregation_bootstrap_port disaggregation_ib_device disaggregation_transfer_backend
    disaggregation_enable_kv_checksum optimistic_prefill_attempts
    enable_lora_overlap_loading speculative_algorithm download_dir model_checksum delete_ckpt_after_loading
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    enable_custom_logit_processor enable_return_hidden_states enable_return_routed_experts
    disable_outlines_disk_cache custom_sigquit_handler is_embedding
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Settings that change no byte of KV, or that other parts of the manifest cover: the model's files, the KV's type, the
split over ranks, adapters."""
OWN = ("SGLANG_", "SGL_")
_HARMLESS_VARIABLES = """
    SGLANG_KVDOCK SGLANG_PLUGINS SGLANG_RUN_ID SGLANG_HOST_IP SGLANG_BACKUP_PORT_BASE SGLANG_DP_RANK SGLANG_TP_RANK
    SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_DETECT_SLOW_RANK SGLANG_ENABLE_RANK_CONSENSUS_CHECKER
    SGLANG_BLOCK_NONZERO_RANK_CHILDREN SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_RAY_BUNDLE_INDICES
    SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_CPU_OMP_THREADS_BIND SGLANG_GRPC_WORKER_THREADS
    SGLANG_ENCODER_VIDEO_DECODE_NUM_THREADS SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS
    SGLANG_LOG_DECODE_GRAPH_KEY SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_GC
    SGLANG_LOG_LAZY_COMPACTION_STATS SGLANG_LOG_MS SGLANG_LOG_PICKLE_IPC_OBJECTS SGLANG_LOG_REQUEST_EXCEEDED_MS
    SGLANG_LOG_REQUEST_HEADERS SGLANG_LOG_SCHEDULER_STATUS_TARGET SGLANG_LOGGING_CONFIG_PATH
    SGLANG_DSPARK_LOG_SPS_PRED_INTERVAL SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT
    SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS SGLANG_GDN_DECODE_FUSION_LOG_LAYER_HITS
    SGLANG_JIT_BENCHMARK_DISABLE_LOG_BANDWIDTH SGLANG_JIT_BENCHMARK_DISABLE_LOG_FLOPS SGLANG_JIT_LOG_RESOURCE_USAGE
    SGLANG_KERNEL_API_LOGDEST SGLANG_KERNEL_API_LOGLEVEL SGLANG_PREFILL_DELAYER_DEBUG_LOG
    SGLANG_ROUTING_KEY_POLICY_DEBUG_LOG SGLANG_DSV4_Q8KV8_PREFILL_LOG SGLANG_JIT_CACHE_DEBUG SGLANG_TBO_DEBUG
    SGLANG_PHASE_CHECKER_DEBUG SGLANG_DEBUG_MEMORY_POOL SGLANG_DEBUG_POISON_POOL SGLANG_DEBUG_SYMM_MEM
    SGLANG_DSPARK_DEBUG_CONFIDENCE_METRICS SGLANG_DSPARK_DEBUG_DUMP SGLANG_DSPARK_STS_COLLECT_PATH
    SGLANG_MAMBA_DEBUG_ASSERTS SGLANG_DSA_KPOOL_DEBUG_BOUNDS
    SGLANG_TRACE_ASYNC SGLANG_TRACE_ASYNC_FLUSH_THRESHOLD SGLANG_TRACE_LEVEL SGLANG_TRACE_LOGITS_E2E
    SGLANG_TRACE_LOGITS_E2E_SYNC SGLANG_TRACE_SAMPLER_E2E SGLANG_TRACE_QWEN_MOE_DEEPEP_E2E
    SGLANG_DEEPEP_V2_TRACE_CONTIG SGLANG_DEEPEP_V2_TRACE_MASKED SGLANG_ENABLE_CUDA_GRAPH_CAPTURE_TRACE
    SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS
    SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2 SGLANG_PROFILE_WITH_STACK
    SGLANG_MEM_PROFILE_MAX_ENTRIES SGLANG_NSYS_PROFILING SGLANG_ENABLE_METRICS_DEVICE_TIMER
    SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_HTTP_SERVER_APP_PATH
    SGLANG_EXPERT_PACK_STATS_PATH SGLANG_HICACHE_HF3FS_CONFIG_PATH SGLANG_HICACHE_MEMCACHE_CONFIG_PATH
    SGLANG_HICACHE_MOONCAKE_CONFIG_PATH SGLANG_HICACHE_SIMM_CONFIG_PATH SGLANG_HICACHE_HOST_HUGEPAGE
    SGLANG_HICACHE_HOST_HUGEPAGE_SIZE SGLANG_HICACHE_HOST_MEM_BACKEND SGLANG_HICACHE_HOST_NUMA_NODE
    SGLANG_HICACHE_HOST_PREFAULT SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB SGLANG_RETURN_ORIGINAL_LOGPROB
    SGLANG_ENABLE_LOGPROB_CHUNK SGLANG_LOGPROB_CHUNK_SIZE SGLANG_USE_MODELSCOPE SGLANG_FORCE_SHUTDOWN
    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK SGLANG_EXPOSE_OWN_ENV_VARS SGLANG_RECORD_STEP_TIME SGLANG_CUDA_COREDUMP
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_TEST_MAX_RETRY SGLANG_IS_IN_CI SGLANG_IS_IN_CI_AMD
"""
HARMLESS_VARIABLES = frozenset(_HARMLESS_VARIABLES.split())
"""Variables of SGLang 0.5.23 for paths, monitoring and the roles of processes. For its other variables, the rule of
kvdock/connectors/dependences.py decides."""


_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
"""Values that count as equal, together with 0, because SGLang replaces None by another of them when it starts."""


def settings_set(args: Any, fields: Iterable[Any]) -> dict[str, str]:
    """The settings that are not at their defaults and on which KV may depend. `fields`: the fields of SGLang's
    ServerArgs, with their defaults."""
    return dict(_set(args, fields))


def _set(args: Any, fields: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for field in fields:
        if field.name in HARMLESS or field.name.startswith("_"):
            continue
        found = getattr(args, field.name, None)
        usual = field.default_factory() if callable(field.default_factory) else field.default
        if found != usual and not (found in _EMPTY and usual in _EMPTY):
            yield field.name, str(found)


def variables_set(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables on which KV may depend. `environ`: all variables of the process."""
    return counted(environ, OWN, HARMLESS_VARIABLES)
