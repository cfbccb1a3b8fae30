"""Decides whether a request's hit is worth loading: compares the time to load it with the time to compute its tokens.

A load is expected to take a fixed time plus a time for each token: a least-squares line through the loads that have
ended, in which older loads weigh less and less. So the line follows a bus that others keep busy, or a copy that is
slow. The time to compute follows from the speed of the engine's own steps (PrefillSpeed). Until both are known, no hit
counts as too slow to load.

If no load has ended for PROBE_S, the next hit is loaded even if that is expected to be slow, because the bus may be
free again.

Not thread-safe: the engine calls it from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from kvdock.connectors.errors import SettingError

# --------------------------------------------------------------------------------
# How fast this engine computes prompts, learned from the time between planned steps, or from the time that each step
# took.
#
# Not thread-safe: the engine calls it from one thread at a time.

START_TOKENS_PER_S = 50_000.0
"""The speed that is assumed until this engine's speed is known. It is high, because a fast engine should wait least."""
LARGE_SHARE = 0.5
"""Steps that compute fewer tokens of prompts than this share of the largest step are not counted: a step has a fixed
cost, so they would make the engine look slower than it is."""
SHORT_SHARE = 1 / 16
"""Steps of at most this share of the largest step show what a step takes that computes next to nothing."""
COUNTED_STEPS = 16
"""The speed is the median of that many steps of each kind, because now and then a step takes many times as long, for
example while another program has the processor."""


class PrefillSpeed:
    """How many tokens of prompts this engine computes in a second. `clock`: a monotonic clock, in seconds. `ahead`: how
    many steps are in progress when the engine plans another one. It plans the next step when the oldest one in progress
    has ended."""

    def __init__(self, clock: Callable[[], float], ahead: int = 0) -> None:
        self._clock = clock
        self._largest = 0
        self._large = deque[tuple[int, float]](maxlen=COUNTED_STEPS)
        """The tokens and seconds of large steps."""
        self._short_s = deque[float](maxlen=COUNTED_STEPS)
        self.tokens_per_s = START_TOKENS_PER_S
        """That of large steps as a whole."""
        self._planned_s, self._in_progress = 0.0, deque([(0, 0)], maxlen=ahead + 1)

    def step(self, tokens: int, every: int = 0) -> None:
        """A step is planned, so the oldest one in progress has ended. `tokens`, `every`: as in `ended`."""
        is_full = len(self._in_progress) == self._in_progress.maxlen
        now_s, (ended, ended_every) = self._clock(), self._in_progress[0] if is_full else (0, 0)
        self.ended(ended, now_s - self._planned_s, ended_every)
        self._planned_s = now_s
        self._in_progress.append((tokens, every))

    def ended(self, tokens: int, seconds: float, every: int = 0) -> None:
        """A step has taken `seconds`. `tokens`: how many tokens of prompts it has computed; 0 if it does not show how
        fast the engine computes prompts. `every`: how many tokens it has computed, the others included; 0: none, or it
        is not known."""
        if seconds <= 0:
            return
        if tokens > self._largest / LARGE_SHARE:  # the first large one: the steps before it do not show the speed
            self._large.clear()
        self._largest = max(self._largest, tokens)
        if tokens and tokens >= LARGE_SHARE * self._largest:
            self._large.append((tokens, seconds))
            self.tokens_per_s = 1 / median(took_s / count for count, took_s in self._large)
        elif 0 < every <= SHORT_SHARE * self._largest:
            self._short_s.append(seconds)

    @property
    def is_known(self) -> bool:
        return bool(self._large)

    def beside(self, tokens: int, rest: int) -> float:
        """The speed at which this engine would compute `tokens` tokens of a prompt of which it computes `rest` others
        in any case. A step takes a fixed time and a time for each token; the fixed time counts for those steps alone
        that computing the tokens would have added."""
        if not tokens or not self.is_known:
            return self.tokens_per_s
        # No more than half of a large step: on an engine that mostly decodes, short steps take long, too.
        fixed_s = min(median(self._short_s or [0.0]), median(took_s for _, took_s in self._large) / 2)
        token_s = median(max(took_s - fixed_s, took_s / 2) / count for count, took_s in self._large)
        more_steps = ceil((tokens + rest) / self._largest) - ceil(rest / self._largest)
        return tokens / (more_steps * fixed_s + tokens * token_s)


PROBE_S = 10.0
"""After this many seconds without a load, a hit is loaded to learn how long loads take now."""
LEAST_LOADS = 3
"""The expected time of a load is not known before this many loads have ended."""
KEPT_SHARE = 0.9
"""The weight that older loads keep when a new one is added."""


