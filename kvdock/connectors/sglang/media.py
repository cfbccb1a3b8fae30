"""Identifies images by a hash of what SGLang passes to the model, and knows which of SGLang's own names to distrust.

SGLang names an image by a number of 64 bits, which a client may choose (`mm_hashes`). It makes of that number what
stands in place of the image's tokens, so its tree finds KV by it, and it keeps the output of the vision encoder under
it. So this module hashes the pixels and everything that SGLang's processor has added to them. A name is trusted as long
as all images of this name have had the same content in this engine: then all KV that SGLang has under the name was
computed from this content.

Only rank 0 has one. Threads: SGLang's scheduler thread meets images and asks, the background hashes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch

from kvdock.connectors.tensors import Unhashable, add_tensor

log = logging.getLogger("kvdock.sglang")

MOST_NAMES = 1 << 17
"""The most names that are trusted, more than SGLang's own caches can hold; those that were used longest ago are
forgotten first. Names that are not trusted are never forgotten: if there are as many, no image is shared any more."""
NAMES = frozenset(("hash", "pad_value", "pad_values", "identity"))
"""What SGLang names an item by."""
PLACES = frozenset(("offsets", "keep_device_embedding"))
"""What says where an item stands and how it is kept, not what it shows."""


@dataclass
class Content:
    """What SGLang has under some names. `digest`: 32 bytes; None: it is not hashed yet, or cannot be."""

    names: tuple[str, ...]
    digest: bytes | None = None


class Media:
    """`run`: runs a call in the background, in the order of the calls."""

    def __init__(self, run: Callable[..., object]) -> None:
        self._run, self._lock = run, threading.Lock()
        self._trusted: OrderedDict[str, bytes] = OrderedDict()
        self._distrusted: set[str] = set()
        self._pending: Counter[str] = Counter()
        """Names of which an image is being hashed."""

    def meet(self, items: Sequence[Any]) -> list[Content]:
        """The contents of a request's items, SGLang's MultimodalDataItem. Must be called for each request that has
        some, in the order of arrival, before SGLang computes it."""
        contents = [Content(names_of(item)) for item in items]
        combined = [Content((name,)) for name in combined_names(items)]
        found = [_parts_of(item) for item in items]
        with self._lock:
            for content in (*contents, *combined):
                self._pending.update(content.names)
        self._run(self._hash, contents, found, combined)
        return contents + combined

    def distrust(self, items: Sequence[Any], numbers: Iterable[int]) -> None:
        """SGLang may have anything under the names of these items, and in place of tokens with these numbers."""
        names = [_of_encoded(getattr(item, "hash", None)) for item in items] + combined_names(items)
        with self._lock:
            self._distrust((*names, *map(_of_number, numbers)))

    def why_not(self, contents: Sequence[Content]) -> str:
        """Why KV that was computed from these contents is not shared now: "media", "unready" (they are being hashed);
        empty: it is."""
        with self._lock:
            names = [name for content in contents for name in content.names]
            if len(self._distrusted) > MOST_NAMES or any(name in self._distrusted for name in names):
                return "media"
            is_known = all(content.digest is not None for content in contents)
            return "" if is_known and not any(self._pending[name] for name in names) else "unready"

    def _hash(self, contents: Sequence[Content], found: Sequence[Any], combined: Sequence[Content]) -> None:
        digests = [_digest(parts) for parts in found]
        of_all = hashlib.sha256(b"".join(digest or b"" for digest in digests)).digest() if all(digests) else None
        with self._lock:
            for content, digest in zip((*contents, *combined), (*digests, *[of_all] * len(combined)), strict=True):
                self._pending -= Counter(content.names)
                content.digest = digest
                if digest is None or any(self._trusted.get(name, digest) != digest for name in content.names):
                    self._distrust(content.names)
                    continue
                for name in content.names:
                    self._trusted[name] = digest
                    self._trusted.move_to_end(name)
            while len(self._trusted) > MOST_NAMES:
                self._trusted.popitem(last=False)

    def _distrust(self, names: Iterable[str]) -> None:
        if len(self._distrusted) <= MOST_NAMES:
            self._distrusted.update(names)


# --------------------------------------------------------------------------- SGLang's names


def _of_number(number: int) -> str:
    """The name of what SGLang's tree has for a number in place of a token."""
    return f"number {number}"


def _of_encoded(number: object) -> str:
    """The name of what SGLang keeps of the encoder's output."""
    return f"encoded {number}"


def names_of(item: Any) -> tuple[str, ...]:
    """The names that SGLang has for an item."""
    return _of_encoded(item.hash), *map(_of_number, sorted(set(item.padding_values())))


def combined_names(items: Sequence[Any]) -> list[str]:
    """The names under which SGLang keeps the encoder's output of all of a request's items of one kind."""
    kinds: dict[Any, list[Any]] = {}
    for item in items:
        kinds.setdefault(getattr(item, "modality", None), []).append(getattr(item, "hash", None))
    return [_of_encoded(hash(tuple(hashes))) for hashes in kinds.values()]  # as MultiModalStaticCache combines them


# --------------------------------------------------------------------------- content


def _parts_of(item: Any) -> list[tuple[str, Any]] | None:
    """Everything that SGLang's item holds but its names and places, as it is now. None: some of it cannot be
    hashed."""
    parts: list[tuple[str, Any]] = []
    try:
        if item.feature is None or item.precomputed_embeddings is not None:
            return None
        for name in sorted(set(item.__struct_fields__) - NAMES - PLACES):
            _collect(name, getattr(item, name), parts)
    except Unhashable:
        return None
    return parts


def _collect(name: str, found: Any, parts: list[tuple[str, Any]]) -> None:
    if isinstance(found, dict):
        parts.append((f"{name} has", len(found)))
        for key in sorted(found):
            if not isinstance(key, str):
                raise Unhashable(f"found the key {key!r} in {name}, wanted text")
            _collect(f"{name}.{key}", found[key], parts)
    elif isinstance(found, list | tuple):
        parts.append((f"{name} has", len(found)))
        for at, one in enumerate(found):
            _collect(f"{name}[{at}]", one, parts)
    elif isinstance(found, Enum):
        parts.append((name, found.name))
    elif isinstance(found, numpy.ndarray | numpy.generic) and found.dtype.kind in "biufc":
        parts.append((name, numpy.ascontiguousarray(found)))
    elif isinstance(found, torch.Tensor) and (found.device.type != "cpu" or found.is_pinned()):
        raise Unhashable(f"found {name} on {found.device}, wanted memory that no copy writes to")
    elif found is None or isinstance(found, torch.Tensor | bool | int | float | str | bytes):
        parts.append((name, found))
    else:
        raise Unhashable(f"found {type(found).__name__} in {name}, wanted tensors, numbers and text")


def _digest(parts: list[tuple[str, Any]] | None) -> bytes | None:
    digest = hashlib.sha256()
    try:
        for name, found in parts if parts is not None else ():
            digest.update(f"{len(name)}:{name}".encode())
            _add(digest, found)
    except Exception as why:  # of kinds of tensors that are not known: else its names would be pending for ever
        log.debug("an image cannot be hashed: %s", why)
        return None
    return digest.digest() if parts is not None else None


def _add(digest: Any, found: Any) -> None:
    if isinstance(found, torch.Tensor):
        add_tensor(digest, found)
        return
    described = f"{type(found).__name__} {found!r}"
    if isinstance(found, numpy.ndarray):
        described = f"{found.dtype.str} {found.shape}"
    digest.update(f"{len(described)}:{described}".encode())
    if isinstance(found, numpy.ndarray):
        digest.update(found.tobytes())
