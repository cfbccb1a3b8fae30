"""Environment variables on which KV may depend: a rule for unknown ones, and lists of known ones.

The rule: a variable counts if its name starts with a prefix of FAMILIES (libraries that compute for engines) or with a
prefix of the engine's own variables, or if it is one of OTHERS. The manifest holds each variable that counts with its
value, so instances with different values share nothing. Of the families, a variable does not count

- if its prefix is on the list HARMLESS_FAMILIES, or its full name on a list of variables that change no byte of KV or
  that another part of the manifest covers;
- if the last words of its name (and none before them) mean a path, a time or an address of this machine (LAST_WORDS),
  unless the path is that of a kernel's configuration (TUNED);
- if it is empty, or has a value that is known to be the usual one (this holds for OTHERS, too).

Words elsewhere in a name are ignored: PROLOGUE and LOG_TAU name kernels, not logs. Thus an unknown variable of a new
version keeps instances apart until a person has examined it and put it on a list, unless its last words show that it is
harmless.

NCCL's, UCX's and CUDA's variables belong to no family, because nearly all of them control how ranks reach each other
and where memory is. The few that affect computed values are in OTHERS. OMP_NUM_THREADS and similar variables do not
count: splitting a sum over threads does not change the function that is computed, and engines set these variables by
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

FAMILIES = (
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "ATEN_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "TRITON_", "FLASHINFER_",
    "FLASH_", "FLA_", "DG_", "DEEPEP_", "DEEP_NORMAL_MODE_", "TRTLLM_", "TLLM_", "CUTE_DSL_", "CUTLASS_", "TILELANG_",
    "FMHA_", "AITER_", "FLYDSL_", "ROCBLAS_", "HIPBLAS_", "HIPBLASLT_", "MIOPEN_", "ONEDNN_", "DNNL_", "MKL_",
)
"""Prefixes of the variables of kernel libraries: matrix products, attention, mixture of experts."""
OTHERS = frozenset({
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "RCCL_MSCCL_ENABLE",
    "USE_ROCM_AITER_ROPE_BACKEND", "Q_SCALE_CONSTANT", "K_SCALE_CONSTANT", "V_SCALE_CONSTANT",
})
"""Variables outside the families that count: rounding of matrix products, how ranks add their results, the choice of a
kernel, scales of KV (vLLM)."""
_HARMLESS = """
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING
    PYTORCH_NVML_BASED_CUDA_CHECK PYTORCH_KERNEL_CACHE_PATH PYTORCH_ROCM_ARCH PYTORCH_VERSION PYTORCH_BUILD_VERSION
    TORCH_HOME TORCH_LOGS TORCH_LOGS_FORMAT TORCH_LOGS_OUT TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES
    TORCH_SHOW_DISPATCH_TRACE TORCH_DISTRIBUTED_DEBUG TORCH_CUDA_ARCH_LIST TORCH_TRACE TORCH_COMPILE_DEBUG
    TORCH_COMPILE_JOB_ID TORCH_FR_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE TORCH_VERSION TORCH_WARN_ONCE
    TORCHINDUCTOR_COMPILE_THREADS TORCHINDUCTOR_CPP_DYNAMIC_THREADS TORCHINDUCTOR_FX_GRAPH_CACHE
    TORCHINDUCTOR_AUTOGRAD_CACHE TORCHINDUCTOR_FORCE_DISABLE_CACHES TORCHINDUCTOR_WORKER_START TORCHINDUCTOR_PROFILE
    TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE
    TRITON_CACHE_AUTOTUNING TRITON_PRINT_AUTOTUNING TRITON_KERNEL_DUMP TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH
    TRITON_CUOBJDUMP_PATH TRITON_NVDISASM_PATH TRITON_LIBCUDA_PATH TRITON_HOME TRITON_ALWAYS_COMPILE
    TRITON_CACHE_MANAGER TRITON_STORE_BINARY_ONLY
    FLASHINFER_WORKSPACE_BASE FLASHINFER_CUDA_ARCH_LIST FLASHINFER_LOGGING_LEVEL FLASHINFER_LOGLEVEL
    FLASHINFER_LOGDEST FLASHINFER_JIT_VERBOSE FLASHINFER_JIT_DEBUG FLASHINFER_DISABLE_VERSION_CHECK FLASHINFER_NVCC
    FLASHINFER_NVCC_THREADS FLASHINFER_EXTRA_LDFLAGS FLASHINFER_CUBINS_REPOSITORY FLASHINFER_ENABLE_AOT
    DG_JIT_DEBUG DG_JIT_PRINT_COMPILER_COMMAND DG_JIT_PRINT_LOAD_TIME DG_JIT_NVCC_COMPILER DG_PRINT_CONFIGS
    DG_JIT_PTXAS_VERBOSE DG_JIT_DUMP_ASM DG_JIT_DUMP_PTX DG_JIT_DUMP_SASS
    CUTE_DSL_LOG_TO_CONSOLE CUTE_DSL_KEEP_PTX CUTE_DSL_KEEP_CUBIN CUTE_DSL_KEEP_IR CUTE_DSL_PTXAS_PATH
    CUBLAS_LOGINFO_DBG CUBLAS_LOGDEST_DBG CUBLASLT_LOG_FILE CUBLASLT_LOG_MASK CUDNN_LOGINFO_DBG CUDNN_LOGDEST_DBG
    CUDNN_FRONTEND_LOG_INFO CUDNN_FRONTEND_LOG_FILE
    TILELANG_CLEANUP_TEMP_FILES TILELANG_PRINT_ON_COMPILATION MIOPEN_ENABLE_LOGGING MIOPEN_USER_DB_PATH
    MIOPEN_CUSTOM_CACHE_DIR ROCBLAS_LAYER ROCBLAS_TENSILE_LIBPATH ONEDNN_VERBOSE DNNL_VERBOSE MKL_VERBOSE
    MKL_NUM_THREADS MKL_DYNAMIC MKL_THREADING_LAYER MKL_SERVICE_FORCE_INTEL AITER_LOG_LEVEL
    AITER_REBUILD AITER_JIT_DIR
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Variables for logs, caches, paths, memory, threads, versions and the output of compilers."""
HARMLESS_FAMILIES = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCH_ELASTIC_")
"""Prefixes of the variables for how ranks find each other and how they are monitored."""
LAST_WORDS = re.compile(
    r"_(DIR|DIRECTORY|FOLDER|PORT|IP|ADDR|URL|URI|HOSTNAME|LOG_LEVEL|LOGGING_LEVEL|LOG_FILE|LOG_PATH|SO_PATH"
    r"|(TIMEOUT|INTERVAL)(_(S|MS|SEC|SECS|SECONDS))?)$"
)
"""Endings of the names of variables for paths, addresses, log levels, timeouts and intervals."""
TUNED = re.compile(r"CONFIGS?_(DIR|FOLDER|PATH)$")
"""Endings of the names of variables that hold the path of a kernel's configuration. The path counts; the files are not
read."""


def counted(
    environ: Mapping[str, str], own: tuple[str, ...], harmless: Collection[str],
    usual: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, str]:
    """The variables of `environ`, the process's environment, on which KV may depend. `own`: the prefixes of the
    engine's own variables; `harmless`: full names of the engine's variables that change no byte of KV; `usual`: values,
    in lower case, with which a variable changes nothing."""
    usual = usual or {}
    return {
        name: value for name, value in environ.items()
        if value.strip() and _may_count(name, own, harmless)
        and value.strip().lower() not in usual.get(name, ())
    }


def _may_count(name: str, own: tuple[str, ...], harmless: Collection[str]) -> bool:
    if name in OTHERS:
        return True
    if not name.startswith(own + FAMILIES) or name.startswith(HARMLESS_FAMILIES):
        return False
    if name in harmless or name in HARMLESS:
        return False
    return LAST_WORDS.search(name) is None or TUNED.search(name) is not None


# --------------------------------------------------------------------------------
# The fields of a model's configuration on which its KV depends.

SAYS_NOTHING = ("transformers_version", "auto_map", "custom_pipelines", "max_model_len")
"""Fields of a model's configuration on which KV does not depend: how the model was saved, where its code came from, and
max_model_len, which some models keep there without using it to compute."""


def described(config: Any) -> Any:
    """A model's configuration without the fields on which KV does not depend: SAYS_NOTHING, and names that start with
    "_", such as the model's path."""
    if isinstance(config, Mapping):
        return {
            name: described(value) for name, value in config.items()
            if not name.startswith("_") and name not in SAYS_NOTHING
        }
    return [described(item) for item in config] if isinstance(config, list) else config
