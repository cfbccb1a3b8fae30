"""Which pages of SGLang's tree may be stored after weights have changed, until the tree is flushed.

A page's KV depends on all pages before it. So it is of the weights of now if they have computed all of it and all that
is in front of it. Of a page that is offered SGLang tells neither: the tree keeps what older weights have computed, and
a request that ran across the change brings pages that are of both. So three things are known of each page:

    who brings it        a request inserts it into the tree; it was admitted under the weights of now, or before
    who has computed it  its slots are the request's own, or the tree had it already
    what is before it    the start of the prompt, or a page that is fresh

A page is fresh if a request that was admitted under the weights of now inserts its own slots behind a fresh page.

Invariant: a page of the tree whose hash is in `_pages` is fresh. One that comes into the tree is offered at once, so
its hash leaves `_pages` if it is not.

Threads: SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvdock.connectors.running_weights import RunningWeights

START, UNKNOWN = "", None
"""In the place of the hash of the page before: there is none; nobody knows."""
MOST_PAGES = 1 << 18
"""How many pages are known to be fresh; those that came first are forgotten, and not stored again."""


class Fresh:
    """`weights`: those that the engine runs."""

    def __init__(self, weights: RunningWeights, most: int = MOST_PAGES) -> None:
        self._weights, self._most = weights, most
        self._admitted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The epoch of the weights under which a request was admitted last."""
        self._pages: OrderedDict[str, None] = OrderedDict()
        self._epoch = 0  # of `_pages`
        self._inserts: Any = None
        self._own: Any = None

    def admitted(self, request: Any) -> None:
        """A request is about to be admitted: all but what it has in front in the tree is computed from now on. One of
        a session may go on from KV that is in no tree."""
        if getattr(request, "session", None) is None:
            self._admitted[request] = self._weights.epoch

    @contextmanager
    def inserting(self, request: Any) -> Iterator[None]:
        """A request gives what it has computed to the tree."""
        before, self._inserts = self._inserts, request
        try:
            yield
        finally:
            self._inserts = before

    @contextmanager
    def adopting(self, slots: Any, first_own: int) -> Iterator[None]:
        """The tree takes `slots` (int64 tensor, one a token), of which those before `first_own` are its own."""
        before, self._own = self._own, None if slots is None else slots[first_own:]
        try:
            yield
        finally:
            self._own = before

    def may_store(self, pages: Sequence[str], parent: str | None, slots: Any) -> bool:
        """Whether what is offered is all of the weights of now. `pages`: their hashes; `parent`: the hash of the page
        before, as Told has it; `slots`: of their tokens."""
        if not self._weights.is_stale:
            return True
        if self._epoch != self._weights.epoch:
            self._pages.clear()
            self._epoch = self._weights.epoch
        if not self._is_fresh(pages, parent, slots):
            for page in pages:
                self._pages.pop(page, None)
            return False
        self._pages.update(dict.fromkeys(pages))
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)
        return True

    def _is_fresh(self, pages: Sequence[str], parent: str | None, slots: Any) -> bool:
        if parent != START and parent not in self._pages:
            return False
        if self._own is None or self._inserts is None:
            return False
        is_own = _among(slots, self._own)
        if not is_own.any():
            return all(page in self._pages for page in pages)  # offered once more
        return bool(is_own.all()) and self._admitted.get(self._inserts) == self._weights.epoch


def _among(slots: Any, others: Any) -> Any:
    import torch

    return torch.isin(torch.as_tensor(slots).cpu(), torch.as_tensor(others).cpu())
