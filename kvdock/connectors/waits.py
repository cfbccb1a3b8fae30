"""How long requests wait: for the server's answer (Patience), for chunks that another engine computes and stores
(ComputeOnce), and for chunks that a lower tier loads (AwaitTiers). Questions may be sent before the engine looks a
request up (EarlyQuestions)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from kvdock.connectors.cost import LoadCost, PrefillSpeed
from kvdock.protocol.schemas import BeingStored, PendingTokens

# --------------------------------------------------------------------------- waiting for a load of another request

# How long a request waits for a load of another request of this engine, instead of loading the same chunks itself.
#
# Requests that come together often lack the same prefix, such as the samples of one prompt. Without this module, each
# of them would load the prefix into blocks of its own. With it, only the first one loads. A request whose next missing
# chunk is part of that load waits until the engine's own prefix cache has the chunk, and then loads or computes the
# rest itself.
#
# Such a wait is short. It ends when the load has lasted MOST_TIMES as long as loads of its length usually take; then
# the request loads the chunks itself, and does not wait again. It ends at once when the load fails or when the request
# that loads ends; then the next request to be looked up loads, and the others wait for that load, each for MOST_IN_VAIN
# failed loads at most. No request waits for a load that takes much longer than a load of the common prefix.
#
# Not thread-safe: the engine calls it from one thread at a time. Nothing here blocks: a request that waits is looked up
# again in a later step.

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
class _LoadWait:
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
        self._waits: dict[str, _LoadWait] = {}

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
            wait = self._waits[request_id] = _LoadWait()
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

    def _end(self, wait: _LoadWait, local_tokens: int) -> None:
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


# --------------------------------------------------------------------------------
# How long the engine's thread waits for the server's answer to a lookup.
#
# A request whose lookup is Pending is looked up again in the engine's next step: some 300 ms later under load, while
# the answer takes less than one millisecond. So it is worth waiting for an answer that is about to come, and for no
# other.
#
# An answer that is later than `wait_s` opens the breaker: from then on no lookup waits, and one without an answer is a
# miss, because a slow server must not hold up requests that have nothing to load. The next answer in time closes the
# breaker. Whatever the server does, one step waits at most `wait_s`, or a tenth of the time that steps take where that
# is longer. While the engine computes nothing, a wait delays no other request, so an answer is late only
# after IDLE_WAITS times `wait_s`, but never later than a call to the server may take.
#
# Threads: the engine's thread waits, and a background thread calls answered(). Both set the breaker, which is one flag.

IDLE_WAITS = 10
"""While the engine computes nothing, an answer may take this many times `wait_s`: a miss costs more than the wait."""
STEP_SHARE = 0.1
"""The most that all waits of one step may take together, as a share of the mean time of a step, if that is more than
`wait_s`."""
LONGEST_STEP_S = 1.0
"""A longer time between two steps is not the time of a step: it counts as this long."""
TURN_S = 0.001
"""How long a lookup waits for an answer that is already late: the thread that receives it may not have run yet."""
NEWEST_STEP = 0.2
"""Weight of the newest step in the mean time of a step."""


@dataclass
class SentQuestion:
    """`answered`: done when the answer has come. `asked_s`: the time at which the question was passed to the thread
    that sends it. `epoch`: that of the lookup. `was_late`: a lookup was a miss because the answer was late. `was_read`:
    a lookup has read the answer."""

    answered: Future[None]
    asked_s: float
    epoch: int = 0
    was_late: bool = False
    was_read: bool = False


class Patience:
    """`wait_s`: after how many seconds an answer is late. `clock`: a monotonic clock, in seconds. `most_s`: the longest
    that an answer may take, also in an idle engine: the timeout of a call to the server."""

    def __init__(self, wait_s: float, clock: Callable[[], float], most_s: float = math.inf) -> None:
        self._wait_s, self._clock, self._most_s = wait_s, clock, most_s
        self._left_s = wait_s
        self._answered_s = 0.0
        self._step_s = 0.0
        self._started_s: float | None = None
        self._is_idle = True
        self.is_open = False
        """The breaker: an answer was late when a lookup wanted it, and none has come in time since."""

    def step(self, is_idle: bool) -> None:
        """A step has been planned. `is_idle`: it computes nothing, so the time that it takes does not count."""
        now_s = self._clock()
        if self._started_s is not None:
            took_s = min(now_s - self._started_s, LONGEST_STEP_S)
            self._step_s += NEWEST_STEP * (took_s - self._step_s)
        self._started_s, self._is_idle = None if is_idle else now_s, is_idle
        self._left_s = max(self._wait_s, STEP_SHARE * self._step_s)

    def wait(self, question: SentQuestion) -> bool:
        """Whether the question is answered already, or within the time that this step may still wait."""
        has_waited = False
        while not question.answered.done():
            started_s = self._clock()
            # One question is sent at a time: this one was sent after the answer to the one before.
            late_s = max(question.asked_s, self._answered_s) + self._late_after_s
            if started_s >= late_s and (has_waited or not self._wait_s):
                self.is_open = True
            if self.is_open or self._left_s <= 0:
                return False
            wait([question.answered], min(self._left_s, max(late_s - started_s, TURN_S)))
            self._left_s -= self._clock() - started_s
            has_waited = True
        return True

    @property
    def _late_after_s(self) -> float:
        return min(self._wait_s * (IDLE_WAITS if self._is_idle else 1), self._most_s)

    def spend(self, work: Future[None]) -> bool:
        """Whether other work has ended already, or ends within the time that this step may still wait. Does not open
        the breaker."""
        if not work.done() and self._left_s > 0:
            started_s = self._clock()
            wait([work], min(self._left_s, self._wait_s))
            self._left_s -= self._clock() - started_s
        return work.done()

    def answered(self, took_s: float) -> None:
        """Background: the server has answered after `took_s` seconds."""
        self._answered_s = self._clock()
        if took_s <= self._late_after_s:
            self.is_open = False


# --------------------------------------------------------------------------------
# Sends the questions of some requests that wait in an engine before the engine looks them up.
#
# The chunks that are found for a waiting request are leased, so they cannot be evicted. Few leases are enough, because
# an engine admits few requests in one step, and many would keep the pool full of chunks that are needed much later:
# questions are sent for the first MOST_EARLY requests that arrived, and for the next one when one of these has been
# admitted or has ended.

MOST_EARLY = 4


class EarlyQuestions:
    """`ask`: sends the question of a request. left() must be called for every request that arrived."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._waiting: dict[str, None] = {}
        """Requests without a question yet, in the order of their arrival."""
        self._open: set[str] = set()
        """Requests whose question was sent, early or by the engine's own lookup."""

    def arrived(self, request_id: str) -> None:
        """May be called more than once for a request."""
        if request_id not in self._open:
            self._waiting.setdefault(request_id)
            self._ask_next()

    def asked(self, request_id: str) -> None:
        """The engine has looked the request up, which it may do in any order."""
        self._waiting.pop(request_id, None)
        self._open.add(request_id)

    def left(self, request_id: str) -> None:
        """The request was admitted, or has ended."""
        self._waiting.pop(request_id, None)
        self._open.discard(request_id)
        self._ask_next()

    def _ask_next(self) -> None:
        while self._waiting and len(self._open) < MOST_EARLY:
            request_id = next(iter(self._waiting))
            self.asked(request_id)
            self._ask(request_id)


