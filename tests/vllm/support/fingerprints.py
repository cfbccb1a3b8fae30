"""What KV memory holds for a forward pass that only writes fingerprints: one at each position of attention, and one in
the first cell of a block for a recurrent state, over the state before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

STATE = 0
"""In the place of a group's window: it keeps a recurrent state."""


def fingerprints(group: int, tokens: Sequence[int], known: list[int]) -> list[int]:
    """`known`, grown to one for each token: 63 bits, never 0, which is what fresh memory holds."""
    last = known[-1] if known else group + 1
    for token in tokens[len(known) :]:
        packed = (last << 32 | token).to_bytes(12, "little")
        last = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1 | 1
        known.append(last)
    return known


def next_token(prints: Sequence[int]) -> int:
    return prints[-1] % 900 + 5


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """What a right engine generates."""
    made, known = list(tokens), []
    for _ in range(count):
        made.append(next_token(fingerprints(0, made, known)))
    return made[len(tokens) :]


def state_spec(size: int, mode: str, *, exports: bool) -> MambaSpec:
    """With pages as large as those of attention. `exports`: as export_state has it; newer versions."""
    more = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if exports else {}
    return MambaSpec(size, ((size,),), (torch.int64,), mamba_cache_mode=mode, **more)


def reads_state(engine: Any, request_id: str, group: int, start: int, prints: Sequence[int]) -> bool:
    """Whether the state after the first `start` tokens is in the block of the last of them."""
    block = engine.tables[request_id][group][(start - 1) // engine.sizes[group]] if start else None
    if block is None or engine._cells[block, 0] ^ engine._mark == prints[start - 1]:
        return True
    engine.bad_reads.append((engine.steps, request_id, group, start - 1, block))
    return False


def export_state(engine: Any, request_id: str, group: int, start: int, end: int, is_right: bool) -> None:
    """Writes the state at the last place inside the chunk where a hit may end, as kernels do that come by it."""
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints  # newer versions

    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
    [offset], [column] = compute_mamba_prefill_checkpoints(
        [end], [end - start], engine.hash_tokens, engine.sizes[group], 1, False, manager.cache_hit_alignment_tokens
    )
    block = engine.tables[request_id][group][column] if column >= 0 else 0
    if block:
        made = engine._prints[request_id, group][start + offset - 1]
        engine._cells[block, 0] = (made if is_right else -made) ^ engine._mark
        engine.seen["exported"] += 1
