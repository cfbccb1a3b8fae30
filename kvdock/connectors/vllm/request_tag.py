"""The tag of a request: everything beside its tokens on which its KV depends. It is mixed into the request's keys
(kvdock/protocol/keys.py).

Adapter, salt, prompt embeddings and weights apply to the whole request. Images and other media take the place of some
tokens, so requests that differ in a later image share the tokens before it. The keys of such requests are made from
tokens, not from vLLM's own hashes: these contain adapters by name, and images by names that clients may choose.

While a request's tag is not known, the request is not cached: neither looked up nor stored. WHY has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from kvdock.connectors.background import Background
from kvdock.connectors.requests import Chain
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.tensors import Unhashable, add_tensor
from kvdock.connectors.vllm.adapters import LOADS, Adapter, Adapters, Run
from kvdock.connectors.vllm.hints import asked_by
from kvdock.protocol.keys import HashedChain, KeyChain, Mark, tagged

# --------------------------------------------------------------------------- images and other media

# Identifies images and other inputs that are not tokens by a hash of the tensors that vLLM passes to the model.
#
# vLLM's caches identify such an input by a name: a hash of its content, or the client's own name (`uuid` in a request).
# The name does not show which of the two it is. So this module hashes the tensors. A name is trusted as long as all
# inputs of this name have had the same tensors in this engine: then the KV that vLLM has cached under the name was
# computed from these tensors.
#
# Threads: the engine's thread meets inputs, the background hashes them.

MOST_NAMES = 1 << 17
"""The most names that are remembered, more than an engine's own caches can hold. The names that were used longest ago
are forgotten first."""


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
    add_tensor(digest, tensor)
    return digest.digest()


def _add(digest: Any, found: Any) -> None:
    if isinstance(found, list | tuple):
        digest.update(b"(%d " % len(found))
        for one in found:
            _add(digest, one)
        return
    add_tensor(digest, found)


# --------------------------------------------------------------------------- the request tag

WHY: Mapping[str, str] = {
    "adapter": "the files of their LoRA adapter cannot be read, have changed since they were loaded, or share a name",
    "media": "what an image or another input holds is not known, or shares its name with another one",
    "embeddings": "their prompt holds embeddings that cannot be hashed, or that stand among tokens",
    "growing": "their prompt grows while they run",
    "unready": "their adapter, images or embeddings were still being hashed",
}
"""The reasons why requests are not cached, each with a short explanation."""
WAIT_S = 0.1
"""How long a lookup waits for inputs that are still being hashed."""


@dataclass(frozen=True)
class Tag:
    """`of_all`: bytes that identify the inputs of the whole request; `marks`: see KeyChain."""

    of_all: bytes = b""
    marks: tuple[Mark, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.of_all or self.marks)


PLAIN = Tag()


def chain_of(
    tag: Tag | None, namespace: bytes, chunk_tokens: int, hashes: Sequence[bytes], hash_tokens: int | None
) -> Chain:
    """The chain of a request's keys. `namespace`: the namespace of the weights that compute the request
    (Tags.namespace_of). `hashes`: vLLM's hashes, one for each `hash_tokens` tokens. `hash_tokens` None: other processes
    do not compute the same hashes, so keys are made from tokens."""
    if tag is None:
        return _NoKeys()
    if tag or hash_tokens is None:
        return KeyChain(tagged(namespace, tag.of_all), chunk_tokens, tag.marks)
    return HashedChain(namespace, chunk_tokens, hashes, hash_tokens)


class _NoKeys:
    """The chain of a request whose tag is not known."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.parent: bytes | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Does nothing."""


@dataclass
class _Met:
    """A request whose KV depends on more than its tokens. `why`: the reason why it is never cached; "": it may be."""

    since_s: float
    why: str = ""
    adapter: Adapter | None = None
    media: list[tuple[Named, Any]] = field(default_factory=list)
    embeddings: str = ""
    weights: str = ""
    awaits_embeddings: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)
    """Other inputs of its tag than adapter, media, embeddings and weights."""
    is_counted: bool = False
    tag: Tag | None = None


