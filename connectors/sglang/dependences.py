"""What the bytes of KV depend on beside tokens and weights, of SGLang's settings and environment.

SGLang has some four hundred settings and as many variables, and each release adds some. So the question is put the
other way round than for vLLM: whatever somebody has set is named in the manifest, but for what is known to change no
byte of KV, or is said by another part of the manifest. A setting that nobody knows keeps two engines apart; it never
lets them share what differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_HARMLESS = """
    model_path tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init load_format trust_remote_code revision served_model_name dtype kv_cache_dtype page_size
    mem_fraction_static max_running_requests max_queued_requests max_total_tokens chunked_prefill_size
    prefill_decode_interval enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy
    enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
    schedule_conservativeness swa_full_tokens_ratio max_mamba_cache_size mamba_full_memory_ratio
    mamba_max_states_per_path radix_eviction_policy radix_eviction_policy_config
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
    enable_lora_overlap_loading speculative_algorithm download_dir model_checksum delete_ckpt_after_loading
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    enable_custom_logit_processor enable_return_hidden_states enable_return_routed_experts
    disable_outlines_disk_cache custom_sigquit_handler is_embedding
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Settings that change no byte of KV, or that other parts of the manifest say: the model's files, the KV's type, the
split over ranks, adapters."""
PREFIXES = ("SGLANG_", "SGL_")
SAYS_NOTHING = re.compile(
    r"PORT|HOST|DIR|PATH|FOLDER|LOG|TRACE|PROFIL|METRIC|TIMEOUT|INTERVAL|PLUGINS|DEBUG|WATCHDOG|RUN_ID|RANK|THREADS|"
    r"KVDOCK"
)
"""Variables with these words say where things lie, how they are watched, and which process this is."""


def settings_set(args: Any, fields: Iterable[Any]) -> dict[str, str]:
    """What somebody has set, and what KV may depend on. `fields`: those of SGLang's ServerArgs, with their defaults."""
    return dict(_set(args, fields))


def _set(args: Any, fields: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for field in fields:
        if field.name in HARMLESS or field.name.startswith("_"):
            continue
        found = getattr(args, field.name, None)
        usual = field.default_factory() if callable(field.default_factory) else field.default
        if found != usual and found not in (None, False, "", [], {}):
            yield field.name, str(found)


def variables_set(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`: the process's environment variables."""
    return {
        name: value for name, value in environ.items()
        if name.startswith(PREFIXES) and not SAYS_NOTHING.search(name)
    }
