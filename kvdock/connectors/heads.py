"""Divides KV by heads into the same parts for every tensor-parallel size, so that engines of all sizes share it.

Usually each worker of an engine stores one part of a chunk, with its own heads, so another tensor-parallel size finds
parts of other heads. With `any_tensor_parallel` a chunk has as many parts as the greatest common divisor of MOST_PARTS
and the number of the model's KV heads:

    8 heads, 8 parts        1 worker: parts 0-7    2 workers: 0-3, 4-7    8 workers: one each    16: two read each part

A worker with several parts takes a rank of the manifest for each, and copies each with a layout of its own: the heads
of a part are equal runs in the worker's blocks, and follow each other in the part. Where there are more workers than
heads, engines give several of them the same head: the first of these stores it.

What is loaded is what was computed with another size, whose kernels add up in another order: the tokens are those of
the engine that stored it, not bit for bit those that this engine would compute. So the manifest says that sizes are
shared, and engines without the setting have a namespace of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

MOST_PARTS = 8
"""Parts become small with many: with one head of 128 elements, 32 layers and bf16, 128 tokens are 2 MiB. Engines of
more workers share if each has one head."""


class CannotShareSizes(Exception):
    """Why an engine's KV cannot be divided by heads."""


@dataclass(frozen=True)
class HeadParts:
    """`parts`: of a chunk; `of_worker`: the parts of one worker; `heads`: of a part."""

    parts: int
    of_worker: int
    heads: int

    @property
    def heads_of_worker(self) -> int:
        return self.of_worker * self.heads

    def own_ranks(self, worker: int, workers: int) -> tuple[int, ...]:
        """The ranks of the manifest that a worker takes: rank r stores part r, and reads part r mod parts."""
        if workers <= self.parts:
            return tuple(range(worker * self.of_worker, (worker + 1) * self.of_worker))
        part, other = divmod(worker, workers // self.parts)  # neighbours have the same head
        return (other * self.parts + part,)


def head_parts(heads: int, workers: int) -> HeadParts:
    """How the KV of an engine is divided. `heads`: the model's KV heads, on all workers. Raises CannotShareSizes."""
    parts = gcd(heads, MOST_PARTS)
    if parts % workers and (workers % heads or parts != heads):
        raise CannotShareSizes(f"the tensor-parallel size is {workers}, and a divisor of {parts} is wanted")
    return HeadParts(parts, max(1, parts // workers), heads // parts)
