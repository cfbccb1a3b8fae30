"""Which requests have KV that depends on their tokens alone, so that the hashes of their pages name it.

A page's hash covers tokens. Of an image or a sound, SGLang puts numbers of its own in place of tokens, above the
model's vocabulary, and a client may choose what they are made from. KV of embeddings depends on no token at all. Such
requests are computed: nothing is looked up or stored for them. The texts that other requests send to the same model
are served.

SGLang names a linker only the id of a request that it looks up, and none for the pages that it offers; hooks (hooks.py)
add the request. Of a model that reads images or sound, nothing is shared without the hooks.

Threads: SGLang's scheduler thread calls every method.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Texts:
    """`vocabulary`: the number of the model's tokens, if it reads more than text; None: it reads text alone."""

    def __init__(self, vocabulary: int | None) -> None:
        self._vocabulary = vocabulary
        self._why: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.matched: Any = None
        """The text that SGLang looks up now; None: none, or it is not known."""

    def why_not(self, req: Any) -> str:
        """Why SGLang's Req is computed, as in Outcome; empty: it is a text. What was said of a request stays, because
        SGLang drops its images when it has ended, before its pages are offered."""
        why = self._why.get(req)
        if why is None:
            why = self._why[req] = self._told(req)
        return why

    def _told(self, req: Any) -> str:
        if any(getattr(req, name, None) is not None for name in ("input_embeds", "positional_embed_overrides")):
            return "bypassed_embeddings"
        if req.multimodal_inputs is not None:
            return "bypassed_media"
        if self._vocabulary is not None and max(req.origin_input_ids, default=0) >= self._vocabulary:
            return "bypassed_media"  # a later turn of a session, or a client that sends the numbers itself
        return ""

    @contextmanager
    def matching(self, req: Any) -> Iterator[None]:
        """SGLang looks up this text."""
        self.matched = req
        try:
            yield
        finally:
            self.matched = None

    def may_look_up(self, rid: str) -> bool:
        return self._vocabulary is None or (self.matched is not None and str(self.matched.rid) == rid)

    def may_store(self, req: Any) -> bool:
        """Whether pages may be stored that SGLang offers while `req` puts its pages into the tree. None: it does not
        say which."""
        return self._vocabulary is None if req is None else not self.why_not(req)