# --------------------------------------------------------------------------------
# Waits that last several steps. Each has a time limit. Once a wait of a request has ended, the request does not start
# another one until it is forgotten.
#
# Not thread-safe: the engine calls it from one thread at a time. Nothing here blocks: a request that waits is looked up
# again in a later step.

ASK_S = 0.02
"""While a request waits, its question is sent again this long after the last time."""


@dataclass
class _Wait:
    started_s: float
    tokens: int
    """How long the hit is expected to be, counted from token 0."""
    has_ended: bool = False


W = TypeVar("W", bound=_Wait)


class _Waiting(Generic[W]):
    """The waits of one kind, by request. `count`: called when a wait ends, with its outcome and its seconds."""

    def __init__(self, clock: Callable[[], float], count: Callable[[str, float], None]) -> None:
        self._clock, self._count = clock, count
        self._waits: dict[str, W] = {}

    def is_waiting(self, request_id: str) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and not wait.has_ended

    def _end(self, wait: W, how: str) -> None:
        wait.has_ended = True
        self._count(how, self._clock() - wait.started_s)

    def forget(self, request_id: str) -> None:
        """The request ended, was aborted or preempted."""
        self._waits.pop(request_id, None)


# --------------------------------------------------------------------------------
# How long a request waits for chunks that another engine computes and stores, instead of computing them as well.
#
# A lookup's answer says how much of the request's prefix other sessions, whose members are all alive, are storing. It
# pays to wait for them as long as that takes less than computing: so a request waits at most a share of the time in
# which this engine would compute the missing tokens, at the speed of its own steps. The wait ends earlier if nothing
# more was stored for half of that time, or if no session stores the prefix any more.

