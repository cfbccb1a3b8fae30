"""The conformance kit (kvdock/connectors/conformance.py) against the linker, over SGLang's own pools of KV.

    python contract.py MODEL ADDRESS LARGE_ADDRESS

A connector's verbs become the calls that SGLang's wrapper of linkers makes, with its own hashes of pages. Prints a JSON
object: for each kind of pool, by the name of each check, what did not hold; "" if all did. "linker": the same of
linker_checks.py. As a program of its own it runs on a GPU, with the whole SGLang for it, and "streams" is the same of
stream_checks.py, at a second server with a pool of 4 GiB or more; engine_process.py imports it, and then it runs on a
CPU.
"""

# ruff: noqa: E402  # SGLang can be imported only once it is prepared

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

DEVICE = "cuda" if __name__ == "__main__" else "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
if DEVICE == "cpu":
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    from cpu_only import prepare

    prepare()

import torch
from linker_checks import LINKER_CHECKS, found, scheduler
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from stream_checks import STREAM_CHECKS

from kvdock.client.client import Client
from kvdock.connectors.conformance import CHECKS, Bench
from kvdock.connectors.interface import Hit, LoadDone, Miss, Progress, StoreDone
from kvdock.connectors.sglang import lookups
from kvdock.connectors.sglang.linker import KvdockLinker

PAGE, PAGES, LAYERS, WINDOW = 64, 64, 3, 128
LONG_PAGE = 256
"""DeepSeek-V4's."""
GROUPS = {
    "mha": ("kv",), "mla": ("kv",), "sparse": ("kv",), "blocks": ("kv",), "window": ("kv", "swa"), "draft": ("kv",),
    "state": ("kv", "mamba"), "state and draft": ("kv", "mamba"), "compressed": ("kv", "swa"),
}
"""By kind; "large" is another, in which a load takes as long as a short step: 2 GiB on a GPU."""
WINDOWS = {"swa": WINDOW, "mamba": 1}
HEADS: dict[str, Any] = {"page_size": PAGE, "dtype": torch.float32, "device": DEVICE, "enable_memory_saver": False}


def pool_of(kind: str) -> Any:
    size = (PAGES - 1) * PAGE  # SGLang adds a page
    if kind == "mla":
        return MLATokenToKVPool(size=size, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=LAYERS, **HEADS)
    if kind == "sparse":  # the second layer uses the first one's choice
        return DSATokenToKVPool(
            size=size, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=LAYERS, index_head_dim=128, kv_cache_dim=80,
            index_buf_size=size, skip_topk_layers=[False, True, False], **{**HEADS, "dtype": torch.bfloat16},
        )
    if kind == "blocks":
        return MiniMaxSparseKVPool(
            size=size, head_num=2, head_dim=16, idx_head_dim=32, dense_layer_ids=[0], sparse_layer_ids=[1, 2],
            disable_value_sparse_layer_ids=[1], start_layer=0, end_layer=LAYERS, index_dtype=torch.bfloat16, **HEADS,
        )
    if kind in ("mha", "draft"):
        return MHATokenToKVPool(size=size, head_num=2, head_dim=16, layer_num=LAYERS, **HEADS)
    if kind == "large":
        return large_pool(32)
    if kind == "compressed":  # the first layer has the window alone
        size = (PAGES - 1) * LONG_PAGE
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=4, swa_size=size, c4_size=size // 4, c128_size=size // 128, c4_state_pool_size=size // 32,
            c128_state_pool_size=8, page_size=LONG_PAGE, swa_page_size=LONG_PAGE, dtype=torch.uint8,
            c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
            indexer_head_dim=128, layer_num=LAYERS, device=DEVICE, enable_memory_saver=False,
            compression_ratios=[0, 4, 128], sliding_window=WINDOW, start_layer=0, end_layer=LAYERS,
        )
    if kind.startswith("state"):
        return HybridLinearKVPool(
            size=size, dtype=torch.float32, page_size=PAGE, head_num=2, head_dim=16, full_attention_layer_ids=[1],
            device=DEVICE, mamba_pool=None,
        )
    return SWAKVPool(
        size=size, size_swa=size, head_num=2, head_dim=16, swa_attention_layer_ids=[0, 1],
        full_attention_layer_ids=[2], **HEADS,
    )


