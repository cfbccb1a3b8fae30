"""Keeps the outcomes of requests, and how much was copied, until a heartbeat sends them. People read them at the
server; nothing else depends on them.

While outcomes wait, heartbeats follow one another. The buffer holds the newest MOST_KEPT outcomes; the others are
counted. If a server does not accept outcomes, none is sent from then on, so that heartbeats still have their effect.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvdock.connectors.cost import PrefillSpeed
from kvdock.connectors.interface import Hit, LoadDone, LookupResult, Miss
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.outcomes import MAX_OUTCOMES, Copied, Outcome
from kvdock.protocol.schemas import Heartbeat, HeartbeatAnswer
from kvdock.protocol.wire_types import MAX_NAME

log = logging.getLogger("kvdock.connector")

MOST_KEPT = 8192
"""Outcomes that may wait for a server: those of some minutes of a busy engine."""
LONG_TOKENS = 1024
"""The rest of a prompt behind a hit is long if it has at least this many tokens."""


class OutcomeBuffer:
    """The outcomes and copies that were not sent yet. The thread that sends heartbeats calls `ceiling_bytes_per_s`
    once, before it sends the first copies. Thread-safe."""

    def __init__(self) -> None:
        self.ceiling_bytes_per_s: Callable[[], float] = lambda: 0.0
        self._ceiling: float | None = None
        self._copied = Copied()
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque(maxlen=MOST_KEPT)
        self._dropped = 0
        self._is_refused = False
        self._last = time.time_ns()
        """The number of the newest outcome. Another process that takes the place of this one goes on above it."""

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            if self._is_refused:
                return
            if not 0 < len(outcome.request) <= MAX_NAME:
                self._dropped += 1
                return
            self._dropped += len(self._outcomes) == MOST_KEPT
            self._last += 1
            self._outcomes.append(msgspec.structs.replace(outcome, number=self._last))

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """A load has copied `size_bytes` in `seconds`."""
        with self._lock:
            self._copied.load_bytes += size_bytes
            self._copied.load_us += round(seconds * 1e6)

    def stored(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._copied.store_bytes += size_bytes
            self._copied.store_us += round(seconds * 1e6)

    def _take_copied(self) -> Copied | None:
        with self._lock:
            copied, self._copied = self._copied, Copied()
        if not copied.load_bytes and not copied.store_bytes:
            return None
        if self._ceiling is None:
            self._ceiling = self.ceiling_bytes_per_s()
        copied.ceiling_bytes_per_s = self._ceiling
        return copied

    @property
    def has_more(self) -> bool:
        """Whether outcomes wait for another heartbeat."""
        return bool(self._outcomes)

    def send_with(self, beat: Heartbeat, send: Callable[[Heartbeat], HeartbeatAnswer]) -> HeartbeatAnswer:
        """Sends a heartbeat with the oldest outcomes in the buffer, at most MAX_OUTCOMES, and with all copies. Raises
        what `send` raises; if the server has not answered, the next heartbeat has the same again."""
        beat.copied = None if self._is_refused else self._take_copied()
        with self._lock:
            count = min(MAX_OUTCOMES, len(self._outcomes))
            beat.outcomes, beat.outcomes_dropped = [self._outcomes.popleft() for _ in range(count)], self._dropped
            self._dropped = 0
        try:
            return send(beat)
        except ServerUnavailable:
            self._put_back(beat)
            raise
        except ApiError as error:
            if error.code == "invalid_body" and (
                beat.outcomes or beat.outcomes_dropped or beat.copied
            ):
                log.warning(
                    "the server does not take the outcomes of requests and copies, so none is sent from now on: %s",
                    error,
                )
                self._refuse()
            raise

    def send_rest(self, beat: Heartbeat, send: Callable[[Heartbeat], HeartbeatAnswer]) -> None:
        """Sends heartbeats while anything is left to report. Raises what `send` raises."""
        while not self._is_refused and (
            self._outcomes or self._dropped or self._copied.load_bytes or self._copied.store_bytes
        ):
            self.send_with(beat, send)

    def _put_back(self, beat: Heartbeat) -> None:
        with self._lock:
            every = [*beat.outcomes, *self._outcomes]
            self._outcomes.clear()
            self._outcomes.extend(every)
            self._dropped += beat.outcomes_dropped + len(every) - len(self._outcomes)
            if beat.copied is not None:
                self._copied.load_bytes += beat.copied.load_bytes
                self._copied.load_us += beat.copied.load_us
                self._copied.store_bytes += beat.copied.store_bytes
                self._copied.store_us += beat.copied.store_us

    def _refuse(self) -> None:
        with self._lock:
            self._is_refused = True
            self._outcomes.clear()
            self._dropped = 0


# --------------------------------------------------------------------------------
# The outcome of each request, for all engines: how many tokens the server had, how many were loaded, how long the load
# took, and why not more were loaded. It is sent to the server after the request has ended
# (kvdock/protocol/outcomes.py).
#
# Not thread-safe: the engine calls it from one thread at a time.

@dataclass(slots=True)
class _Story:
    """The state of a request's outcome. `cached_tokens`: the tokens that the engine's own cache has now. `epoch`: that
    of its last lookup. `found_tokens`: the prefix that the server had, by the last answer. `local_tokens`,
    `loaded_tokens`: what the engine's own cache had and what was loaded when the request was first admitted.
    `reloaded_tokens`: what was loaded when it came back after preemptions. `loading_tokens`: those of the load in
    progress. `load_s`, `copy_s`: the seconds of all loads that have ended; None: none has, or the seconds of a copy are
    not known. `why`: why not more was loaded; "": there is no reason."""

    cached_tokens: int = 0
    epoch: int = 0
    is_admitted: bool = False
    found_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    reloaded_tokens: int = 0
    loading_tokens: int = 0
    loaded_bytes: int = 0
    started_s: float = 0.0
    load_s: float | None = None
    copy_s: float | None = None
    why: str = ""
    is_first: bool = True
    """The load in progress, or the last one, is that of the first admission."""


class RequestOutcomes:
    """`report`: called with the outcome of each request that has ended. `speed`: the engine's prefill speed. `clock`: a
    monotonic clock, in seconds. `epoch_of`: the epoch of a request's last lookup; 0: it was not looked up."""

    def __init__(
        self, report: Callable[[Outcome], None], speed: PrefillSpeed | None = None,
        clock: Callable[[], float] = time.perf_counter, *, epoch_of: Callable[[str], int] = lambda request_id: 0,
    ) -> None:
        self._report, self._speed, self._clock, self._epoch_of = report, speed, clock, epoch_of
        self._stories: dict[str, _Story] = {}

    def looked_up(self, request_id: str, local_tokens: int) -> None:
        """The engine's own cache has the first `local_tokens` of the request."""
        self._of(request_id).cached_tokens = local_tokens

    def found(self, request_id: str, tokens: int) -> None:
        """The server has the first `tokens` tokens of the request."""
        story = self._of(request_id)
        if not story.is_admitted:
            story.found_tokens = tokens

    def held_back(self, request_id: str, why: str) -> None:
        """Fewer tokens than found, or none, are loaded, because of `why`. A later reason replaces it, until the request
        is admitted."""
        story = self._of(request_id)
        if not story.is_admitted:
            story.why = why

    def declined(self, request_id: str, why: str, tokens: int) -> None:
        """The server has the first `tokens` tokens, and they are computed all the same."""
        self.found(request_id, tokens)
        self.held_back(request_id, f"declined_{why}")

    def admitted(self, request_id: str, tokens: int) -> None:
        """A load of `tokens` tokens starts; 0: the request runs without one. Only the first admission divides the
        prompt: what the engine has of a request that comes back, the request may have computed itself."""
        story = self._of(request_id)
        story.is_first = not story.is_admitted
        if story.is_first:
            story.local_tokens, story.epoch = story.cached_tokens, self._epoch_of(request_id)
        story.is_admitted, story.loading_tokens = True, tokens
        if story.is_first:
            story.loaded_tokens = tokens
        else:
            story.reloaded_tokens += tokens
        if tokens:
            story.started_s = self._clock()
            if story.is_first:
                story.why = ""

    def loading(self, request_id: str, size_bytes: int) -> None:
        """The load that has started copies `size_bytes`, over all ranks."""
        self._of(request_id).loaded_bytes += size_bytes

    def loaded(self, request_id: str, copy_s: float | None, took_s: float | None = None) -> None:
        """The request's load has ended and is complete. `copy_s`: the seconds that its copies took on the slowest rank;
        None: not known. `took_s`: the seconds that the load took; None: those since the request was admitted."""
        story = self._stories.get(request_id)
        if story is not None and story.loading_tokens:  # else the request has ended
            self._load_ended(story, copy_s, took_s)

    def failed(self, request_id: str, valid_tokens: int) -> None:
        """A load fell short: the tokens behind `valid_tokens` were not loaded. May be called for each rank."""
        story = self._stories.get(request_id)
        if story is None:
            return
        if story.is_first:
            story.why = "load_failed"
            story.loaded_tokens = max(0, min(story.loaded_tokens, valid_tokens - story.local_tokens))
        elif story.loading_tokens:
            story.reloaded_tokens -= story.loading_tokens - max(0, valid_tokens - story.cached_tokens)
        if story.loading_tokens:
            self._load_ended(story, None)

    def _load_ended(self, story: _Story, copy_s: float | None, took_s: float | None = None) -> None:
        story.load_s = (story.load_s or 0.0) + (self._clock() - story.started_s if took_s is None else took_s)
        story.copy_s = None if copy_s is None else (story.copy_s or 0.0) + copy_s
        story.loading_tokens = 0

    def shows_speed(self, request_id: str, tokens: int) -> bool:
        """Whether a step that computes `tokens` of the request's prompt shows how fast the engine computes long
        prompts. The rest of a prompt behind a hit does not, unless it is long itself: a step has a fixed cost."""
        story = self._stories.get(request_id)
        has_hit = story is not None and story.local_tokens + story.loaded_tokens + story.loading_tokens > 0
        return tokens >= LONG_TOKENS or not has_hit

    def ended(self, request_id: str, prompt_tokens: int, *, has_run: bool = True) -> Outcome | None:
        """Reports the request's outcome and returns it. None: the request is not known, its outcome was reported
        before, or it ended before it ran: before it was admitted or, unless it `has_run`, during its first load."""
        story = self._stories.pop(request_id, None)
        if story is None or not story.is_admitted:
            return None
        if story.loading_tokens and not has_run:
            if story.is_first:
                return None
            story.reloaded_tokens -= story.loading_tokens  # it ran before it was preempted
        speed = 0.0
        if self._speed is not None and self._speed.is_known:
            rest = prompt_tokens - story.local_tokens - story.loaded_tokens
            speed = self._speed.beside(story.loaded_tokens, max(0, rest))
        outcome = Outcome(
            request=request_id, epoch=story.epoch, prompt_tokens=prompt_tokens, local_tokens=story.local_tokens,
            found_tokens=story.found_tokens, loaded_tokens=story.loaded_tokens, reloaded_tokens=story.reloaded_tokens,
            why=story.why, loaded_bytes=story.loaded_bytes, load_us=_microseconds(story.load_s),
            copy_us=_microseconds(story.copy_s), prefill_tokens_per_s=speed,
        )
        self._report(outcome)
        return outcome

    def forget(self, request_id: str) -> None:
        """The request has no outcome."""
        self._stories.pop(request_id, None)

    def _of(self, request_id: str) -> _Story:
        story = self._stories.get(request_id)
        if story is None:
            story = self._stories[request_id] = _Story()
        return story


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, round(seconds * 1e6))


