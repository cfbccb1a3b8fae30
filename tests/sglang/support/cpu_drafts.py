"""What drafts need on a CPU (speculative decoding), where SGLang's wheel has it for GPUs alone, in plain torch.

Drafts are chains here (topk 1), so to verify them is to compute some tokens more behind a request's own. These take the
place of kernels and of attention: SGLang's own workers, pools and tree are what is tested.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any

import torch


def copy_kv(addresses: Any, strides: Any, to_rows: Any, from_rows: Any) -> None:
    """Rows of each layer's buffer, by the addresses of the buffers."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in from_rows.tolist()]
        for row, data in zip(to_rows.tolist(), rows, strict=True):
            ctypes.memmove(address + row * stride, data, stride)


def slots_between(requests: Any, slots: Any, starts: Any, ends: Any, out: Any, width: int) -> None:
    """The slots of each request's tokens from its start to its end, behind each other."""
    rows = [slots[request, start:end] for request, start, end in zip(requests, starts, ends, strict=True)]
    found = torch.cat(rows)
    out[: len(found)] = found


def give_slots(requests: Any, slots: Any, starts: Any, ends: Any, given: Any, *more: Any) -> None:
    """The other way round: the slots that each request gets for its tokens from its start to its end."""
    first = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[request, start:end] = given[first : first + end - start].to(slots.dtype)
        first += end - start


def slots_behind(requests: Any, slots: Any, lengths: Any, out: Any, width: int, topk: int, steps: int) -> None:
    slots_between(requests, slots, lengths, lengths + topk * steps, out, width)


def last_accepted(tokens: Any, lengths: Any, out: Any, stride: int) -> None:
    out.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def accepted_slots(accepted: Any, slots: Any, out: Any) -> None:
    kept = slots[accepted[accepted > -1]]
    out[: len(kept)] = kept


def chain(
    parents: Any, scores: Any, lengths: Any, mask: Any, positions: Any, index: Any, following: Any, sibling: Any,
    topk: int, steps: int, drafts: int, mode: Any,
) -> None:
    """A tree of one branch: each draft follows the one before it."""
    assert topk == 1, f"found {topk} branches, wanted 1"
    order = torch.arange(drafts)
    positions.copy_((lengths[:, None] + order).flatten())
    index.copy_(torch.arange(len(lengths) * drafts).view_as(index))
    following.copy_(torch.where(order + 1 < drafts, order + 1, -1).expand_as(following))
    sibling.fill_(-1)
    mask.copy_(torch.ones(drafts, drafts, dtype=torch.bool).tril().expand(len(lengths), -1, -1).flatten())


def verify(
    *, predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, retrive_index: Any,
    target_predict: Any, **tree: Any,
) -> None:
    """Accepts drafts for as long as each is what the target computes behind the one before it."""
    for at, drafts in enumerate(candidates.tolist()):
        wanted, count = target_predict[at].tolist(), 0
        while count + 1 < accept_index.shape[1] and drafts[count + 1] == wanted[count]:
            count += 1
        accept_index[at, : count + 1] = retrive_index[at, : count + 1]
        predicts[retrive_index[at, : count + 1].long()] = target_predict[at, : count + 1].to(predicts.dtype)
        accept_token_num[at] = count


def bring_drafts() -> None:
    """Once SGLang is imported."""
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cache_move.copy_all_layer_kv_cache_cpu = copy_kv
    allocation.assign_req_to_token_pool_cpu = give_slots
    cache_locs.assign_extend_cache_locs_cpu = slots_between
    cache_locs.assign_draft_cache_locs_contiguous_cpu = slots_behind
    eagle.fill_bonus_tokens_cpu, eagle.fill_accept_out_cache_loc_cpu = last_accepted, accepted_slots
    spec_tree.sgl_build_tree_kernel_efficient_cpu, spec_tree.sgl_verify_tree_greedy_cpu = chain, verify

    class Step(TorchNativeAttnBackend):
        """A step of a draft: the tokens of the steps before it lie behind the request's own."""

        def __init__(self, runner: Any, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **how: Any) -> Any:
            longer = copy.copy(batch)
            longer.seq_lens = batch.seq_lens + self.step + 1
            return super().forward_decode(q, k, v, layer, longer, *more, **how)

    class Steps:
        needs_cpu_seq_lens = False

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [Step(runner, step) for step in range(steps - 1)]

        def init_forward_metadata(self, batch: Any) -> None:
            for one in self.attn_backends:
                one.init_forward_metadata(batch)

    computed = TorchNativeAttnBackend.forward_extend

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *more: Any, **how: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            batch, before = copy.copy(batch), batch.seq_lens
            batch.extend_prefix_lens = before
            batch.extend_seq_lens = torch.full_like(before, batch.spec_info.draft_token_num)
            batch.seq_lens = before + batch.extend_seq_lens
        return computed(self, q, k, v, layer, batch, *more, **how)

    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory.create_decode_backend = lambda made: (
        Steps(made.draft_model_runner, made.speculative_num_steps)
    )
    DraftBackendFactory.create_draft_extend_backend = lambda made: TorchNativeAttnBackend(made.draft_model_runner)
