"""Divides KV by heads into the same parts for every tensor-parallel size, so that engines of all sizes share it.

Usually each worker of an engine stores one part of a chunk, with its own heads, so another tensor-parallel size finds
parts of other heads. With `any_tensor_parallel` a chunk has as many parts as the greatest common divisor of MOST_PARTS
and the number of the model's KV heads:

    8 heads, 8 parts        1 worker: parts 0-7    2 workers: 0-3, 4-7    8 workers: one each    16: two read each part

A worker with several parts takes a rank of the manifest for each, and copies each as a layout of its own: the heads of
a part are equal runs in the worker's pages, and follow each other in the part. Where there are more workers than heads,
vLLM gives several of them the same head: the first of these stores it.

What is loaded is what was computed with another size, whose kernels add up in another order: the tokens are those of
the engine that stored it, not bit for bit those that this engine would compute. So the manifest says that sizes are
shared, and engines without the setting have a namespace of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from kvdock import _core
from kvdock.connectors.vllm.groups import HEAD_AXES, KVGroup, plane_of
from kvdock.connectors.vllm.setup import RankPosition
from kvdock.datapath.layout import PagedLayout, Plane

MOST_PARTS = 8
"""Parts become small with many: with one head of 128 elements, 32 layers and bf16, 128 tokens are 2 MiB. Engines of
more workers share if each has one head."""
RUN_BYTES = 16
"""Copies take runs of multiples of this."""


class CannotShareSizes(Exception):
    """Why an engine's KV cannot be divided by heads: a sentence."""


@dataclass(frozen=True)
class HeadParts:
    """`parts`: of a chunk; `of_worker`: the parts of one worker; `heads`: of a part."""

    parts: int
    of_worker: int
    heads: int

    def placed(self, place: RankPosition) -> RankPosition:
        """The position of a worker that holds whole parts."""
        if place.ranks <= self.parts:
            ranks = range(place.rank * self.of_worker, (place.rank + 1) * self.of_worker)
        else:  # several workers have the heads of a part: rank r reads part r mod parts
            part, other = divmod(place.rank, place.ranks // self.parts)
            ranks = range(other * self.parts + part, other * self.parts + part + 1)
        return replace(place, own_ranks=tuple(ranks), writers=self.parts, heads_split=self.parts)

    def layouts(
        self, groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, token_order: str
    ) -> list[PagedLayout]:
        """For each part of a worker in turn, where each group has the part's heads."""
        return [
            self._layout(group, tensors, num_blocks, token_order, part)
            for part in range(self.of_worker) for group in groups
        ]

    def _layout(
        self, group: KVGroup, tensors: Mapping[str, Any], num_blocks: int, token_order: str, part: int
    ) -> PagedLayout:
        planes = dict.fromkeys(
            self._plane(plane_of(name, tensors[name], page, num_blocks), tensors[name], part)
            for name, page in group.page_bytes.items()
        )
        core = _core.PagedLayout(tuple(planes), num_blocks=num_blocks, block_tokens=group.block_tokens)
        held = [tensors[name] for name in group.page_bytes]
        return PagedLayout(
            "heads of pages", token_order, tuple(planes), num_blocks, group.block_tokens, held, core
        )

    def _plane(self, page: Plane, tensor: Any, part: int) -> Plane:
        """A part's heads in `page`, the plane of the worker's whole pages. All that is outside of the heads' axis in
        memory repeats at one stride, because pages are contiguous."""
        address, block_stride, page_bytes, _, _ = page
        head_bytes = _head_bytes(tensor)
        run_bytes, stride = self.heads * head_bytes, tensor.shape[_head_axis(tensor)] * head_bytes
        return (address + part * run_bytes, block_stride, run_bytes, page_bytes // stride, stride)


def head_parts(
    groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, *, heads: int, place: RankPosition
) -> HeadParts:
    """How the KV of an engine is divided. `heads`: the model's KV heads, on all workers. Raises CannotShareSizes."""
    workers = place.ranks
    if place.writers > place.heads_split:
        raise CannotShareSizes("pipeline stages are several, and 1 is wanted")
    parts = gcd(heads, MOST_PARTS)
    if parts % workers and (workers % heads or parts != heads):
        raise CannotShareSizes(f"tensor_parallel_size is {workers}, and a divisor of {parts} is wanted")
    of_worker = max(1, parts // workers)
    found = HeadParts(parts, of_worker, heads // parts)
    for group in groups:
        for name, page_bytes in group.page_bytes.items():
            _require_heads(group, name, tensors[name], page_bytes, num_blocks, of_worker * found.heads)
    return found


def _require_heads(
    group: KVGroup, name: str, tensor: Any, page_bytes: int, num_blocks: int, heads: int
) -> None:
    if group.state or group.latent:
        raise CannotShareSizes(f"layer {name} keeps {'a recurrent state' if group.state else 'latents'}, not heads")
    axes = len(tensor.shape)
    if axes not in HEAD_AXES or tensor.shape[HEAD_AXES[axes]] != heads:
        raise CannotShareSizes(f"layer {name} has KV of shape {tuple(tensor.shape)}, and {heads} heads are wanted")
    content = prod(tensor.shape[1:]) * tensor.element_size() * (tensor.shape[0] // num_blocks)
    if content != page_bytes:
        raise CannotShareSizes(f"layer {name} has {content} bytes in pages of {page_bytes}: full ones are wanted")
    if _head_bytes(tensor) % RUN_BYTES:
        raise CannotShareSizes(
            f"layer {name} has {_head_bytes(tensor)} bytes a head, and a multiple of {RUN_BYTES} is wanted"
        )


def _head_axis(tensor: Any) -> int:
    return HEAD_AXES[len(tensor.shape)]


def _head_bytes(tensor: Any) -> int:
    """The contiguous bytes of one head."""
    return int(tensor.stride(_head_axis(tensor)) * tensor.element_size())
