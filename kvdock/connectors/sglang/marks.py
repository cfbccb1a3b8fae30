"""The names of a request's pages that images are part of.

SGLang's hash of a page covers the tokens up to the page's end, and of an image only the number that stands in place of
its tokens. So a page that begins before the end of a prompt's first image has SGLang's hash, and every page from the
one on in which an image begins has

    sha256("kvdock images"; SGLang's hash ‖ digest of all images that have begun by its end ‖ the positions of tokens)

so it is found only where the same images stand at the same places. Of an image that has begun, the digest covers all of
it: where tokens of an image attend to each other, those on the page depend on the later ones. Positions are those that
the model is given, if they are not simply counted (M-RoPE): they follow from the sizes of the images.

Threads: SGLang's scheduler thread makes marks; threads of the scheduler connector read them, too.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from kvdock.connectors.sglang.media import Content, Media


class Misplaced(ValueError):
    """It is not certain which tokens of a request stand for which image, or what else its KV depends on."""


@dataclass(frozen=True)
class Positions:
    """`table`: a column for each token of the prompt; a later token has its number plus `delta` in each row."""

    table: Any
    delta: int

    def of(self, start: int, end: int) -> bytes:
        """Those of the tokens [start, end)."""
        rows, known = self.table.shape
        later = numpy.arange(max(start, known), max(end, known), dtype=numpy.int64) + self.delta
        columns = numpy.concatenate([self.table[:, start:end], numpy.tile(later, (rows, 1))], axis=1)
        return columns.tobytes()


@dataclass(frozen=True)
class Placed:
    """Where SGLang's items stand in a prompt. `runs`: for each item the runs of tokens [first, last] that stand for it;
    `about`: numbers of the model that SGLang gives with the items."""

    runs: Sequence[Sequence[tuple[int, int]]]
    positions: Positions | None
    about: Mapping[str, int]


class Marks:
    """Those of one request. `reach`: how many tokens behind its end a page's hash covers."""

    def __init__(self, placed: Placed, media: Media, contents: Sequence[Content], page_tokens: int, reach: int) -> None:
        self._placed, self._media, self._contents = placed, media, contents
        self._page_tokens, self._reach, self._lock = page_tokens, reach, threading.Lock()
        self._order = sorted(range(len(placed.runs)), key=lambda at: placed.runs[at][0])
        self._digests: list[bytes] = []
        """For each page from the first, of everything that its name covers beside SGLang's hash; empty: nothing."""
        self._begun = 0
        """How many items have begun by the end of these pages."""

    def why_not(self) -> str:
        """See Media.why_not."""
        return self._media.why_not(self._contents)

    def named(self, first: int, pages: Sequence[str]) -> list[str]:
        """The names of consecutive pages; none if an image is not hashed. `first`: the number of the first one;
        `pages`: SGLang's hashes."""
        if any(content.digest is None for content in self._contents):
            return []
        with self._lock:
            while len(self._digests) < first + len(pages):
                self._digests.append(self._next())
            digests = self._digests[first : first + len(pages)]
        return [_named(page, digest) if digest else page for page, digest in zip(pages, digests, strict=True)]

    def _next(self) -> bytes:
        start = len(self._digests) * self._page_tokens
        end, before = start + self._page_tokens, self._digests[-1] if self._digests else b""
        digest, placed = hashlib.sha256(before), self._placed
        if not before:
            digest.update(json.dumps(placed.about, sort_keys=True).encode())
        while self._begun < len(self._order):
            at = self._order[self._begun]
            if placed.runs[at][0][0] >= end + self._reach:
                break
            content = self._contents[at].digest
            assert content is not None, "it was hashed"
            digest.update(json.dumps([content.hex(), placed.runs[at]]).encode())
            self._begun += 1
        if not self._begun:
            return b""
        if placed.positions is not None:
            digest.update(placed.positions.of(start, end))
        return digest.digest()


