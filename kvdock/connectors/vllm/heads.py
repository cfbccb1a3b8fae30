"""The heads of a part in vLLM's pages (kvdock/connectors/heads.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from kvdock import _core
from kvdock.connectors.heads import CannotShareSizes, HeadParts, head_parts
from kvdock.connectors.vllm.groups import HEAD_AXES, KVGroup, plane_of
from kvdock.connectors.vllm.setup import RankPosition
from kvdock.datapath.layout import PagedLayout, Plane

RUN_BYTES = 16
"""Copies take runs of multiples of this."""


def divided(
    groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, *, heads: int, place: RankPosition
) -> HeadParts:
    """How the KV of an engine is divided. `heads`: the model's KV heads, on all workers. Raises CannotShareSizes."""
    parts = head_parts(heads, place.ranks // _stages(place))
    for group in groups:
        for name, page_bytes in group.page_bytes.items():
            _require_heads(group, name, tensors[name], page_bytes, num_blocks, parts.heads_of_worker)
    return parts


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


def placed(parts: HeadParts, place: RankPosition) -> RankPosition:
    """The position of a worker that holds whole parts: of its pipeline stage's layers."""
    stages = _stages(place)
    shard, stage = divmod(place.rank, stages)
    ranks = tuple(rank * stages + stage for rank in parts.own_ranks(shard, place.ranks // stages))
    return replace(place, own_ranks=ranks, writers=parts.parts * stages, heads_split=parts.parts)


def _stages(place: RankPosition) -> int:
    return place.writers // place.heads_split


def part_layouts(
    parts: HeadParts, groups: Sequence[KVGroup], tensors: Mapping[str, Any], num_blocks: int, token_order: str
) -> list[PagedLayout]:
    """For each part of a worker in turn, where each group has the part's heads."""
    layouts = []
    for part in range(parts.of_worker):
        for group in groups:
            planes = tuple(dict.fromkeys(
                _heads_of(plane_of(name, tensors[name], page, num_blocks), tensors[name], part, parts.heads)
                for name, page in group.page_bytes.items()
            ))
            core = _core.PagedLayout(planes, num_blocks=num_blocks, block_tokens=group.block_tokens)
            held = [tensors[name] for name in group.page_bytes]
            layouts.append(
                PagedLayout("heads of pages", token_order, planes, num_blocks, group.block_tokens, held, core)
            )
    return layouts


def _heads_of(page: Plane, tensor: Any, part: int, heads: int) -> Plane:
    """The heads of a part in `page`, the plane of the worker's whole pages. What is outside of the heads' axis in
    memory repeats at one stride, because pages are contiguous."""
    address, block_stride, page_bytes, _, _ = page
    run_bytes = heads * _head_bytes(tensor)
    stride = tensor.shape[HEAD_AXES[len(tensor.shape)]] * _head_bytes(tensor)
    return (address + part * run_bytes, block_stride, run_bytes, page_bytes // stride, stride)


def _head_bytes(tensor: Any) -> int:
    """The contiguous bytes of one head."""
    return int(tensor.stride(HEAD_AXES[len(tensor.shape)]) * tensor.element_size())