STALL_SHARE = 0.5
"""How long a request waits while nothing more is stored, as a share of the time that it may wait at most."""


@dataclass
class _StoreWait(_Wait):
    longest_s: float = 0.0
    committed: int = 0
    progress_s: float = 0.0
    """When the last progress was seen."""


class ComputeOnce(_Waiting[_StoreWait]):
    """A request may wait for `share` times the time in which this engine computes the missing tokens. Outcomes:
    "fulfilled", "withdrawn", "stalled", "expired"."""

    def __init__(
        self, share: float, speed: PrefillSpeed, clock: Callable[[], float], count: Callable[[str, float], None]
    ) -> None:
        super().__init__(clock, count)
        self._share, self._speed = share, speed

    def longest_s(self, tokens: int) -> float:
        """The seconds that a request which lacks `tokens` tokens may wait."""
        return self._share * tokens / self._speed.tokens_per_s

    def waits(self, request_id: str, stored: BeingStored | None, hit_tokens: int, local_tokens: int) -> bool:
        """Whether the request waits, now that its newest answer has `stored` and `hit_tokens`. Its time starts
        now, not when the question was sent."""
        now_s, wait = self._clock(), self._waits.get(request_id)
        if wait is None:
            if stored is None:
                return False
            longest_s = self.longest_s(stored.tokens - max(stored.committed, local_tokens))
            if longest_s < 2 * ASK_S:
                return False  # the wait would be over before the second answer
            self._waits[request_id] = _StoreWait(
                now_s, stored.tokens, longest_s=longest_s, committed=stored.committed, progress_s=now_s
            )
            return True
        if wait.has_ended:
            return False
        if stored is None:
            self._end(wait, "fulfilled" if hit_tokens >= wait.tokens else "withdrawn")
            return False
        if stored.committed > wait.committed:
            wait.committed, wait.progress_s = stored.committed, now_s
        wait.tokens = max(wait.tokens, stored.tokens)
        return not self.is_over(request_id)

    def is_over(self, request_id: str) -> bool:
        """Whether the request has waited too long: its wait ends."""
        wait = self._waits[request_id]
        now_s = self._clock()
        if now_s - wait.started_s > wait.longest_s:
            self._end(wait, "expired")
        elif now_s - wait.progress_s > STALL_SHARE * wait.longest_s:
            self._end(wait, "stalled")
        return wait.has_ended


# --------------------------------------------------------------------------------
# How long a request waits for chunks that a lower tier is loading into the pool, instead of computing them.
#
# A lookup sends the terms of its request to the server: how long the request may wait, and how fast this engine
# computes. If that speed is known, the request waits no longer than computing the missing tokens would take. The mover
# decides whether the wait is worth it (kvdock/protocol/mover_schemas.py). The answer says how many tokens are expected,
# and by when. The request waits until all of them are in the pool, until no more will come, or until its time is over;
# then it uses what was found.

LEAST_S = 0.01
"""The shortest time limit of a wait: a shorter wait would be over before the next step reads its answer."""


class WaitTerms(NamedTuple):
    """How long a request may wait for chunks that lower tiers load, and how fast its engine would compute them."""

    wait_s: float
    """0: the request does not wait."""
    tokens_per_s: float
    """0: not known."""


NO_WAIT = WaitTerms(0.0, 0.0)


@dataclass
class _TierWait(_Wait):
    until_s: float = 0.0
    server_until_s: float = 0.0
    """Before this time, an answer without `pending` means that no more will come; after it, that the request's time at
    the server is over."""


