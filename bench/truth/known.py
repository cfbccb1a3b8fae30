"""What the server should say, computed from what engines said of their requests and from the prompts themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from bench.truth.engines import CHUNK, Truth
from kvdock.protocol.hits import ComputedWhy

Lookup = Sequence[Hashable]
"""The chunks that a lookup names, from the prompt's first. A chunk stands for all tokens up to its end."""
LOADED = {"memory": "from memory", "waited": "after another engine had stored them", "disk": "from the tier disk"}
MERGED: dict[str, str] = {"ahead": "room", "store_declined": "room"}
"""Which of these reasons a chunk has depends on when the server's evictor ran, and on which chunk went first: all are
the pool's size."""


def merged(why: str) -> str:
    return MERGED.get(why, why)


class Ledger:
    """Sums by name, of all engines of one server."""

    def __init__(self) -> None:
        self.wanted: Counter[str] = Counter()
        self.by_request: dict[str, tuple[int, int, int]] = {}
        """(prompt tokens, those of the engine's own cache, loaded ones)"""
        self.explained: dict[str, list[str]] = {}
        """By request, what the sentences about its prompt should say, in this order; reasons as keys of COMPUTED."""
        self.missed: list[str] = []
        """What was arranged, and no request had."""
        self.preempted = 0

    def add(
        self, truths: dict[str, Truth], *, why: ComputedWhy = "never_stored", source: str = "memory"
    ) -> None:
        """`why`: the reason for whole chunks that are computed. `source`: of loaded ones. Some request has to have each
        of them that is not the default."""
        before = self.wanted.copy()
        for name, truth in truths.items():
            prompt, local = truth["prompt"], min(truth["local"], truth["prompt"])
            loaded = min(truth["loaded"], prompt - local)
            end, whole = local + loaded, (prompt - 1) // CHUNK * CHUNK
            rest: ComputedWhy = "tail" if whole else "short"
            runs = [
                ("local", "the engine's own cache had", local),
                (f"loaded:{source}", f"loaded {LOADED[source]}", loaded),
                (f"computed:{why}", why, max(0, whole - end)), (f"computed:{rest}", rest, prompt - max(whole, end)),
            ]
            self.wanted.update({"requests": 1, "prompt": prompt, "reloaded": truth["reloaded"]})
            for label, _, tokens in runs:
                self.wanted[label] += tokens
            self.by_request[name] = prompt, local, loaded
            self.explained[name] = [text for _, text, tokens in runs if tokens]
            self.preempted += truth["preemptions"] > 0
        for name, default in ((f"computed:{why}", "computed:never_stored"), (f"loaded:{source}", "loaded:memory")):
            if name != default and self.wanted[name] == before[name]:
                self.missed.append(f"{name} of {next(iter(truths))}")


# ------------------------------------------------------------------ pools of any size


class Depths(NamedTuple):
    """For each chunk of one lookup, its place in the LRU stack: 1 for the chunk that was used last. 0: the chunk was
    never used."""

    of: tuple[int, ...]

    def found(self, chunks: int | None) -> int:
        """How many chunks of the lookup are found in a pool that holds `chunks` chunks: those before the first one that
        it lacks. `chunks` None: the pool has no limit."""
        for at, depth in enumerate(self.of):
            if not depth or (chunks is not None and depth > chunks):
                return at
        return len(self.of)


def lru_depths(lookups: Iterable[Lookup]) -> list[Depths]:
    """Exact, for pools that have all of a lookup stored when it has ended, and evict what was unused longest; of the
    chunks of one lookup, the last one first. A pool of n chunks has the upper n of one stack (Mattson, Gecsei, Slutz
    and Traiger, "Evaluation Techniques for Storage Hierarchies", 1970), so one pass over it tells of all pools."""
    used: dict[Hashable, int] = {}
    """By chunk, when it was last used."""
    times: list[int] = []
    """The values of `used`, in rising order."""
    now, found = 0, []
    for lookup in lookups:
        found.append(Depths(tuple(
            len(times) - bisect_left(times, used[chunk]) if chunk in used else 0 for chunk in lookup
        )))
        for chunk in reversed(lookup):
            if chunk in used:
                del times[bisect_left(times, used[chunk])]
            used[chunk] = now = now + 1
            times.append(now)
    return found


def hit_share(depths: Sequence[Depths], chunks: int | None) -> float:
    """The share of the chunks of all lookups that is found in a pool that holds `chunks` chunks."""
    return sum(one.found(chunks) for one in depths) / sum(len(one.of) for one in depths)