class Tags:
    """The tags of an engine's requests. `adapters_as`: those of vLLM's settings for adapters on which KV depends.
    `began_ns`: see Adapters. `weights`: the weights of this engine. `trusts_names`: whether a name that a request gives
    for its weights identifies them. `clock`: a monotonic clock, in seconds."""

    def __init__(
        self, adapters_as: str = "", began_ns: int = 0, clock: Callable[[], float] = time.perf_counter, *,
        weights: RunningWeights | None = None, trusts_names: bool = True,
    ) -> None:
        self.weights, self._trusts_names = weights if weights is not None else RunningWeights(), trusts_names
        self._hashing, self._clock, self._step = Background("kvdock-hash"), clock, 0
        self._adapters, self._adapters_as = Adapters(self._hashing.run, began_ns, hears=LOADS.hears), adapters_as
        self._media = Media(self._hashing.run)
        self._met: dict[str, _Met] = {}
        self._has_grown = False
        """Whether a request whose prompt can grow has arrived: the new part may have images that Tags has not seen."""

    def arrived(self, request: Any) -> None:
        """Must be called for every request before any other method, also if it is never stored here: its KV may stay in
        vLLM's own prefix cache under the names of its adapter and images, so these names must be known."""
        if not is_plain(request):
            self._meet(request)

    def of(self, request: Any) -> Tag | None:
        """The request's tag; None if it is not known, or not known yet."""
        if is_plain(request):
            return PLAIN
        met = self._meet(request)
        if self._why_not(met):
            return None
        if met.tag is None:
            met.tag = self._tag(met)
        return met.tag

    def namespace_of(self, request: Any, namespace: bytes) -> bytes:
        """The namespace for the keys of chunks that the request computes now, made from the engine's `namespace`."""
        return namespace if self.names_weights(request) else tagged(namespace, self.weights.tag)

    def names_weights(self, request: Any) -> bool:
        """Whether the name that the request gives stands for the weights that compute it."""
        return self._trusts_names and bool(asked_by(request).weights)

    def waits(self, request: Any) -> bool:
        """Whether the tag may be known soon enough for a lookup to wait for it."""
        met = self._meet(request)
        return self._why_not(met) == "unready" and self._clock() - met.since_s < WAIT_S

    def bypassed(self, request: Any) -> str:
        """The first call for a request returns the reason why it is not cached; later calls return ""."""
        met = self._meet(request)
        why, met.is_counted = "" if met.is_counted else self._why_not(met), True
        if why == "adapter" and met.adapter is not None:
            self._adapters.log(met.adapter)
        return why

    def meet_adapter(self, asked: Any) -> None:
        """vLLM is about to load the adapter of `asked`, a LoRARequest."""
        self._adapters.meet(asked)

    def lost(self) -> bool:
        """Whether an adapter has changed since the last steps computed with it. Reports each such adapter once."""
        lost = self._adapters.lost(self._step)
        self._step += 1  # the next lookups check the files again
        return lost

    def may_be_lost(self, request: Any) -> bool:
        return getattr(request, "lora_request", None) is not None

    def step(self) -> None:
        """A new step: files that may change are checked again."""
        self._step += 1

    def finished(self, request_id: str) -> None:
        self._met.pop(request_id, None)

    def close(self) -> None:
        """Waits for inputs that are being hashed."""
        self._hashing.close()

    def _meet(self, request: Any) -> _Met:
        met = self._met.get(request.request_id)
        if met is None:
            met = self._met[request.request_id] = _Met(self._clock())
            if getattr(request, "lora_request", None) is not None:
                met.adapter = self._adapters.meet(request.lora_request)
                met.inputs["3d"] = bool(getattr(request.lora_request, "is_3d_lora_weight", False))
            met.media = [
                (self._media.meet(feature), feature) for feature in getattr(request, "mm_features", None) or ()
            ]
            met.weights = asked_by(request).weights
            if getattr(request, "cache_salt", None):
                met.inputs["salt"] = request.cache_salt
            if getattr(request, "resumable", False):
                met.why, self._has_grown = "growing", True
            self._meet_embeddings(request, met)
        return met

    def _meet_embeddings(self, request: Any, met: _Met) -> None:
        embeddings = getattr(request, "prompt_embeds", None)
        if embeddings is None:
            met.why = met.why or ("embeddings" if request.prompt_token_ids is None else "")
        elif getattr(request, "prompt_is_token_ids", None) is not None or request.prompt_token_ids is not None:
            met.why = met.why or "embeddings"
        elif not met.why:
            met.awaits_embeddings = True
            self._hashing.run(_hash_embeddings, embeddings, met)

    def _why_not(self, met: _Met) -> str:
        if met.why:
            return met.why
        if met.adapter is not None and not self._adapters.check(met.adapter, self._step):
            return "adapter"
        if met.media and (self._has_grown or any(not named.is_sound for named, _ in met.media)):
            return "media"
        is_known = (
            (met.adapter is None or met.adapter.digest is not None) and not met.awaits_embeddings
            and all(named.is_known for named, _ in met.media)
        )
        return "" if is_known else "unready"

    def _tag(self, met: _Met) -> Tag:
        inputs = dict(met.inputs)
        if met.adapter is not None:
            assert met.adapter.digest is not None
            inputs |= {"adapter": met.adapter.digest.hex(), "adapters as": self._adapters_as}
        if met.embeddings:
            inputs["embeddings"] = met.embeddings
        if met.weights:
            inputs["weights"] = met.weights
        marks = sorted((_mark(named, feature) for named, feature in met.media), key=lambda mark: (mark.start, mark.end))
        return Tag(json.dumps(inputs, sort_keys=True).encode() if inputs else b"", tuple(marks))


def is_plain(request: Any) -> bool:
    """Whether the request's KV depends on its tokens and the engine's own weights alone."""
    return not (
        getattr(request, "lora_request", None) is not None
        or getattr(request, "mm_features", None)
        or getattr(request, "cache_salt", None)
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "resumable", False)
        or asked_by(request).weights
        or request.prompt_token_ids is None
    )


def _mark(named: Named, feature: Any) -> Mark:
    """The mark of an input: the range of tokens that it replaces, and a digest of its kind and content."""
    assert named.digest is not None
    place = feature.mm_position
    chosen = place.is_embed.tolist() if place.is_embed is not None else None
    described = json.dumps([feature.modality, named.digest.hex(), chosen])
    return Mark(place.offset, place.offset + place.length, sha256(described.encode()).digest())


def _hash_embeddings(embeddings: Any, met: _Met) -> None:
    """Background: hashes a request's prompt embeddings."""
    try:
        met.embeddings = digest_of_tensor(embeddings).hex()
    except Unhashable:
        pass
    finally:
        met.why = "" if met.embeddings else "embeddings"
        met.awaits_embeddings = False