class AwaitTiers(_Waiting[_TierWait]):
    """`most_s`: the longest wait. `speed`: this engine's prefill speed; None: not known. Outcomes: "fulfilled",
    "shortened", "expired"."""

    def __init__(
        self, most_s: float, speed: PrefillSpeed | None, clock: Callable[[], float],
        count: Callable[[str, float], None] = lambda how, seconds: None,
    ) -> None:
        super().__init__(clock, count)
        self._most_s, self._speed = most_s, speed

    def terms(self, missing_tokens: int) -> WaitTerms:
        """The terms of a request that lacks at most `missing_tokens` tokens."""
        tokens_per_s = self._speed.tokens_per_s if self._speed is not None else 0.0
        wait_s = min(self._most_s, missing_tokens / tokens_per_s) if tokens_per_s > 0 else self._most_s
        return WaitTerms(wait_s, tokens_per_s) if wait_s >= LEAST_S else NO_WAIT

    def waits(
        self, request_id: str, pending: PendingTokens | None, hit_tokens: int, local_tokens: int, asked_s: float
    ) -> bool:
        """Whether the request waits, now that its newest answer has `pending` and `hit_tokens`. Its time starts
        now; its time at the server started when the question was sent, at `asked_s`."""
        wait = self._waits.get(request_id)
        if wait is None:
            if pending is None or pending.tokens <= max(hit_tokens, local_tokens):
                return False
            terms = self.terms(pending.tokens - max(hit_tokens, local_tokens))
            if terms is NO_WAIT:
                return False
            now_s = self._clock()
            self._waits[request_id] = _TierWait(
                now_s, pending.tokens, until_s=now_s + terms.wait_s, server_until_s=asked_s + terms.wait_s
            )
            return True
        if wait.has_ended:
            return False
        if pending is None:
            is_over = self._clock() > wait.server_until_s
            self._end(wait, "fulfilled" if hit_tokens >= wait.tokens else "expired" if is_over else "shortened")
            return False
        wait.tokens = pending.tokens
        return not self.is_over(request_id)

    def is_over(self, request_id: str) -> bool:
        """Whether the request has waited too long: its wait ends."""
        wait = self._waits[request_id]
        if not wait.has_ended and self._clock() > wait.until_s:
            self._end(wait, "expired")
        return wait.has_ended


# --------------------------------------------------------------------------------
# All waits of an engine's requests.

class Expected(NamedTuple):
    """The chunks that may still come for a request, by the newest answer to its lookup. None: no more will come."""

    being_stored: BeingStored | None = None
    """Chunks that other engines store."""
    pending: PendingTokens | None = None
    """Chunks that lower tiers load."""


NOTHING = Expected()


@dataclass
class Waits:
    """The kinds of waits that an engine's requests have; None: they have no such wait. `clock`: a monotonic clock, in
    seconds."""

    patience: Patience | None = None
    """For the server's answer. None: a lookup is Pending until the answer is there."""
    once: ComputeOnce | None = None
    """For chunks that other engines compute and store."""
    tiers: AwaitTiers | None = None
    """For chunks that lower tiers load."""
    loads: LoadOnce | None = None
    """For chunks that other requests of this engine load."""
    clock: Callable[[], float] = time.perf_counter

    def terms(self, missing_tokens: int) -> WaitTerms:
        """See AwaitTiers.terms."""
        return self.tiers.terms(missing_tokens) if self.tiers is not None else NO_WAIT

    def are_for(self, expected: Expected) -> bool:
        """Whether requests of this engine wait for chunks that are `expected`."""
        stored = expected.being_stored if self.once is not None else None
        return stored is not None or (self.tiers is not None and expected.pending is not None)

    def is_waiting(self, request_id: str) -> bool:
        """Whether the request waits for more than what was found, and has time left."""
        waits = [one for one in (self.once, self.tiers) if one is not None and one.is_waiting(request_id)]
        over = [one.is_over(request_id) for one in waits]  # calls each, because is_over() also ends a wait
        return not all(over)

    def for_more(
        self, request_id: str, expected: Expected, hit_tokens: int, local_tokens: int, asked_s: float
    ) -> bool:
        """Whether the request waits for more than the `hit_tokens` that were found, now that an answer with `expected`
        was read. `asked_s`: when the question of this answer was sent."""
        is_waiting = False
        if self.once is not None:
            is_waiting = self.once.waits(request_id, expected.being_stored, hit_tokens, local_tokens)
        if self.tiers is not None:
            is_waiting |= self.tiers.waits(request_id, expected.pending, hit_tokens, local_tokens, asked_s)
        return is_waiting

    def forget(self, request_id: str) -> bool:
        """The request ended, was aborted or preempted. Returns whether it was waiting for lower tiers."""
        was_waiting = self.tiers is not None and self.tiers.is_waiting(request_id)
        for one in (self.once, self.tiers, self.loads):
            if one is not None:
                one.forget(request_id)
        return was_waiting