# --------------------------------------------------------------------------------
# The outcomes of the requests of an engine that calls the verbs of interface.py, and how fast it computes prompts.
#
# The time of a step is the time from the end of one poll to the last begin_store before the next poll, because an
# engine polls before it computes and stores after it has computed.
#
# Not thread-safe: only the engine's thread calls it.

class EngineOutcomes(RequestOutcomes):
    """The connector calls each method but `step` in its own method of the same name, and `step` in `poll`. `epoch_of`:
    as in RequestOutcomes."""

    def __init__(
        self, report: Callable[[Outcome], None], clock: Callable[[], float], epoch_of: Callable[[str], int],
    ) -> None:
        self._step_speed = PrefillSpeed(clock)
        super().__init__(report, self._step_speed, clock, epoch_of=epoch_of)
        self._now_s = clock
        self._prompts: dict[str, int] = {}
        self._hits: dict[str, int] = {}
        """By request, how many tokens, counted from token 0, have KV once its load is complete."""
        self._computed: dict[str, int] = {}
        """By running request, how many tokens have KV."""
        self._polled_s = self._offered_s = clock()
        self._step_tokens, self._shows_speed = 0, False

    def lookup(self, request_id: str, prompt_tokens: int, local_tokens: int, found: LookupResult) -> None:
        self._prompts.setdefault(request_id, prompt_tokens)
        self.looked_up(request_id, local_tokens)
        self._computed[request_id] = local_tokens
        if isinstance(found, Hit):
            self.found(request_id, found.tokens)
        elif isinstance(found, Miss):
            self.admitted(request_id, 0)

    def begin_load(self, request_id: str, local_tokens: int, hit_tokens: int) -> None:
        self.admitted(request_id, hit_tokens - local_tokens)
        self._hits[request_id] = hit_tokens

    def begin_store(self, request_id: str, computed_tokens: int) -> None:
        known = self._computed.get(request_id)
        if known is not None and computed_tokens > known:
            self._step_tokens += computed_tokens - known
            self._shows_speed |= self.shows_speed(request_id, computed_tokens - known)
            self._computed[request_id] = computed_tokens
            self._offered_s = self._now_s()

    def step(self, loads: Iterable[tuple[LoadDone, float | None]]) -> None:
        """A poll ends, with the loads that it returns and the seconds that the copies of each took."""
        took_s = self._offered_s - self._polled_s
        self._step_speed.ended(self._step_tokens if self._shows_speed else 0, took_s, self._step_tokens)
        self._step_tokens, self._shows_speed = 0, False
        for done, copy_s in loads:
            wanted = self._hits.pop(done.request_id, None)
            if wanted is None:
                continue  # the request has ended meanwhile
            if done.valid_tokens < wanted:
                self.failed(done.request_id, done.valid_tokens)
            else:
                self.loaded(done.request_id, copy_s)
            self._computed[done.request_id] = done.valid_tokens
        self._polled_s = self._now_s()

    def finished(self, request_id: str, *, comes_back: bool) -> None:
        """`comes_back`: it was preempted, so its outcome is reported later."""
        self._hits.pop(request_id, None)
        self._computed.pop(request_id, None)
        if not comes_back:
            self.ended(request_id, self._prompts.pop(request_id, 0), has_run=False)


