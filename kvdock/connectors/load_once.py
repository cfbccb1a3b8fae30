"""How long a request waits for a load of another request of this engine, instead of loading the same chunks itself.

Requests that come together often lack the same prefix, such as the samples of one prompt. Without this module, each of
them would load the prefix into blocks of its own. With it, only the first one loads. A request whose next missing chunk
is part of that load waits until the engine's own prefix cache has the chunk, and then loads or computes the rest
itself.

Such a wait is short. It ends when the load has lasted MOST_TIMES as long as loads of its length usually take; then the
request loads the chunks itself, and does not wait again. It ends at once when the load fails or when the request that
loads ends; then the next request to be looked up loads, and the others wait for that load, each for MOST_IN_VAIN failed
loads at most. No request waits for a load that takes much longer than a load of the common prefix.

Not thread-safe: the engine calls it from one thread at a time. Nothing here blocks: a request that waits is looked up
again in a later step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdock.connectors.cost import LoadCost

MOST_TIMES = 4.0
"""How long requests wait for a load, as a multiple of the time that loads of its length usually take."""
SLACK_S = 0.02
"""Seconds that a request waits in addition to MOST_TIMES times the usual time of the load."""
LEAST_STEPS = 2
"""A request waits for at least this many steps, and for those in progress when the load started, because the engine may
not report the load's end sooner."""
FAIR_TIMES = 2.0
"""A request waits for a load if the rest of the load takes at most this many times as long as loading what the two have
in common."""
FIRST_FIXED_S, FIRST_TOKEN_S = 0.05, 2e-5
"""The expected time of a load before the speed of loads is known: a fixed number of seconds, and seconds for each
token."""
MOST_IN_VAIN = 3
"""A request that has waited for this many loads that failed does not wait again."""


@dataclass(eq=False)
class _Load:
    """`keys`: the keys of the load's chunks. `first`: the number of the first one. `step`: the number of the step in
    which the load started. `why_over`: "" while it is in progress."""

    request_id: str
    keys: Sequence[bytes]
    first: int
    local_tokens: int
    hit_tokens: int
    started_s: float
    takes_s: float
    step: int
    why_over: str = ""

    @property
    def end(self) -> int:
        return self.first + len(self.keys)

    def common_end(self, keys: Sequence[bytes], chunk: int) -> int:
        """The end of the chunks that `keys` and the load have in common. The load has the chunk `keys[chunk]`. Equal
        keys mean that all chunks before them are equal, too."""
        low, high = chunk + 1, min(self.end, len(keys))
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] == self.keys[middle - 1 - self.first]:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass
class _Wait:
    """`load`: None after the last load has ended. `wanted_tokens`: how many tokens, counted from token 0, the engine's
    own cache should have at the end of the wait."""

    load: _Load | None = None
    wanted_tokens: int = 0
    started_s: float = 0.0
    in_vain: int = 0
    is_old: bool = False
    """The request waited for a load that fell short: the answer to its own lookup may name the same damaged chunks."""


