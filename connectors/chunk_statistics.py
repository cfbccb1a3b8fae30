"""Which chunks are used again: counters per chunk of what is looked up, hit and loaded through a connector.

A chunk is named by a hash of its tokens and all before them, as at the server, but under no namespace: the names are
of use here only. Invariants: a request's lookup counts once, however often it is asked, until its tokens grow or
it is `finished`; at most `max_chunks` chunks are remembered, those not seen for longest are forgotten first; the
totals forget nothing. Counting happens on the engine's thread; `top`, `totals` and `summary` may be called on any.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdock.connectors.interface import Connector, GroupBlocks, Progress
from kvdock.connectors.wrappers import Wrapper, WrapperError
from kvdock.protocol.keys import KEY_BYTES, chunk_keys


@dataclass
class ChunkUse:
    """Of one chunk, or of all. `hit`: a lookup could have it, from the server or from the engine's own cache."""

    key: str
    end_tokens: int
    looked_up: int = 0
    hit: int = 0
    loaded: int = 0


class ChunkStatistics(Wrapper):
    """`chunk_tokens`: as in the manifest."""

    def __init__(self, inner: Connector, *, chunk_tokens: int, max_chunks: int = 65536) -> None:
        super().__init__(inner)
        for name, value in (("chunk_tokens", chunk_tokens), ("max_chunks", max_chunks)):
            if value < 1:
                raise WrapperError(f"{name}: found {value}, wanted at least 1")
        self.chunk_tokens, self.max_chunks = chunk_tokens, max_chunks
        self.forgotten = 0
        self._uses: OrderedDict[bytes, ChunkUse] = OrderedDict()
        self._totals = ChunkUse("", 0)
        self._keys: dict[str, list[bytes]] = {}
        """Of the requests whose lookup was counted."""
        self._loading: dict[str, tuple[int, list[bytes]]] = {}
        """(local tokens, keys) of loads under way."""
        self._lock = threading.Lock()

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        found = super().lookup(request_id, token_ids, local_tokens)
        if found is not None and len(self._keys.get(request_id, ())) < max(1, len(token_ids) // self.chunk_tokens):
            keys = list(chunk_keys(bytes(KEY_BYTES), token_ids, self.chunk_tokens))
            self._keys[request_id] = keys
            with self._lock:
                for at, key in enumerate(keys):
                    self._count(key, at, looked_up=1, hit=int((at + 1) * self.chunk_tokens <= found))
        return found

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        keys = self._keys.get(request_id, [])[: hit_tokens // self.chunk_tokens]
        self._loading[request_id] = local_tokens, keys
        super().begin_load(request_id, block_ids, local_tokens, hit_tokens)

    def poll(self, timeout_s: float = 0.0) -> Progress:
        progress = super().poll(timeout_s)
        with self._lock:
            for done in progress.loads:
                local, keys = self._loading.pop(done.request_id, (0, []))
                for at in range(local // self.chunk_tokens, min(len(keys), done.valid_tokens // self.chunk_tokens)):
                    self._count(keys[at], at, loaded=1)
        return progress

    def finished(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        super().finished(request_id)

    # ------------------------------------------------------------------ for people

    @property
    def totals(self) -> ChunkUse:
        with self._lock:
            return replace(self._totals)

    def top(self, count: int = 10) -> list[ChunkUse]:
        """The chunks hit most often, then looked up most often."""
        with self._lock:
            uses = [replace(use) for use in self._uses.values()]
        return sorted(uses, key=lambda use: (-use.hit, -use.looked_up, use.end_tokens, use.key))[:count]

    def summary(self, count: int = 10) -> str:
        """A few lines of text: the totals, then the `count` chunks hit most often."""
        totals, top = self.totals, self.top(count)
        lines = [
            f"chunks: {totals.looked_up} looked up, {totals.hit} hit, {totals.loaded} loaded; "
            f"{len(self._uses)} remembered, {self.forgotten} forgotten",
        ]
        if top:
            lines.append(f"{'looked up':>9} {'hit':>9} {'loaded':>9} {'ends at token':>13}  chunk")
        lines += [
            f"{use.looked_up:>9} {use.hit:>9} {use.loaded:>9} {use.end_tokens:>13}  {use.key[:12]}" for use in top
        ]
        return "\n".join(lines)

    def _count(self, key: bytes, at: int, *, looked_up: int = 0, hit: int = 0, loaded: int = 0) -> None:
        use = self._uses.setdefault(key, ChunkUse(key.hex(), (at + 1) * self.chunk_tokens))
        self._uses.move_to_end(key)
        for counted in (use, self._totals):
            counted.looked_up += looked_up
            counted.hit += hit
            counted.loaded += loaded
        if len(self._uses) > self.max_chunks:
            self._uses.popitem(last=False)
            self.forgotten += 1
