"""vLLM's own offload on a CPU: all of it is vLLM's, but for the worker that copies between KV and the primary tier,
which vLLM has for GPUs alone. This one copies at once.

Engines load it by `spec_name` and `spec_module_path`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class CpuWorker(OffloadingWorker):
    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._per_chunk, self._region, self._refs = blocks_per_chunk, region, kv_caches.group_data_refs
        self._kv = [one.tensor.view(torch.int8).view((-1, one.page_size_bytes)) for one in kv_caches.tensors]
        self._chunks = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk) for one in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for kv, chunk, size in self._pages(src_spec, dst_spec.block_ids):
            ctypes.memmove(chunk, kv, size)
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for kv, chunk, size in self._pages(dst_spec, src_spec.block_ids):
            ctypes.memmove(kv, chunk, size)
        self._ended.append(TransferResult(job_id, success=True))
        return True

    def _pages(self, blocks: Any, chunks: Any) -> list[tuple[int, int, int]]:
        """(address in KV, address in the primary tier, bytes) of all pages."""
        pages, block, chunk = [], 0, 0
        for refs, count, first in zip(self._refs, blocks.group_sizes, blocks.block_indices, strict=True):
            if not count:
                continue
            skip = first % self._per_chunk
            spread = -(-(count + skip) // self._per_chunk)
            for ref in refs:
                kv, held = numpy.empty(count, numpy.uint64), numpy.empty(count, numpy.uint64)
                compute_sub_block_ptrs(blocks.block_ids[block : block + count], 1, kv, self._kv[ref.tensor_idx])
                compute_sub_block_ptrs(
                    chunks[chunk : chunk + spread], self._per_chunk, held, self._chunks[ref.tensor_idx], skip_count=skip
                )
                pages += [(int(a), int(b), ref.page_size_bytes) for a, b in zip(kv, held, strict=True)]
            block, chunk = block + count, chunk + spread
        return pages

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """All jobs have ended."""

    def shutdown(self) -> None:
        self._chunks.clear()
        self._region.cleanup()