class LoadOnce:
    """`shares(loader, other, tokens)`: whether the request `other` can use the first `tokens` tokens of the request
    `loader` from the engine's own cache. `whole`: a request can use a load only if it has all chunks of the load, as
    with windows. `lost_tokens`: how many tokens at the end of a cached prefix the engine computes again. `steps_ahead`:
    how many steps are in progress when another one is planned. `count`: called when a wait ends, with its outcome
    ("fulfilled", "failed", "expired", "missed") and its seconds."""

    def __init__(
        self, chunk_tokens: int, clock: Callable[[], float], *, whole: bool, lost_tokens: int = 0, steps_ahead: int = 0,
        shares: Callable[[str, str, int], bool] = lambda loader, other, tokens: True,
        count: Callable[[str, float], None] = lambda how, seconds: None,
    ) -> None:
        self._chunk_tokens, self._clock, self._whole, self._lost_tokens = chunk_tokens, clock, whole, lost_tokens
        self._shares, self._count, self._least_steps = shares, count, steps_ahead + LEAST_STEPS
        self._cost, self._steps = LoadCost(), 0
        self._loads: dict[str, _Load] = {}
        """By request, loads that may still be in progress."""
        self._by_key: dict[bytes, _Load] = {}
        """By key of a chunk, the newest load of it that requests may wait for."""
        self._waits: dict[str, _Wait] = {}

    # ------------------------------------------------------------------ loads

    def started(self, request_id: str, keys: Sequence[bytes], local_tokens: int, hit_tokens: int) -> None:
        """A load of the tokens [local_tokens, hit_tokens) starts, for a request whose chunks have `keys`."""
        self._over(request_id, "failed")
        first, end = local_tokens // self._chunk_tokens, hit_tokens // self._chunk_tokens
        load = _Load(
            request_id, keys[first:end], first, local_tokens, hit_tokens, self._clock(),
            self._takes_s(hit_tokens - local_tokens), self._steps,
        )
        self._loads[request_id] = load
        self._by_key.update(dict.fromkeys(load.keys, load))

    def ended(self, request_id: str, valid_tokens: int | None = None) -> None:
        """The request's load has ended: the tokens up to `valid_tokens` are valid; None: all are. The engine may put
        them into its cache later."""
        load = self._loads.get(request_id)
        if load is not None and valid_tokens is not None and valid_tokens < load.hit_tokens:
            self._over(request_id, "damaged")
        elif load is not None:
            self._cost.loaded(load.hit_tokens - load.local_tokens, self._clock() - load.started_s)

    def shared(self, request_id: str) -> None:
        """The engine's own cache has the tokens that the request has loaded."""
        self._over(request_id, "missed")

    def _over(self, request_id: str, why: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None and not load.why_over:
            self._end_load(load, why)

    def _end_load(self, load: _Load, why: str) -> None:
        """Ends the load: no request waits for it any more."""
        load.why_over = why
        for key in load.keys:
            if self._by_key.get(key) is load:
                del self._by_key[key]

    def step(self) -> None:
        """The engine has planned a step."""
        self._steps += 1

    # ------------------------------------------------------------------ waits

    def waits(
        self, request_id: str, keys_of: Callable[[], Sequence[bytes]], local_tokens: int, least_tokens: int = 1
    ) -> bool:
        """Whether the request waits for another request's load. `local_tokens`: how many of its first tokens the
        engine's own cache has. `keys_of`: returns the keys of its chunks. The request does not wait for fewer than
        `least_tokens` tokens."""
        if self.still_waits(request_id, local_tokens):
            return True
        self._over(request_id, "failed")  # looked up again: the engine has freed its blocks, so its load is lost
        wait = self._waits.get(request_id)
        if wait is not None and wait.load is not None:
            self._end(wait, local_tokens)
        if not self._by_key or (wait is not None and wait.in_vain >= MOST_IN_VAIN):
            return False
        found = self._to_wait_for(request_id, keys_of(), local_tokens, least_tokens)
        if found is None:
            return False
        if wait is None:
            wait = self._waits[request_id] = _Wait()
        wait.load, wait.wanted_tokens = found
        wait.started_s = self._clock()
        return True

    def still_waits(self, request_id: str, local_tokens: int) -> bool:
        """Whether the request waits for a load that is in progress."""
        wait = self._waits.get(request_id)
        if wait is None or wait.load is None or local_tokens >= wait.wanted_tokens:
            return False
        return not self._is_over(wait.load)

    def _to_wait_for(
        self, request_id: str, keys: Sequence[bytes], local_tokens: int, least_tokens: int
    ) -> tuple[_Load, int] | None:
        """A load to wait for, and the number of the request's tokens that it will bring, counted from token 0."""
        chunk = local_tokens // self._chunk_tokens
        load = self._by_key.get(keys[chunk]) if chunk < len(keys) else None
        if load is None or load.request_id == request_id or self._is_over(load):
            return None
        end = load.common_end(keys, chunk)
        if self._whole and end < load.end:
            return None
        wanted = min(end * self._chunk_tokens, load.hit_tokens - self._lost_tokens)
        left_s = load.started_s + load.takes_s - self._clock()
        if wanted - local_tokens < least_tokens or left_s > FAIR_TIMES * self._takes_s(wanted - local_tokens):
            return None
        return (load, wanted) if self._shares(load.request_id, request_id, end * self._chunk_tokens) else None

    def _takes_s(self, tokens: int) -> float:
        seen_s = self._cost.seconds(tokens)
        return seen_s if seen_s is not None else FIRST_FIXED_S + FIRST_TOKEN_S * tokens

    def _is_over(self, load: _Load) -> bool:
        if load.why_over:
            return True
        if self._steps - load.step <= self._least_steps:
            return False
        if self._clock() - load.started_s > MOST_TIMES * load.takes_s + SLACK_S:
            self._end_load(load, "expired")
        return bool(load.why_over)

    def _end(self, wait: _Wait, local_tokens: int) -> None:
        assert wait.load is not None, "no wait"
        why, wait.load = wait.load.why_over, None
        if local_tokens >= wait.wanted_tokens:
            how = "fulfilled"
        elif why in ("expired", "missed"):
            how, wait.in_vain = why, MOST_IN_VAIN
        else:
            how, wait.in_vain, wait.is_old = "failed", wait.in_vain + 1, wait.is_old or why == "damaged"
        self._count(how, self._clock() - wait.started_s)

    def takes_back(self, request_id: str) -> bool:
        """Whether the request's lookup must be sent again. True once after it has waited for a load that fell short."""
        wait = self._waits.get(request_id)
        is_old = wait is not None and wait.is_old
        if wait is not None:
            wait.is_old = False
        return is_old

    def admitted(self, request_id: str) -> None:
        """The engine runs the request. If it has loaded, other requests find its tokens in the engine's own cache."""
        self.shared(request_id)
        wait = self._waits.pop(request_id, None)
        if wait is not None and wait.load is not None:
            self._end(wait, wait.wanted_tokens)

    def forget(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._over(request_id, "failed")
        self._waits.pop(request_id, None)