class LoadCost:
    """The seconds that a load is expected to take, by its number of tokens: a line fitted to the loads that have
    ended."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def loaded(self, tokens: int, seconds: float) -> None:
        self._count += 1
        kept = KEPT_SHARE
        self._weight = kept * self._weight + 1.0
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + tokens * tokens
        self._products = kept * self._products + tokens * seconds

    def seconds(self, tokens: int) -> float | None:
        """None: too few loads have ended."""
        if self._count < LEAST_LOADS:
            return None
        spread = self._weight * self._squares - self._tokens**2
        slope = self._seconds / self._tokens  # the mean: for loads of one length, or a line that starts below zero
        if spread > 1e-6 * self._weight * self._squares:
            fitted = (self._weight * self._products - self._tokens * self._seconds) / spread
            slope = min(max(0.0, fitted), slope)
        fixed = (self._seconds - slope * self._tokens) / self._weight
        return fixed + slope * tokens


class LoadOrCompute:
    """Compares loading with computing. `speed`: the engine's prefill speed. `clock`: a monotonic clock, in seconds."""

    def __init__(self, speed: PrefillSpeed, clock: Callable[[], float]) -> None:
        self._speed, self._clock, self._cost = speed, clock, LoadCost()
        self._newest_s = clock()

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` has ended. It took `seconds`, counted from the moment when it could start."""
        self._cost.loaded(tokens, seconds)
        self._newest_s = self._clock()

    def is_too_slow(self, tokens: int) -> bool:
        """Whether `tokens` are to be computed, because loading them takes longer. After PROBE_S without a load the
        answer is False once, in any case."""
        load_s = self._cost.seconds(tokens)
        if load_s is None or not self._speed.is_known or load_s * self._speed.tokens_per_s <= tokens:
            return False
        if self._clock() - self._newest_s < PROBE_S:
            return True
        self._newest_s = self._clock()
        return False


# --------------------------------------------------------------------------------
# Limits that an operator sets for loads.
#
# The upper limits shorten the prefix that is looked up, not the hit: which parts of a window are leased depends on the
# length of the hit, so a hit that was cut afterwards could not be loaded.

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class LoadLimits:
    """Limits for one load. Raises SettingError for a value out of range."""

    max_load_tokens: int = UNLIMITED
    """The most tokens that one load may have."""
    max_load_share: float = 1.0
    """The largest share of a request's tokens that one load may have."""
    min_load_tokens: int = 0
    """A hit of fewer tokens is computed instead of loaded."""

    def __post_init__(self) -> None:
        low = self.min_load_tokens
        _require(low >= 0, "min_load_tokens", low, "at least 0")
        _require(
            self.max_load_tokens >= low, "max_load_tokens", self.max_load_tokens, f"at least min_load_tokens={low}"
        )
        _require(0.0 <= self.max_load_share <= 1.0, "max_load_share", self.max_load_share, "0.0 to 1.0")

    def shortened(self, tokens: Sequence[int], local_tokens: int) -> Sequence[int]:
        """The prefix of `tokens` that may be looked up."""
        end = local_tokens + min(int(len(tokens) * self.max_load_share), self.max_load_tokens)
        return tokens[:end] if end < len(tokens) else tokens


class LoadChoice:
    """Chooses the hits to load: those that `limits` allow and, by `cost`, are not slower to load than to compute.
    `cost` None: all that the limits allow."""

    def __init__(self, limits: LoadLimits | None = None, cost: LoadOrCompute | None = None) -> None:
        self.limits, self._cost = limits if limits is not None else LoadLimits(), cost
        self._declined: set[str] = set()
        self._accepted: set[str] = set()
        """Requests whose hit `cost` has accepted. It is not asked again, because a later answer could undo the load
        after PROBE_S."""

    def why_not(self, request_id: str, tokens: int) -> str:
        """Why the request's hit of `tokens` is not loaded: "short" (too few tokens), "dear" (loading takes longer than
        computing), or "" (the hit is loaded)."""
        if tokens < self.limits.min_load_tokens:
            return "short"
        if self._cost is None or request_id in self._accepted:
            return ""
        if self._cost.is_too_slow(tokens):
            return "dear"
        self._accepted.add(request_id)
        return ""

    def loaded(self, tokens: int, seconds: float) -> None:
        """See LoadOrCompute.loaded."""
        if self._cost is not None:
            self._cost.loaded(tokens, seconds)

    def decline(self, request_id: str) -> None:
        """Nothing is loaded for the request until it is forgotten."""
        self._declined.add(request_id)

    def is_declined(self, request_id: str) -> bool:
        return request_id in self._declined

    def forget(self, request_id: str) -> None:
        self._declined.discard(request_id)
        self._accepted.discard(request_id)


def _require(ok: bool, name: str, found: object, wanted: str) -> None:
    if not ok:
        raise SettingError(f"{name}: found {found!r}, wanted {wanted}")