# --------------------------------------------------------------------------------
# The metrics of the connectors of all engines. Each engine exports them with its own prefix: vllm:kvdock_…,
# sglang:kvdock_…

@dataclass(frozen=True)
class Metric:
    """`kind`: "seconds" is a distribution of durations."""

    kind: Literal["counter", "gauge", "seconds"]
    help: str


SHARED: Mapping[str, Metric] = {
    "load_tokens": Metric("counter", "Tokens loaded from the kvdock server instead of being computed."),
    "lookup_seconds": Metric("seconds", "Time from a lookup's question to its answer."),
    "lookups_late": Metric("counter", "Lookups taken for a miss because the server's answer was late."),
    "declined_short": Metric("counter", "Requests whose hit was shorter than min_load_tokens, and was computed."),
    "declined_dear": Metric("counter", "Requests whose hit was computed because to load it would have taken longer."),
    "tier_wait_seconds": Metric("seconds", "Time that a request waited for what a lower tier was loading."),
    "tier_waits_fulfilled": Metric("counter", "Requests that waited for a lower tier until all of it was there."),
    "tier_waits_shortened": Metric("counter", "Requests that waited for a lower tier until no more of it came."),
    "tier_waits_expired": Metric("counter", "Requests that waited for a lower tier for as long as they may."),
    "wait_seconds": Metric("seconds", "Time that a request waited for tokens that another engine was computing."),
    "waits_fulfilled": Metric("counter", "Requests that waited for another engine until all of it was stored."),
    "waits_withdrawn": Metric("counter", "Requests whose other engine ended, died or gave up before all was stored."),
    "waits_stalled": Metric("counter", "Requests that waited for another engine and saw nothing more being stored."),
    "waits_expired": Metric("counter", "Requests that waited for another engine for as long as they may."),
    "hints_ignored": Metric("counter", "KV hints of requests that kvdock does not know or cannot read."),
    "attached": Metric("gauge", "Whether the kvdock server is there: 1, or 0 when every lookup is a miss."),
}
"""By name without the engine's prefix: `load_tokens` is vllm:kvdock_load_tokens_total under vLLM."""
