"""The hashes and tokens by which routers know SGLang's pages.

SGLang's own events name a page by the first 64 bits of its hash. A call to a linker has the hashes of pages, but
neither their tokens nor the hash before them. Hooks (hooks.py) report what SGLang looks up and inserts at that time, so
the tokens are read from there. Pages of requests with a salt, an `extra_key` or an adapter, and those of EAGLE's pairs
of tokens, have no names: a router that hashes tokens alone would send other requests to them. Nor have those of
requests with images.

Threads: SGLang's scheduler thread calls every method of Naming; PageTokens is used by any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvdock.connectors.announcer import Announcer, Chunk
from kvdock.connectors.sglang.marks import MarkedPages
from kvdock.connectors.sglang.updates import START, UNKNOWN
from kvdock.protocol.kv_events import BlockNames, named

HASH_DIGITS = 16
"""The first hexadecimal digits of a page's hash, which SGLang's events have as a signed number of 64 bits."""


@dataclass(frozen=True)
class PageTokens:
    """The tokens of consecutive pages. `above`: the hash of the page before the first one, or START; `tokens`: of a
    whole prompt; `start`: the position of the first page's first token; `size`: the tokens of a page."""

    above: str
    tokens: Sequence[int]
    start: int
    size: int

    def behind(self, pages: Sequence[str]) -> PageTokens:
        """Those of the pages behind `pages`, which are the first ones."""
        if not pages:
            return self
        return replace(self, above=pages[-1], start=self.start + len(pages) * self.size)

    def chunk(self, pages: Sequence[str], at: int) -> Chunk:
        """`pages`: the hashes of the pages."""
        above = pages[at - 1] if at else self.above
        return Chunk((bytes.fromhex(pages[at]),), bytes.fromhex(above) if above != START else None, self._of(at))

    def name(self, pages: Sequence[str], at: int) -> BlockNames:
        """The names of page number `at` for a server that publishes events itself."""
        above = pages[at - 1] if at else self.above
        return named(_number(above) if above != START else None, [_number(pages[at])], self._of(at))

    def _of(self, at: int) -> array[int]:
        first = self.start + at * self.size
        return array("I", self.tokens[first : first + self.size])


class About(NamedTuple):
    """What a call to a linker does not have: the tokens of the pages, if routers may know them, and of the request
    whose pages they are the `traceparent`, whether it may be stored, and the pages if they have images."""

    tokens: PageTokens | None = None
    traceparent: str = ""
    is_stored: bool = True
    marked: MarkedPages | None = None

    def behind(self, pages: Sequence[str]) -> About:
        """As PageTokens.behind."""
        return self._replace(
            tokens=self.tokens.behind(pages) if self.tokens is not None else None,
            marked=self.marked.behind(len(pages)) if self.marked is not None else None,
        )


NOTHING = About()


def _number(page: str) -> int:
    return int(page[:HASH_DIGITS], 16)


class Naming:
    """`is_wanted`: whether anybody reads names now; `has_pairs`: a page's hash is that of pairs of tokens."""

    def __init__(self, page_tokens: int, is_wanted: Callable[[], bool], *, has_pairs: bool) -> None:
        self._page_tokens, self._is_wanted, self._has_pairs = page_tokens, is_wanted, has_pairs
        self.parent: str | None = UNKNOWN
        """The hash of the page before the node that is offered next; see Chains.named."""
        self.looked_up: PageTokens | None = None
        """The tokens of the pages that are looked up now. None: the pages have no names, or nobody reads them."""
        self.offered: PageTokens | None = None
        """The tokens of the pages that are offered next, as for `looked_up`."""
        self.first: int | None = None
        """The number of the first page that is offered next; None: it is not known."""
        self._inserted: Any = None

    @contextmanager
    def matching(self, key: Any, local_tokens: int, above: Callable[[], str | None]) -> Iterator[None]:
        """SGLang looks up the pages of `key`, its RadixKey, behind the first `local_tokens` tokens. None: they have no
        names. `above`: returns the hash of the page before them."""
        if self._has_names(key):
            before = above() if local_tokens else START
            if before is not None:
                self.looked_up = PageTokens(before, key.token_ids, local_tokens, self._page_tokens)
        try:
            yield
        finally:
            self.looked_up = None

    @contextmanager
    def inserting(self, key: Any) -> Iterator[None]:
        """SGLang puts the pages of `key` into its tree, and offers nodes on their path. None: they have no names."""
        before, self._inserted = self._inserted, key
        try:
            yield
        finally:
            self._inserted = before

    @contextmanager
    def offering(self, above: Sequence[str] | None) -> Iterator[None]:
        """SGLang offers a node. `above`: the hashes of all pages before it; None: they are not known."""
        if above is not None:
            self.parent, self.first = str(above[-1]) if above else START, len(above)
            if self._has_names(self._inserted):
                start = len(above) * self._page_tokens
                self.offered = PageTokens(self.parent, self._inserted.token_ids, start, self._page_tokens)
        try:
            yield
        finally:
            self.parent, self.offered, self.first = UNKNOWN, None, None

    def _has_names(self, key: Any) -> bool:
        if key is None or self._has_pairs or key.extra_key or key.cache_salt:
            return False
        return self._is_wanted()


def with_loadable(events: Sequence[Any], announcer: Announcer) -> list[Any]:
    """`events`, which SGLang is about to publish, and the announcer's changes in SGLang's own form. A reader of
    AllBlocksCleared forgets all blocks of this engine, also those that only SGLang's device has lost, so chunks that
    can be loaded are announced again."""
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
    from sglang.srt.mem_cache.utils import hash_str_to_int64

    if any(isinstance(one, AllBlocksCleared) for one in events):
        announcer.announce_again()
    made = list(events)
    for change in announcer.take():
        chunk = change.chunk
        name = hash_str_to_int64(chunk.hashes[0].hex())
        if not change.is_there:
            made.append(BlockRemoved(block_hashes=[name], medium=StorageMedium.CPU))
            continue
        before = hash_str_to_int64(chunk.parent.hex()) if chunk.parent is not None else None
        made.append(BlockStored(
            block_hashes=[name], parent_block_hash=before, token_ids=list(chunk.tokens), block_size=len(chunk.tokens),
            lora_id=None, medium=StorageMedium.CPU,
        ))
    return made