def large_pool(layers: int) -> Any:
    how = {**HEADS, "dtype": torch.bfloat16}
    return MHATokenToKVPool(size=256 * PAGE, head_num=8, head_dim=128, layer_num=layers, **how)


def drafts_of(kind: str) -> tuple[Any, ...]:
    """A draft model's pools, which have the target's pages."""
    if kind == "large":
        return (large_pool(4),)
    if kind in ("draft", "state and draft"):
        return (MHATokenToKVPool(size=(PAGES - 1) * PAGE, head_num=1, head_dim=16, layer_num=1, **HEADS),)
    return ()


def states(drafted_tokens: int | None) -> Any:
    """SGLang's pool of requests: two layers with a temporal state and two of convolutions. `drafted_tokens`: how many
    are verified at once."""
    shape = SimpleNamespace(conv=[(32, 3), (32, 4)], temporal=(2, 16, 16), disable_conv_window_dedup=True)
    types = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    about = SimpleNamespace(shape=shape, dtype=types, is_kda=False)
    return HybridReqToTokenPool(
        size=4, mamba_size=PAGES - 1, mamba_spec_state_size=4 if drafted_tokens else 0, max_context_len=PAGE,
        device=DEVICE, speculative_num_draft_tokens=drafted_tokens,
        speculative_eagle_topk=1 if drafted_tokens else None, enable_memory_saver=False, cache_params=about,
        mamba_layer_ids=[0, 2], enable_mamba_extra_buffer=True,
    )


