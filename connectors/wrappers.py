"""What operators put around a connector: limits on what is loaded, and requests that are left out.

Each wrapper is a Connector around a Connector, so they stack in any order. Wrapper forwards every verb; a wrapper
overrides what it changes and calls super() for the rest. Invariants: `lookup` never answers less than the local
tokens nor a length that the inner connector would not serve, for a window's parts are leased for one length;
nothing that is declined stays leased; `poll` and `close` always go through, whatever was declined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvdock.connectors.interface import BlocksRead, Connector, GroupBlocks, Progress


class WrapperError(ValueError):
    """A setting outside its range or of no known name; says what was found and what is wanted."""


class Wrapper:
    """Forwards every verb of the protocol."""

    def __init__(self, inner: Connector) -> None:
        self.inner = inner

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        return self.inner.lookup(request_id, token_ids, local_tokens)

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        self.inner.begin_load(request_id, block_ids, local_tokens, hit_tokens)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        return self.inner.begin_store(request_id, token_ids, block_ids, computed_tokens)

    def poll(self, timeout_s: float = 0.0) -> Progress:
        return self.inner.poll(timeout_s)

    def finished(self, request_id: str) -> None:
        self.inner.finished(request_id)

    def close(self) -> None:
        self.inner.close()


class HitLimit(Wrapper):
    """Lets a request load at most `max_tokens`, and at most `max_share` of its tokens, each time it is admitted.

    It asks for a shorter prefix instead of shortening the answer, so the answer holds for every group."""

    def __init__(self, inner: Connector, *, max_tokens: int | None = None, max_share: float = 1.0) -> None:
        super().__init__(inner)
        if max_tokens is not None:
            _require(max_tokens >= 0, "max_tokens", max_tokens, "None or at least 0")
        _require(0.0 <= max_share <= 1.0, "max_share", max_share, "0.0 to 1.0")
        self.max_tokens, self.max_share = max_tokens, max_share

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        limit = int(len(token_ids) * self.max_share)
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens)
        end = local_tokens + limit
        return super().lookup(request_id, token_ids[:end] if end < len(token_ids) else token_ids, local_tokens)


class MinimumLoad(Wrapper):
    """Declines loads of fewer than `min_tokens`: computing them is cheaper. A request is declined once, until
    `finished`."""

    def __init__(self, inner: Connector, *, min_tokens: int) -> None:
        super().__init__(inner)
        _require(min_tokens >= 0, "min_tokens", min_tokens, "at least 0")
        self.min_tokens = min_tokens
        self._declined: set[str] = set()

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        if request_id in self._declined:
            return local_tokens
        found = super().lookup(request_id, token_ids, local_tokens)
        if found is None or found == local_tokens or found - local_tokens >= self.min_tokens:
            return found
        self._declined.add(request_id)
        super().finished(request_id)  # the one verb that gives up the lease of a lookup
        return local_tokens

    def finished(self, request_id: str) -> None:
        self._declined.discard(request_id)
        super().finished(request_id)


@dataclass(frozen=True)
class Use:
    """What a request uses the connector for."""

    load: bool = True
    store: bool = True


class OptOut(Wrapper):
    """Leaves requests out. `use(request_id)` is asked at each lookup and store, on the engine's thread; its answer for
    a request must not change before `finished`."""

    def __init__(self, inner: Connector, use: Callable[[str], Use]) -> None:
        super().__init__(inner)
        self.use = use

    def lookup(self, request_id: str, token_ids: Sequence[int], local_tokens: int) -> int | None:
        if not self.use(request_id).load:
            return local_tokens
        return super().lookup(request_id, token_ids, local_tokens)

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        if not self.use(request_id).store:
            return ()
        return super().begin_store(request_id, token_ids, block_ids, computed_tokens)


@dataclass(frozen=True)
class LoadLimits:
    """Settings for `limited`. Raises WrapperError for a value outside its range."""

    max_load_tokens: int | None = None
    max_load_share: float = 1.0
    min_load_tokens: int = 0

    def __post_init__(self) -> None:
        low, high = self.min_load_tokens, self.max_load_tokens
        _require(low >= 0, "min_load_tokens", low, "at least 0")
        _require(high is None or high >= low, "max_load_tokens", high, f"None or at least min_load_tokens={low}")
        _require(0.0 <= self.max_load_share <= 1.0, "max_load_share", self.max_load_share, "0.0 to 1.0")

    @classmethod
    def of(cls, settings: Mapping[str, int | float | None]) -> LoadLimits:
        """From a file or flags. WrapperError names an unknown setting, or one of another type."""
        tokens: dict[str, int | None] = {}
        share = 1.0
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in settings.items():
            _require(name in known, "setting", name, f"one of {known}")
            if name == "max_load_share":
                _require(value is not None and not isinstance(value, bool), name, value, "a number")
                share = float(value or 0)
            else:
                whole = isinstance(value, int) and not isinstance(value, bool)
                _require(whole or (value is None and name == "max_load_tokens"), name, value, "a whole number")
                tokens[name] = None if value is None else int(value)
        return cls(tokens.get("max_load_tokens"), share, tokens.get("min_load_tokens") or 0)


def limited(inner: Connector, limits: LoadLimits) -> Connector:
    """`inner` behind the wrappers that `limits` ask for; itself when they ask for none."""
    if limits.max_load_tokens is not None or limits.max_load_share < 1.0:
        inner = HitLimit(inner, max_tokens=limits.max_load_tokens, max_share=limits.max_load_share)
    if limits.min_load_tokens > 0:
        inner = MinimumLoad(inner, min_tokens=limits.min_load_tokens)
    return inner


def _require(ok: bool, name: str, found: object, wanted: str) -> None:
    if not ok:
        raise WrapperError(f"{name}: found {found!r}, wanted {wanted}")
