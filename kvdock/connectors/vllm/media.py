"""Identifies images and other inputs that are not tokens by a hash of the tensors that vLLM passes to the model.

vLLM's caches identify such an input by a name: a hash of its content, or the client's own name (`uuid` in a request).
The name does not show which of the two it is. So this module hashes the tensors. A name is trusted as long as all
inputs of this name have had the same tensors in this engine: then the KV that vLLM has cached under the name was
computed from these tensors.

Threads: the engine's thread meets inputs, the background hashes them.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvdock.connectors.vllm.adapters import Run

MOST_NAMES = 1 << 17
"""The most names that are remembered, more than an engine's own caches can hold. The names that were used longest ago
are forgotten first."""


class Unhashable(ValueError):
    """An input to be hashed is not in this process, or has no bytes of its own."""


@dataclass
class Named:
    """The content for which a name stands. `digest`: None until it was hashed; `in_progress`: how often it is being
    hashed now."""

    digest: bytes | None = None
    is_sound: bool = True
    in_progress: int = 0
    content: weakref.ref[Any] | None = None
    """The object that was hashed last, if it still exists: vLLM keeps inputs, and hands out the same object again."""

    @property
    def is_known(self) -> bool:
        return self.digest is not None and not self.in_progress


class Media:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._names: OrderedDict[str, Named] = OrderedDict()
        self._lock = threading.Lock()

    def meet(self, feature: Any) -> Named:
        """The content for which the name of `feature`, a MultiModalFeatureSpec, stands. Must be called for each feature
        of every request, in the order of arrival."""
        named = self._names.setdefault(feature.identifier, Named())
        self._names.move_to_end(feature.identifier)
        if len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)
        data = feature.data
        with self._lock:
            if data is None:
                named.is_sound = False
            elif named.content is None or named.content() is not data:
                named.in_progress += 1
                self._run(self._hash, named, data)
        return named

    def _hash(self, named: Named, data: Any) -> None:
        """Background: hashes an input, and compares the digest with that of earlier inputs of the name."""
        found = None
        try:
            found = digest_of_item(data)
        except Unhashable:
            pass
        finally:
            with self._lock:
                named.in_progress -= 1
                if found is None or named.digest not in (None, found):
                    named.is_sound = False
                else:
                    named.digest, named.content = found, weakref.ref(data)


def digest_of_item(item: Mapping[str, Any]) -> bytes:
    """A digest, of 32 bytes, of all tensors of one input, a MultiModalKwargsItem. Unhashable if it has anything but
    tensors, because a number may be the address of data elsewhere."""
    if not item:
        raise Unhashable("found an empty item, wanted tensors")
    digest = hashlib.sha256()
    for name in sorted(item):
        digest.update(b"%d:%s" % (len(name), name.encode()))
        _add(digest, item[name].data)
    return digest.digest()


def digest_of_tensor(tensor: Any) -> bytes:
    """A digest, of 32 bytes, of a tensor's type, shape and elements. Unhashable unless it is in host memory."""
    digest = hashlib.sha256()
    _add(digest, tensor)
    return digest.digest()


def _add(digest: Any, found: Any) -> None:
    if isinstance(found, list | tuple):
        digest.update(b"(%d " % len(found))
        for one in found:
            _add(digest, one)
        return
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu":
        raise Unhashable(f"found {type(found).__name__}, wanted a tensor in memory")
    digest.update(f"{found.dtype} {tuple(found.shape)}:".encode())
    digest.update(found.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
