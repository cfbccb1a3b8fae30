"""Which requests have KV that kvdock can name: those of text, and those with images.

A page's hash covers tokens. Of an image, a video or a sound, SGLang puts numbers of its own in place of tokens, above
the model's vocabulary, and a client may choose what they are made from. So pages of a request with images get names
that cover what the images show (marks.py, media.py). Requests with anything else are computed, and nothing is looked up
or stored for them: videos, sound, embeddings, numbers that stand for none of the request's images, turns of sessions
with images. The texts that other requests send to the same model are served.

SGLang names a linker only the id of a request that it looks up, and none for the pages that it offers; hooks (hooks.py)
add the request. Of a model that reads more than text, nothing is shared without the hooks.

All ranks decide alike here. What depends on time, such as whether an image is hashed, is rank 0's alone.

Threads: SGLang's scheduler thread calls every method.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvdock.connectors.background import Background
from kvdock.connectors.sglang.marks import MarkedPages, Marks, Misplaced, Placed, placed
from kvdock.connectors.sglang.media import Media

log = logging.getLogger("kvdock.sglang")


class _Met(NamedTuple):
    """`why`: why the request is computed, as in Outcome; empty: it is not. `is_text`: it has no images; `marks`: rank
    0's, of a request that has."""

    why: str = ""
    is_text: bool = True
    marks: Marks | None = None


_TEXT = _Met()


class Texts:
    """`vocabulary`: the number of the model's tokens, if it reads more than text; None: it reads text alone.
    `has_pairs`: a page's hash is that of pairs of tokens; `hashes`: this is rank 0, which hashes images."""

    def __init__(self, vocabulary: int | None, page_tokens: int, *, has_pairs: bool, hashes: bool) -> None:
        self._vocabulary, self._page_tokens, self._reach = vocabulary, page_tokens, int(has_pairs)
        self._hashing = Background("kvdock-hash")
        self._media = Media(self._hashing.run) if hashes and vocabulary is not None else None
        self._met: weakref.WeakKeyDictionary[Any, _Met] = weakref.WeakKeyDictionary()
        self.matched: Any = None
        """The request that SGLang looks up now; None: none, or it is not known."""
        self._first = 0
        self._holds_texts = True
        """Whether SGLang's tree has nothing but KV of texts in place of tokens."""

    def meet(self, req: Any) -> _Met:
        """Must be called for each request, SGLang's Req, before it is computed. What was found of a request stays,
        because SGLang drops its images when it has ended, before its pages are offered."""
        met = self._met.get(req)
        if met is None:
            met = self._met[req] = self._meet(req)
        return met

    def why_not(self, req: Any) -> str:
        """Why SGLang's Req is computed, as in Outcome; empty: it is not."""
        return self.meet(req).why or ("" if self._holds_texts else "bypassed_media")

    def is_text(self, req: Any) -> bool:
        """Whether SGLang's hashes name the request's pages. None: it is not known which request it is."""
        return self._vocabulary is None if req is None else self.meet(req).is_text

    def _meet(self, req: Any) -> _Met:
        if any(getattr(req, name, None) is not None for name in ("input_embeds", "positional_embed_overrides")):
            return _Met("bypassed_embeddings", is_text=False)
        inputs, vocabulary = req.multimodal_inputs, self._vocabulary
        if vocabulary is None:
            return _TEXT if inputs is None else _Met("bypassed_media", is_text=False)
        if inputs is None and max(req.origin_input_ids, default=0) < vocabulary:
            return _TEXT
        try:
            if req.session is not None:
                raise Misplaced("found a session, whose earlier turns may have other positions")
            return self._with_images(inputs.mm_items, placed(req.origin_input_ids, inputs, vocabulary))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as why:
            log.debug("a request with images or other media is computed: %s", why)
            self._distrust(getattr(inputs, "mm_items", None) or (), req.origin_input_ids, vocabulary)
            return _Met("bypassed_media", is_text=False)

    def _with_images(self, items: Sequence[Any], found: Placed) -> _Met:
        contents = self._media.meet(items) if self._media is not None else []
        if not all(item.is_image() for item in items):
            return _Met("bypassed_media", is_text=False)
        marks = None
        if self._media is not None:
            marks = Marks(found, self._media, contents, self._page_tokens, self._reach)
        return _Met("", is_text=False, marks=marks)

    def _distrust(self, items: Sequence[Any], tokens: Sequence[int], vocabulary: int) -> None:
        """SGLang may have anything under the names of a request's items and numbers from now on."""
        values = [
            value for item in items
            for value in (getattr(item, "pad_value", None), *(getattr(item, "pad_values", None) or ()))
        ]
        if any(value is not None and value < vocabulary for value in values):
            self._holds_texts = False
        if self._media is not None:
            self._media.distrust(items, {token for token in tokens if not 0 <= token < vocabulary})

    @contextmanager
    def matching(self, req: Any, first: int) -> Iterator[None]:
        """SGLang looks up the request's pages from number `first` on."""
        self.matched, self._first = req, first
        try:
            yield
        finally:
            self.matched = None

    @property
    def looked_up(self) -> MarkedPages | None:
        """The pages that are looked up now; None: SGLang's hashes name them."""
        return self._marked(self.matched, self._first)

    def may_look_up(self, rid: str) -> bool:
        return self._vocabulary is None or (self.matched is not None and str(self.matched.rid) == rid)

    def offered(self, req: Any, first: int | None) -> tuple[bool, MarkedPages | None]:
        """Whether pages may be stored that SGLang offers while `req` puts its pages into the tree, and what they are;
        None: SGLang's hashes name them. `req` None: SGLang does not say which; `first`: the number of the first page;
        None: it is not known."""
        if req is None or self.why_not(req):
            return req is None and self._vocabulary is None, None
        if self.is_text(req) or self._media is None:
            return True, None
        marked = self._marked(req, first) if first is not None else None
        return marked is not None and not marked.marks.why_not(), marked

    def _marked(self, req: Any, first: int) -> MarkedPages | None:
        marks = self.meet(req).marks if req is not None else None
        return MarkedPages(marks, first) if marks is not None else None

    def flushed(self) -> None:
        """SGLang has emptied its tree. What it keeps of the encoder's output stays."""
        self._holds_texts = True

    def close(self) -> None:
        """Waits for images that are being hashed."""
        self._hashing.close()
