"""Tracks the weights with which an engine computes, and decides which of its KV other instances may use.

A digest of the model's files names the weights that an engine starts with. Reinforcement learning and online updates
change them in place, and KV of other weights gives wrong tokens. So each key is made with a tag of the weights that
compute its chunk, and the tag changes with the weights:

    start ──begin()──► changing ──end()──► changed, stale ──flushed()──► changed
                 nothing is shared     KV that depends on KV of earlier weights is not shared

A version that the engine names stands for its weights: instances that started with equal weights and name the same
version have the same tag, so they share. Weights without a version, or with one that is not trusted, have a tag that is
drawn at random: they are private to this instance.

Invariant: a tag stands for one set of weights. A version that is named again after a change, although tokens were
computed under it before, is no longer trusted: an update in several parts looks like that when steps run in between,
and so does a version that never changes.

Not thread-safe: one thread at a time may call it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from hashlib import sha256

MOST_LETTERS = 100
"""The most characters of a version that is part of a weights' name unchanged; a longer version is replaced by its
digest."""

log = logging.getLogger("kvdock.weights")


def _draw() -> str:
    return os.urandom(8).hex()


def _short(version: str) -> str:
    """The version, or the digest of a version that is too long."""
    return version if len(version) <= MOST_LETTERS else sha256(version.encode()).hexdigest()


class RunningWeights:
    """`trusts_versions`: the setting `trust_weight_versions`. `draw`: makes a name that is unique. `renamed`: called
    with the new `name` of the weights when it is first used."""

    def __init__(
        self, *, trusts_versions: bool = True, draw: Callable[[], str] = _draw,
        renamed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._trusts_versions, self._draw, self._renamed = trusts_versions, draw, renamed
        self.epoch = 0
        """Rises with each change. Lookups, loads and stores that started in another epoch belong to other weights."""
        self.is_changing = False
        """Whether an update is in progress: parameters may be written at any time."""
        self.is_stale = False
        """Whether the engine's own prefix cache may hold KV of earlier weights."""
        self.doubt = ""
        """Why changes of the weights may go unnoticed; then nothing is shared. "": every change is noticed."""
        self._is_empty = True  # whether the engine's own prefix cache is empty
        self._name: str | None = ""  # None: to be drawn
        self._version = ""  # the version of the present weights
        self._last_version, self._has_computed_as_last = "", False
        self._spoilt: set[str] = set()

    @property
    def may_share(self) -> bool:
        """Whether anything may be looked up, loaded or stored now."""
        return not self.is_changing and not self.doubt

    @property
    def name(self) -> str:
        """The name of the weights: "" for those with which the engine started, "version …", or "private …"."""
        if self._name is None:
            self._name = f"private {self._draw()}"
            log.info("the weights have changed and have no version: KV is shared with no other engine from now on")
            self._renamed(self._name)
        return self._name

    @property
    def tag(self) -> bytes:
        """The part of keys that names the weights, see kvdock.protocol.keys.tagged; b"" for the first weights."""
        return f"weights {self.name}".encode() if self.name else b""

    def begin(self) -> None:
        """A change starts: until end(), parameters may be written at any time."""
        self.changed()
        self.is_changing = True

    def end(self, version: str = "") -> None:
        """The change has ended, or has failed. `version`: the engine's name for the weights now; "": the last version
        that named() has given since begin(), if any."""
        version = version or (self._version if self.is_changing else "")
        self.is_changing = False
        self.changed(version)

    def changed(self, version: str = "") -> None:
        """All weights or some of them are different from now on. `version`: the engine's name for them; "": it has
        none."""
        self.epoch += 1
        self.is_stale, self._name = self.is_stale or not self._is_empty, None
        if not self.is_changing:
            self._version = ""
            if version:
                self._call(version)

    def named(self, version: str) -> None:
        """The engine names the weights that it runs. A version other than the present one means that they have
        changed."""
        if not version or version == self._version:
            return
        if self.is_changing:
            self._version = version
        elif self._version or self._name == "":
            self.changed(version)
        else:
            self._call(version)

    def flushed(self) -> None:
        """The engine's own prefix cache is empty."""
        self.is_stale, self._is_empty = False, True

    def computed(self) -> None:
        """A forward pass or a load was planned: the engine's own prefix cache is not empty any more."""
        self._is_empty = False
        self.is_stale |= self.is_changing
        self._has_computed_as_last |= self._version == self._last_version != ""

    def hear(self, kind: str, version: str = "") -> None:
        """Calls one of the other methods, by the kind of event: "begin", "changed", "end", "named", "flushed",
        "unheard" (`version` says why) or "heard"."""
        match kind:
            case "begin":
                self.begin()
            case "end":
                self.end(version)
            case "named":
                self.named(version)
            case "flushed":
                self.flushed()
            case "unheard":
                self.withhold(version)
            case "heard":
                self.trust_again()
            case _:
                self.changed(version)

    def withhold(self, why: str) -> None:
        """From now on nothing is shared, because changes may go unnoticed."""
        if self.doubt != why:
            self.doubt = why
            log.warning("kvdock shares nothing with this engine: %s", why)

    def trust_again(self) -> None:
        """Undoes withhold(). What happened meanwhile is not known, so the weights count as changed."""
        if self.doubt:
            self.doubt = ""
            self.changed()

    def _call(self, version: str) -> None:
        if version == self._last_version and self._has_computed_as_last and version not in self._spoilt:
            self._spoilt.add(version)
            log.warning(
                "the weights have changed again and are still called version %r: from now on that version does not "
                "say which weights these are, and nothing is shared under it", version,
            )
        if version != self._last_version:
            self._last_version, self._has_computed_as_last = version, False
        self._version = version
        is_trusted = self._trusts_versions and version not in self._spoilt
        self._name = f"version {_short(version)}" if is_trusted else None
        if is_trusted:
            log.info("the weights have changed: KV is shared with engines that run version %r from now on", version)
            self._renamed(self._name or "")
