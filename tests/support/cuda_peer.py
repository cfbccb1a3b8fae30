"""An engine's worker in a process of its own, for tests: it maps a pool's segment, registers it, and copies.

    python tests/support/cuda_peer.py store|load POOL_ID DEVICE SEED [SEGMENT-JSON]

It fills its blocks from SEED and stores them, or loads and compares with what SEED gives; prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import torch

from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CudaCopier
from kvdock.datapath.layout import paged_layout
from kvdock.datapath.segments import AttachedSegments, CudaRegister, SegmentRegistrar
from kvdock.shm.segment import SegmentInfo

PARTS, PART_BLOCKS, BLOCKS = 6, 16, 128
BLOCK_BYTES = 4 * 16 * 576 * 2
"""Four layers of MLA latents, 16 tokens a block."""


def latents(device: int) -> list[torch.Tensor]:
    return [torch.empty((BLOCKS, 16, 576), dtype=torch.bfloat16, device=f"cuda:{device}") for _ in range(4)]


def content(seed: int) -> list[torch.Tensor]:
    """What the parts hold, by layer: int16 [parts, blocks of a part, 16, 576]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PARTS, PART_BLOCKS, 16, 576)
    return [torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16) for _ in range(4)]


def main(verb: str, pool_id: int, device: int, seed: int, segment: str, sums: str) -> dict[str, object]:
    torch.cuda.set_device(device)
    info = SegmentInfo(**json.loads(segment))
    attached = AttachedSegments(pool_id)
    attached.attach(info)
    registrar = SegmentRegistrar(attached, CudaRegister(device))
    while registrar.pinned_through <= info.id:
        registrar.wake()
    tensors = latents(device)
    layout = paged_layout("NL_X_NB_BS_HS", tensors, block_tokens=16)
    ids = torch.randperm(BLOCKS)[: PARTS * PART_BLOCKS].view(PARTS, PART_BLOCKS)
    size = layout.part_bytes(PART_BLOCKS)
    slots = [attached.address(info.id, info.data_offset + 2 * i * size, size) for i in range(PARTS)]
    copier = CudaCopier(layout, device=device)
    wanted = content(seed)
    answer: dict[str, object]
    if verb == "store":
        for tensor, plane in zip(tensors, wanted, strict=True):
            tensor.view(torch.int16)[ids.cuda()] = plane.cuda()
        torch.cuda.synchronize()
        parts = [PartCopy(slot, ids[i]) for i, slot in enumerate(slots)]
        answer = {"sums": [result.checksum for result in copier.gather(parts).result()]}
    else:
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0x5C)
        torch.cuda.synchronize()
        expected = json.loads(sums)
        right = True
        for _ in range(20):
            results = copier.scatter([PartCopy(slots[i], ids[i], 0, expected[i]) for i in range(PARTS)]).result()
            right &= all(result.ok for result in results)
        for tensor, plane in zip(tensors, wanted, strict=True):
            right &= torch.equal(tensor.view(torch.int16)[ids.cuda()].cpu(), plane)
        answer = {"right": right}
    copier.close()
    registrar.close()
    attached.close()
    return answer


if __name__ == "__main__":
    _, verb, pool, gpu, seed, segment, *rest = sys.argv
    print(json.dumps(main(verb, int(pool, 16), int(gpu), int(seed), segment, rest[0] if rest else "[]")))