class MarkedPages(NamedTuple):
    """Consecutive pages of a request. `first`: the number of the first one."""

    marks: Marks
    first: int

    def behind(self, pages: int) -> MarkedPages:
        """Those behind the first `pages` pages."""
        return self._replace(first=self.first + pages)

    def named(self, pages: Sequence[str], parent: str | None) -> tuple[list[str], str | None]:
        """Their names, and that of the page before them. `parent`: SGLang's hash of that one; None or empty: it is not
        known, or there is none."""
        if not parent:
            return self.marks.named(self.first, pages), parent
        names = self.marks.named(self.first - 1, [parent, *pages])
        return names[1:], names[0] if names else None


def _named(page: str, digest: bytes) -> str:
    return hashlib.sha256(b"kvdock images" + bytes.fromhex(page) + digest).hexdigest()


# --------------------------------------------------------------------------- where the items stand

_DERIVED = frozenset((
    "mm_items", "padded_input_ids", "image_pad_len", "token_modalities", "data_offsets", "mrope_positions",
    "mrope_position_delta", "mrope_position_delta_repeated_cache",
))
"""What SGLang's MultimodalInputs holds that is read by itself, or follows from the items and their places."""


def placed(tokens: Any, inputs: Any, vocabulary: int) -> Placed:
    """`tokens`: a prompt's, with SGLang's numbers in place of the items of `inputs`, its MultimodalInputs. Raises
    Misplaced unless each number that is no token stands for an item, and all that KV depends on is known. All ranks
    find the same."""
    prompt = numpy.array(tokens, dtype=numpy.int64)
    is_item = numpy.zeros(len(prompt), dtype=bool)
    runs = [_runs_of(item, prompt, is_item, vocabulary) for item in inputs.mm_items]
    if (((prompt >= vocabulary) | (prompt < 0)) & ~is_item).any():
        raise Misplaced("found numbers that stand for no item")
    if not runs:
        raise Misplaced("found no item, wanted images")
    first = min(one[0][0] for one in runs)
    return Placed(runs, _positions_of(inputs, len(prompt), first), _about(inputs))


def _runs_of(item: Any, prompt: Any, is_item: Any, vocabulary: int) -> list[tuple[int, int]]:
    """Marks an item's tokens in `is_item`."""
    if not item.offsets or item.format.name != "NORMAL":
        raise Misplaced("found an item without places, or one that the client has made for the model itself")
    runs = sorted((int(first), int(last)) for first, last in item.offsets)
    for first, last in runs:
        if not 0 <= first <= last < len(prompt) or is_item[first : last + 1].any():
            raise Misplaced(f"found an item at {first} to {last} of {len(prompt)} tokens, or two at one place")
        wanted = numpy.array(item.padding_sequence(last + 1 - first), dtype=numpy.int64)
        if (wanted < vocabulary).any() or not numpy.array_equal(prompt[first : last + 1], wanted):
            raise Misplaced(f"found tokens at {first} to {last} that another item or a text may have, too")
        is_item[first : last + 1] = True
    return runs


def _positions_of(inputs: Any, tokens: int, first: int) -> Positions | None:
    """The positions that SGLang gives the model; None: they are counted. Before the first item, at `first`, they must
    be counted, because pages there are shared with requests that have none."""
    if inputs.mrope_positions is None:
        return None
    if inputs.mrope_positions.device.type != "cpu" or inputs.mrope_position_delta is None:
        raise Misplaced("found positions on a device, or none for the tokens behind the prompt")
    table = numpy.array(inputs.mrope_positions.numpy(), dtype=numpy.int64)
    if table.ndim != 2 or table.shape[1] != tokens or (table[:, :first] != numpy.arange(first)).any():
        raise Misplaced(f"found positions of the shape {table.shape} for {tokens} tokens, or not counted before images")
    return Positions(table, int(inputs.mrope_position_delta.flatten()[0]))


def _about(inputs: Any) -> dict[str, int]:
    about = {}
    for name, value in vars(inputs).items():
        if name in _DERIVED or value is None:
            continue
        if not name.endswith("_id") or not isinstance(value, int):
            raise Misplaced(f"found {name} beside the items, which is not known")
        about[name] = value
    return about
