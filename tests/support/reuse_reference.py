"""What a chunk is worth to the adaptive policy (csrc/table/reuse_policy.h, csrc/table/reuse_model.h), computed in the
plainest way for a pool from which nothing was evicted yet, so that nothing is remembered of chunks that are gone."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

USES, GAPS, BINS = 8, 8, 64
KINDS = USES * GAPS
SAME_GAP, MOST_INHERITED = 4, 2
COMMON, KIND, FACTOR, SCALE = 683.0, 171.0, 10.7, 2.1
"""The weights of the priors, in requests."""
LOW = [0.0, *(math.ldexp(1.5 if k % 2 else 1.0, k // 2) for k in range(1, BINS + 1))]
WIDTH = [above - below for below, above in pairwise(LOW)]
MIDDLE = [(above + below) / 2 for below, above in pairwise(LOW)]


def bin_of(age: int) -> int:
    return bisect_right(LOW, age) - 1 if age >= 2 else 0


@dataclass
class Known:
    """`kind`: the number of uses, and, in eights, the gap."""

    parent: bytes
    used: int
    kind: int = 0
    children: int = 0


class ReuseReference:
    """Call it in the order of the table's calls."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, Known] = {}
        self._tick = self._next_learn = self._resident = 0
        self._keys = 0.0
        self._ends = [[0.0] * BINS for _ in range(KINDS)]
        self._hits = [[0.0] * BINS for _ in range(KINDS)]
        self._learn(1.0, 1)

    def store(self, key: bytes, parent: bytes = b"") -> None:
        """A chunk that is not there yet."""
        self._tick += 1
        above: bytes = parent
        while above in self.chunks:
            self.chunks[above].used = self._tick
            above = self.chunks[above].parent
        new = self.chunks[key] = Known(parent, self._tick)
        if parent in self.chunks:
            self.chunks[parent].children += 1
            if self.chunks[parent].children == 1:
                kind = self.chunks[parent].kind
                new.kind = min(kind % USES, MOST_INHERITED) + kind // USES * USES

    def look_up(self, keys: list[bytes]) -> None:
        """`keys`: a prompt's, from its beginning."""
        self._tick += len(keys)
        self._resident = len(self.chunks)
        self._keys += (len(keys) - self._keys) * (1.0 if self._keys == 0 else 1 / 64)
        if self._tick >= self._next_learn:
            self._next_learn = self._tick + max(64, self._resident // 4)
            self._learn(max(1.0, self._keys), self._resident)
        for key in keys:
            if key not in self.chunks:
                return
            self._use(self.chunks[key])

    def _use(self, chunk: Known) -> None:
        age, chunk.used = self._tick - chunk.used, self._tick
        if age < max(2, self._resident // 128):
            return
        self._ends[chunk.kind][bin_of(age)] += 1
        self._hits[chunk.kind][bin_of(age)] += 1
        uses, gap = min(chunk.kind % USES + 1, USES - 1), chunk.kind // USES
        if uses > 1:
            now = min(max(age.bit_length() - (self._resident | 1).bit_length() + SAME_GAP, 1), GAPS - 1)
            gap = now if gap == 0 else (gap + now + (now > gap)) // 2
        chunk.kind = uses + gap * USES

    def evict(self, key: bytes) -> None:
        parent = self.chunks.pop(key).parent
        if parent in self.chunks:
            self.chunks[parent].children -= 1

    def worth_of(self, key: bytes) -> float:
        kind, age = self.chunks[key].kind, self._tick - self.chunks[key].used
        worth, here = self._worth_of_kind(kind), bin_of(age)
        at = here - 0.5 + (age - LOW[here]) / WIDTH[here]
        before = math.floor(at)
        if not 0 <= before < BINS - 1:
            return worth[max(0, min(before, BINS - 1))]
        return worth[before] + (at - before) * (worth[before + 1] - worth[before])

    def leaves(self) -> list[bytes]:
        return [key for key, chunk in self.chunks.items() if not chunk.children]

    # ------------------------------------------------------------------ what it learns

    def _learn(self, together: float, resident: int) -> None:
        self._seen = Seen(
            [self._lived(kind) for kind in range(KINDS)], [list(row) for row in self._hits], together, resident
        )
        self._worth: dict[int, list[float]] = {}
        for row in (*self._ends, *self._hits):
            row[:] = [count * 511 / 512 for count in row]

    def _worth_of_kind(self, kind: int) -> list[float]:
        if kind not in self._worth:
            self._worth[kind] = _ranked(self._seen.reused(kind))
        return self._worth[kind]

    def _lived(self, kind: int) -> list[float]:
        """By bin, how long chunks lived in it: half of it if they ended there, all of it if they ended later."""
        here = list(self._ends[kind])
        for chunk in self.chunks.values():
            if chunk.kind == kind:
                here[bin_of(self._tick - chunk.used)] += 1
        lived, older = [0.0] * BINS, 0.0
        for k in reversed(range(BINS)):
            lived[k] = WIDTH[k] * (older + here[k] / 2)
            older += here[k]
        return lived



@dataclass
class Seen:
    """What was known when the policy learnt last. `lived`, `hits`: by kind and bin."""

    lived: list[list[float]]
    hits: list[list[float]]
    together: float
    resident: int

    def reused(self, kind: int) -> list[float]:
        """The share of the kind's chunks that reach a bin and are used in it."""
        while kind % USES and not any(self.lived[kind]):
            kind -= 1  # nobody has seen such chunks
        gap, (scale, base, common) = kind // USES, self._of_all
        prior_of = [
            math.sqrt(_of_gap(gap, k, self.resident) * common[k]) if gap else common[k] for k in range(BINS)
        ]
        weighed = prior_of if gap else [scale * one for one in base]
        own = FACTOR * self.together + sum(self.hits[kind])
        wanted = FACTOR * self.together + sum(a * b for a, b in zip(self.lived[kind], weighed, strict=True))
        reused = []
        for k in range(BINS):
            prior = KIND * self.together * WIDTH[k]
            rate = (self.hits[kind][k] + prior * prior_of[k] * own / wanted) / (self.lived[kind][k] + prior)
            reused.append(rate * WIDTH[k] / (1 + rate * WIDTH[k]))
        return reused

    @cached_property
    def _of_all(self) -> tuple[float, list[float], list[float]]:
        """How much more is used again than by the prior, the prior, and the rate of all kinds together."""
        base, common = [1 / (middle + 32) for middle in MIDDLE], []
        seen = expected = SCALE * self.together
        for k in range(BINS):
            hits, here = sum(row[k] for row in self.hits), sum(row[k] for row in self.lived)
            prior = COMMON * self.together * WIDTH[k]
            common.append((hits + prior * base[k]) / (here + prior))
            seen, expected = seen + hits, expected + here * base[k]
        return seen / expected, base, common


def _of_gap(gap: int, k: int, resident: int) -> float:
    """Nine of ten come back, and the logarithm of when is normal around that of the gap's middle."""
    center = ((resident | 1).bit_length() - 0.5 + gap - SAME_GAP) * math.log(2)

    def waits(age: float) -> float:
        return 1 - 0.45 * math.erfc((center - math.log(age)) / math.sqrt(2)) if age > 0 else 1.0

    back = 1 - waits(LOW[k + 1]) / waits(LOW[k])
    return back / (1 - back / 2) / WIDTH[k]


def _ranked(reused: list[float]) -> list[float]:
    """For each bin the best rate of hits for memory over all times to keep a chunk from that bin on."""
    best = []
    for first in range(BINS):
        gain = cost = most = 0.0
        left = 1.0
        for k in range(first, BINS):
            gain, cost = gain + left * reused[k], cost + left * WIDTH[k] * (1 - reused[k] / 2)
            left *= 1 - reused[k]
            most = max(most, gain / cost)
        best.append(most)
    return best
