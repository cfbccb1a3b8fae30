"""Counts, for each chunk, how often a connector looked it up, found it and loaded it.

A chunk's name is a hash of its tokens and of all tokens before them, as at the server, but without a namespace, so the
name means nothing outside this module. Invariants: however often a request is looked up, its chunks are counted once,
until the request has one more chunk or is `finished`; at most `max_chunks` chunks are remembered, and those not seen
for longest are forgotten first; the totals include forgotten chunks. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvdock.connectors.errors import SettingError
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.wire_types import KEY_BYTES

log = logging.getLogger("kvdock.connector")


@dataclass
class ChunkUse:
    """The counts of one chunk, or of all chunks. `hit`: how many lookups found it, at the server or in the engine's own
    cache."""

    key: str
    end_tokens: int
    looked_up: int = 0
    hit: int = 0
    loaded: int = 0


class ChunkStatistics:
    """`chunk_tokens`: that of the manifest. Raises SettingError for a number below 1."""

    def __init__(self, chunk_tokens: int, *, max_chunks: int = 65536) -> None:
        for name, value in (("chunk_tokens", chunk_tokens), ("max_chunks", max_chunks)):
            if value < 1:
                raise SettingError(f"{name}: found {value}, wanted at least 1")
        self.chunk_tokens, self.max_chunks = chunk_tokens, max_chunks
        self.forgotten = 0
        self._uses: OrderedDict[bytes, ChunkUse] = OrderedDict()
        self._totals = ChunkUse("", 0)
        self._keys: dict[str, list[bytes]] = {}
        """By request, the keys of the chunks whose lookup was counted."""
        self._loaded: dict[str, tuple[int, list[bytes]]] = {}
        """By request, (number of the first chunk, keys) of its last load, without chunks that failed."""
        self._lock = threading.Lock()

    def looked_up(self, request_id: str, tokens: Sequence[int], found_tokens: int) -> None:
        """`found_tokens`: the length of the prefix that the server or the engine's own cache has."""
        if len(self._keys.get(request_id, ())) >= max(1, len(tokens) // self.chunk_tokens):
            return
        keys = list(chunk_keys(bytes(KEY_BYTES), tokens, self.chunk_tokens))
        with self._lock:
            self._keys[request_id] = keys
            for at, key in enumerate(keys):
                self._count(key, at, looked_up=1, hit=int((at + 1) * self.chunk_tokens <= found_tokens))

    def load_begun(self, request_id: str, local_tokens: int, hit_tokens: int) -> None:
        """Counts the chunks as loaded; load_failed() subtracts those that failed."""
        first, end = local_tokens // self.chunk_tokens, hit_tokens // self.chunk_tokens
        with self._lock:
            keys = self._keys.get(request_id, [])[first:end]
            self._loaded[request_id] = first, keys
            for at, key in enumerate(keys, first):
                self._count(key, at, loaded=1)

    def load_failed(self, request_id: str, valid_tokens: int) -> None:
        with self._lock:
            if request_id not in self._loaded:
                return  # finished meanwhile
            first, keys = self._loaded[request_id]
            valid = max(0, valid_tokens // self.chunk_tokens - first)
            self._loaded[request_id] = first, keys[:valid]
            for at, key in enumerate(keys[valid:], first + valid):
                self._count(key, at, loaded=-1)

    def finished(self, request_id: str) -> None:
        with self._lock:
            self._keys.pop(request_id, None)
            self._loaded.pop(request_id, None)

    # ------------------------------------------------------------------ summaries

    @property
    def totals(self) -> ChunkUse:
        with self._lock:
            return replace(self._totals)

    def top(self, count: int = 10) -> list[ChunkUse]:
        """The `count` chunks with the most hits; among equals, those looked up most often come first."""
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

    def log_summary(self) -> None:
        log.info("%s", self.summary())

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
