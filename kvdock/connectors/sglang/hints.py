"""The options of SGLang's requests, and their hints about the worth of their KV (kvdock/connectors/hints.py).

SGLang passes on the envelope `kv_hints`, and `custom_params` of a request's sampling parameters, where kvdock's entry
may be. A linker gets neither, so they are read from the request when it has ended (hooks.py). Hints concern all pages
of a request, and a linker knows those alone that were looked up or offered for it: so the request's tokens are hashed
once more.

Threads: SGLang's scheduler thread calls every method.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from kvdock.connectors.hints import Asked, Hints, asked_in
from kvdock.connectors.scheduler import Preference

OPTIONS = ("load", "store", "session_end", "prefetch_after_s", "label")
"""The options that requests may have under SGLang."""


def asked_by(req: Any) -> Asked:
    """The options of SGLang's Req. None: those of a request that has none."""
    return asked_in(req.sampling_params.custom_params, OPTIONS) if req is not None else Asked()


class Wanted(NamedTuple):
    """The hashes of a request's pages, from its first one, and the preferences for them."""

    pages: list[str]
    preferences: list[Preference]


class RequestHints:
    """`has_pairs`: a page's hash is that of pairs of tokens; `ignored`: called with the number of ignored hints."""

    def __init__(self, page_tokens: int, ignored: Callable[[int], None], *, has_pairs: bool = False) -> None:
        self._page_tokens, self._has_pairs, self._hints = page_tokens, has_pairs, Hints(ignored, OPTIONS)

    def of(self, req: Any) -> Wanted | None:
        """What the hints of SGLang's Req want, now that it has ended. None: it has none, it is retracted, or it did not
        end by itself."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        params, envelope = req.sampling_params.custom_params, getattr(req, "kv_hints", None)
        if (params is None and envelope is None) or not req.finished() or isinstance(req.finished_reason, FINISH_ABORT):
            return None
        preferences = self._hints.of(params, envelope)
        return Wanted(self._pages_of(req), preferences) if preferences else None

    def _pages_of(self, req: Any) -> list[str]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        tokens = array("q", [*req.origin_input_ids, *req.output_ids[:-1]])  # the last token has no KV
        key = RadixKey(tokens, req.extra_key, is_bigram=self._has_pairs, cache_salt=req.cache_salt)
        key = key.page_aligned(self._page_tokens)
        if len(key) == 0:
            return []
        pages = get_storage_hash_str(key, page_size=self._page_tokens)
        return [pages] if isinstance(pages, str) else list(pages)