class Verbs:
    """A Connector: what SGLang's wrapper of linkers would do for each verb."""

    def __init__(self, linker: KvdockLinker, groups: Sequence[str], page: int) -> None:
        self.linker, self._groups, self._page = linker, groups, page
        self._offered: dict[str, int] = {}
        self._stores: list[StoreDone | None] = []
        """What has happened once each offer has ended."""
        self._loads: list[LoadDone] = []

    def _transfers(self, keys: Sequence[str], blocks: Sequence[Sequence[int | None]] | None, first: int) -> list[Any]:
        """For each group what it holds of the pages `keys`, the first of which has number `first`: of a window, the
        last ones."""
        made = []
        for at, group in enumerate(self._groups):
            of_group, indices = list(keys), None
            if group in WINDOWS:
                of_group = of_group[-max(1, WINDOWS[group] // self._page) :]
            if blocks is not None:
                held = [block for block in blocks[at][first : first + len(keys)] if block is not None]
                of_group = list(keys[len(keys) - len(held) :])
                rows = [page * self._page + token for page in held for token in range(self._page)]
                indices = torch.tensor(held if group == "mamba" else rows, device=DEVICE)
            made.append(PoolTransfer(name=PoolName(group), keys=of_group, device_indices=indices))
        return made

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> Hit | Miss:
        keys = hashes_of(token_ids, self._page)[local_tokens // self._page :]
        if local_tokens % self._page or not keys:
            return Miss()
        promised = found(self.linker, request_id, *self._transfers(keys, None, 0))
        self._tail = keys
        return Hit(local_tokens + max(promised) * self._page) if promised else Miss()

    def begin_load(
        self, request_id: str, block_ids: Sequence[Sequence[int | None]], local_tokens: int, hit_tokens: int
    ) -> None:
        first, end = local_tokens // self._page, hit_tokens // self._page
        transfers = self._transfers(self._tail[: end - first], block_ids, first)
        if not self.linker.load(request_id, transfers):
            self._loads.append(LoadDone(request_id, local_tokens))
            return
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        landed = self.linker.finish_layer_wise_loading(index)
        self._loads.append(LoadDone(request_id, hit_tokens if landed else local_tokens))

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[Sequence[int | None]], computed_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        first, end = self._offered.get(request_id, 0), computed_tokens // self._page
        if end <= first:
            return ()
        self._offered[request_id] = end
        keys = hashes_of(token_ids, self._page)
        reads = tuple(tuple(page for page in column[first:end] if page is not None) for column in block_ids)
        done = StoreDone(request_id, reads)
        nodes = [(first, end)] if "mamba" not in self._groups else [(at, at + 1) for at in range(first, end)]
        for begin, behind in nodes:  # a node of SGLang's tree has one state, that at its end
            self.linker.naming.parent = keys[begin - 1] if begin else ""
            assert self.linker.offload(self._transfers(keys[begin:behind], block_ids, begin))
            self._stores.append(done if behind == end else None)
        return reads

    def poll(self, timeout_s: float = 0.0) -> Progress:
        end_s, stores = time.monotonic() + timeout_s, []
        while not (count := self.linker.num_completed_offloads()) and time.monotonic() < end_s and not self._loads:
            time.sleep(0.001)  # as SGLang's loop turns
        for _ in range(count):
            self.linker.pop_completed_offload()
            if (done := self._stores.pop(0)) is not None:
                stores.append(done)
        loads, self._loads = tuple(self._loads), []
        return Progress(loads, tuple(stores))

    def finished(self, request_id: str) -> None:
        self.linker.cancel_queued_load(request_id)

    def close(self) -> None:
        self.linker.close()


def hashes_of(tokens: Sequence[int], page: int = PAGE) -> list[str]:
    whole = list(tokens[: len(tokens) // page * page])
    return list(get_hash_str(whole, None, page)) if whole else []


class Subject:
    """The linker over a pool of SGLang's."""

    numbers = itertools.count()

    def __init__(self, name: str, kind: str, model: str, address: str, stream: Any = None) -> None:
        """`stream`: of the forward pass, if it is not the current one."""
        self.label = f"{name}-{os.getpid()}-{next(self.numbers)}"
        page = self.chunk_tokens = self.block_tokens = LONG_PAGE if kind == "compressed" else PAGE
        self.num_blocks = PAGES
        self._groups = GROUPS.get(kind, ("kv",))
        self.windows = [WINDOWS.get(group) for group in self._groups]
        args = ServerArgs(
            model_path=model, served_model_name=self.label, device=DEVICE, load_format="safetensors",
            skip_tokenizer_init=True, page_size=page,
        )
        args.resolve_once()
        if kind == "compressed":
            publish(args, role="scheduler")  # its pool reads settings
        self.pool, self.drafts = pool_of(kind), drafts_of(kind)
        self.states = states(3 if self.drafts else None) if "mamba" in self._groups else None
        params = SimpleNamespace(
            page_size=page, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool), pp_size=1,
            pp_cache_group=None, attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None,
            sidecar_draft_device_pools=self.drafts, mtp_draft_device_pools=(),
            mtp_draft_mamba_pools=(), swa_retain_window=WINDOW if "swa" in self._groups else None,
            enable_metrics=False, req_to_token_pool=self.states, enable_kv_cache_events=False, is_eagle=False,
        )
        names = {"kv": "FULL", "swa": "SWA", "mamba": "MAMBA"}
        components = [SimpleNamespace(name=names[group]) for group in self._groups]
        extra = {"address": address, "timeout_s": 20.0, "lookup_wait_s": 0.2, "load_if_cheaper": False}
        linker = KvdockLinker(args, params, components=components, extra_config=extra, forward_stream=stream)
        linker.guard.meet(scheduler())
        assert linker.guard.in_force(), linker.guard.why
        self.connector: Any = Verbs(linker, self._groups, page)
        if DEVICE == "cuda":
            wait_until_registered(address, self.label)

    def _rows(self, block: int) -> list[Any]:
        """Where the block is, in each layer: groups have ranges of blocks of their own."""
        pool, is_second = self.pool, len(self._groups) > 1 and block >= PAGES // 2
        if hasattr(pool, "compress_state_pools"):
            return self._compressed_rows(block, is_second)
        if self.states is not None:
            cache = self.states.mamba_pool.mamba_cache
            if is_second:
                return [layer[block : block + 1] for state in (cache.temporal, *cache.conv) for layer in state]
            pool = pool.full_kv_pool
        elif len(self._groups) > 1:
            pool = pool.swa_kv_pool if is_second else pool.full_kv_pool
        planes = [buffer for draft in self.drafts for buffer in (*draft.k_buffer, *draft.v_buffer)]
        for of in (pool.main_pool, pool.index_kv_pool, pool.index_k_pool) if hasattr(pool, "main_pool") else (pool,):
            for name in ("kv_buffer", "k_buffer", "v_buffer"):
                planes += getattr(of, name, [])
        rows = [plane[block * PAGE : (block + 1) * PAGE] for plane in planes]
        return rows + [keys[block : block + 1] for keys in getattr(pool, "index_k_with_scale_buffer", ()) if len(keys)]

    def _compressed_rows(self, block: int, is_second: bool) -> list[Any]:
        pool = self.pool
        if not is_second:
            of_pages = (pool.c4_kv_pool.kv_buffer, pool.c4_indexer_kv_pool.index_k_with_scale_buffer,
                        pool.c128_kv_pool.kv_buffer)
            return [buffer[block : block + 1] for buffers in of_pages for buffer in buffers]
        states = [pool.compress_state_pools[1], pool.indexer_compress_state_pools[1]]
        rings = [state.kv_score_buffer.kv_score[block * 8 : (block + 1) * 8] for state in states]
        return [*(buffer[block : block + 1] for buffer in pool.swa_kv_pool.kv_buffer), *rings]

    def fill(self, block: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for rows in self._rows(block):
            rows.copy_(torch.randn(rows.shape, generator=source) * (1 if rows.is_floating_point() else 64))

    def contents(self, block: int) -> bytes:
        rows = [row.cpu().contiguous().view(torch.uint8) for row in self._rows(block)]
        return b"".join(row.numpy().tobytes() for row in rows)

    def close(self) -> None:
        self.connector.close()


def wait_until_registered(address: str, label: str) -> None:
    """What the GPU's driver has not page-locked yet is a miss."""
    end_s = time.monotonic() + 30
    with Client(address) as client:
        while True:
            pool, sessions = client.status().pool, client.sessions().sessions
            through = [member.pinned_through for one in sessions if one.label == label for member in one.members]
            segments = len(client.segments().segments)
            if pool.allocated_bytes == pool.limit_bytes and through and all((at or 0) >= segments for at in through):
                return
            assert time.monotonic() < end_s, f"{through} of {segments} segments are page-locked"
            time.sleep(0.02)  # between two looks


def main(model: str, address: str, large_address: str | None = None) -> None:
    lookups.FORGET_S = 1.0  # SGLang says nothing of a request that ends without a load
    hashes_of(range(PAGE))  # the first call loads what hashes
    seeds = itertools.count()
    found = {
        kind: {check.__name__: outcome(check, kind, model, address, next(seeds)) for check in CHECKS} for kind in GROUPS
    }
    subject = Subject("linker", "mha", model, address)
    found["linker"] = {check.__name__: told(partial(check, subject.connector.linker)) for check in LINKER_CHECKS}
    subject.close()
    if large_address is not None:
        stream = torch.cuda.Stream()
        large = Subject("streams", "large", model, large_address, stream)
        given = large.connector.linker, large.pool, large.drafts[0], stream
        found["streams"] = {check.__name__: told(partial(check, *given)) for check in STREAM_CHECKS}
        large.close()
    print(json.dumps(found))


def outcome(check: Callable[[Bench], None], kind: str, model: str, address: str, seed: int) -> str:
    return told(lambda: check(Bench(lambda name: Subject(name, kind, model, address), address, seed=seed)))


def told(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # whatever it is, it is told
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
