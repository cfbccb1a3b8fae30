"""Connectors for engines of several workers: what a test changes in their processes comes with the class they load."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvdock.connectors.vllm import KvdockConnector
from kvdock.connectors.worker import Loading


class Several(KvdockConnector):
    """As it is; with what this module does for pipelines."""


class OnNoGpu(KvdockConnector):
    """Asked to copy on a GPU that this process cannot use."""

    @staticmethod
    def device_of(kv_caches: dict[str, Any]) -> str:
        return "cuda:0"


class OneDamaged(KvdockConnector):
    """Before each of its loads, the worker of KVDOCK_DAMAGED_RANK flips a byte of its second chunk at the server."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        half = self._worker._connector
        if half.rank != int(os.environ["KVDOCK_DAMAGED_RANK"]):
            return
        real = half.submit_load

        def submit_load(attachment: Any, plan: Any, bands: Any, **how: Any) -> Loading:
            part = next(part for part in plan.pieces[1].parts if part.writer == half.rank)
            byte = ctypes.c_uint8.from_address(attachment.segments.address(part.segment, part.offset, part.length) + 5)
            byte.value ^= 1
            return real(attachment, plan, bands, **how)

        half.submit_load = submit_load


# An eager vLLM 0.32 on the CPU never warms up, which is when it makes what stages of a pipeline receive into.
gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def made_first(runner: Any, *arguments: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return gather(runner, *arguments)


GPUModelRunner.sync_and_gather_intermediate_tensors = made_first
