"""A tier in use: its threads, the time that its calls take, and a breaker that stops calls to it while it fails.

Each tier has its own threads for each kind of call, such as loads and stores. So a late call blocks no other tier, and
no load waits behind stores.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvdock.tiers.mover.bundles import part_verbs
from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import (
    Bounds,
    Deadline,
    Loaded,
    LoadsMany,
    NoSpace,
    NotAll,
    NotEverywhere,
    OnlyRead,
    Outcome,
    ReadOnly,
    StillRunning,
    Sweeps,
    TellsFaults,
    Tier,
    TierError,
    ToLoad,
    ToStore,
    pages_bytes,
    sum_of,
)

log = logging.getLogger("kvdock.tiers")

R = TypeVar("R")

LATE_S = 0.5
"""A call that has not returned this long after its deadline is a failure."""
PROBE = "probe"
CHANGE = "change"
"""Calls that change something and are no stores. Those that fail end stores, and no reads: a tier that cannot be
written is still read."""
MOST_FAILURES = 3
"""After this many failures in a row the breaker opens."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""How long the breaker stays open before a probe: at first, and at most. It doubles with each probe that fails."""
PROBE_S = 2.0
REFUSED_S = 2.0
"""For so long a tier counts as full after it has refused a store, if it stores nothing meanwhile."""
SMOOTHING = 0.2
"""The weight of the newest call in the estimate of the tier's speed."""
UNRETURNED = "a call does not return"
FAIR_S, SURE_S = 0.04, 1.0
"""A call that had less time than FAIR_S and did not finish shows nothing. After one that had less than SURE_S the tier
is tried with more time (PROBE_S): a tier that is slow to answer has not failed."""
COUNTED = (
    *(f"{verb}_{outcome.value}" for verb in ("load", "store") for outcome in Outcome), "loaded_bytes", "stored_bytes",
    "failures", "damaged", "declined_too_slow", "declined_too_late",
    "fetched_elsewhere", "followed",
    *(f"left_out_{why}" for why in (
        "full_queue", "evicted", "no_server", "namespace_gone", "failed", "day_spent", "too_large",
    )),
)
"""All counters of a tier, which start at 0. docs/operate/metrics_tiers.md explains them."""
FIRST_RATE = 8e9
"""Bytes a second, assumed until something has been loaded: a tier that was assumed to be slow would never be tried."""
ENOUGH_BYTES = 1 << 20
"""A load of fewer bytes takes mostly the latency, so it shows no rate."""
SHORTEST_S = 1e-6
MEASURE_S, LONGEST_MEASURE_S = 10.0, 3600.0
"""If nothing was loaded from a tier for this long, some of the parts stored last are loaded to measure it. The time
doubles with each measurement, up to LONGEST_MEASURE_S."""
MEASURED_BYTES, MORE_BYTES = 32 << 20, 128 << 20
"""The size of that load. If it took at most QUICK_S, MORE_BYTES are loaded too, the same amount as a fetch has in
progress at once, because a quick tier shows the speed of all its threads only then."""
QUICK_S = 0.02
MEASURERS = 4
"""How many calls load it at once."""
ABSENT_TIMES, MOST_ABSENT_S, MOST_ABSENT = 40, 5.0, 1 << 16
"""A chunk that a tier lacks is asked for again after ABSENT_TIMES the time that it takes to ask: requests for the same
prompt do not all wait, and ask a quick store as often as they like."""


class TierOff(TierError):
    """The breaker is open, so the tier is not called."""


class Speed:
    """How long loads take: a latency and a rate (bytes a second), learned from loads of different sizes."""

    def __init__(self) -> None:
        self.latency_s, self.rate, self._is_known = 0.001, FIRST_RATE, False

    def learn(self, bytes_moved: int, took_s: float) -> None:
        is_small = bytes_moved < ENOUGH_BYTES
        if not is_small and not self._is_known:
            self.rate, self._is_known = bytes_moved / max(took_s, SHORTEST_S), True
        elif is_small or bytes_moved / self.rate < self.latency_s:
            self.latency_s += SMOOTHING * (took_s - self.latency_s)
        elif took_s > self.latency_s:
            self.rate += SMOOTHING * (bytes_moved / (took_s - self.latency_s / 2) - self.rate)

    def seconds(self, bytes_to_move: int) -> float:
        return self.latency_s + bytes_to_move / self.rate


class Trials:
    """What is loaded to try a tier that has failed, and to measure one from which nothing is loaded, and when."""

    def __init__(self) -> None:
        self.learned_s, self.pause_s = -MEASURE_S, MEASURE_S
        self.stored_last: list[tuple[PartName, int]] = []
        """The parts stored last, with their lengths."""
        self.unloaded: ToLoad | None = None
        """A part of the last load that failed."""
        self.has_doubt = False
        """Whether a call that had little time was late since the last trial."""

    def is_due(self, now_s: float) -> bool:
        return bool(self.stored_last) and now_s - self.learned_s >= self.pause_s

    def begins(self, now_s: float) -> None:
        self.learned_s, self.pause_s = now_s, min(2 * self.pause_s, LONGEST_MEASURE_S)


class Breaker:
    """A circuit breaker. It is closed while the tier works; while it is open, the tier is not called until a probe
    succeeds. Failures in a row are counted separately for each kind of call: a store may list its parts at once, and
    yet fail at every load. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failures: Counter[str] = Counter()
        self._rest_s, self._until_s = FIRST_REST_S, 0.0
        self.is_open, self.why = False, ""

    def succeeded(self, kind: str) -> None:
        with self._lock:
            self._failures[kind] = 0

    def close(self) -> None:
        with self._lock:
            self._failures.clear()
            self._rest_s = FIRST_REST_S
            self.is_open, self.why = False, ""

    def failed(self, kind: str, why: str, times: int = 1) -> bool:
        """`times`: for how many failures it counts. Returns whether it opens the breaker."""
        with self._lock:
            self._failures[kind] += times
            self.why = why
            if self._failures[kind] < MOST_FAILURES if not self.is_open else kind != PROBE:
                return False  # calls that began before it opened show nothing new, however late they end
            opens, self.is_open = not self.is_open, True
            self._until_s = self._clock() + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
            return opens

    def wants_probe(self) -> bool:
        with self._lock:
            return self.is_open and self._clock() >= self._until_s


@dataclass(eq=False)
class _Call:
    """A call in progress. `part`: if it is a load, one of the parts that it loads."""

    kind: str
    deadline: Deadline
    part: ToLoad | None = None
    counted_s: float | None = None
    """When it was first seen to be late, or when it was last counted as a failure."""


class Stores:
    """Whether the tier takes stores. One that has no space may have some a moment later, so it is tried all the time;
    one that cannot be written is tried with one batch after a pause, which doubles. What it has is loaded meanwhile."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._refused, self._failures = clock, "", 0
        self._rest_s, self._until_s = FIRST_REST_S, 0.0
        self.why = ""
        """What the tier said last when it took nothing."""
        self.too_large = ""
        """What was the first part that was longer than the tier takes; "": there was none."""

    @property
    def state(self) -> Literal["open", "full", "read_only"]:
        """As the last stores have shown. If nothing has been stored since the last pause, it is not known any more."""
        if not self._refused or self._clock() > self._until_s + REFUSED_S:
            return "open"
        return "full" if self._refused == "full" else "read_only"

    @property
    def error(self) -> str:
        """Why not everything is stored; "": all is."""
        return self.why if self.state != "open" else self.too_large

    @property
    def are_due(self) -> bool:
        return self._refused != "read_only" or self._clock() >= self._until_s

    def refused(self, state: Literal["full", "read_only"], why: str) -> bool:
        """Returns whether this is new."""
        is_new, self._refused, self.why = self.state != state, state, why
        self._until_s = self._clock()
        if state == "read_only":
            self._until_s += self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return is_new

    def failed(self) -> bool:
        """A store or another change has failed. Returns whether so many have in a row that the tier cannot be
        written."""
        self._failures += 1
        return self._failures >= MOST_FAILURES

    def taken(self) -> bool:
        """The tier has stored something. Returns whether it did not before."""
        was_refused, self._refused, self._rest_s = self.state != "open", "", FIRST_REST_S
        self._failures = 0
        return was_refused


class Absent:
    """Chunks that the tier was found to lack a moment ago. Other servers may store them meanwhile. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._until_s: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()
        """By namespace and key."""
        self._ask_s = 0.0

    def asked(self, took_s: float) -> None:
        """The tier has answered which parts it has."""
        self._ask_s += SMOOTHING * (took_s - self._ask_s) if self._ask_s else took_s

    def add(self, namespace: bytes, key: bytes) -> None:
        with self._lock:
            self._until_s[namespace, key] = self._clock() + min(ABSENT_TIMES * self._ask_s, MOST_ABSENT_S)
            self._until_s.move_to_end((namespace, key))
            if len(self._until_s) > MOST_ABSENT:
                self._until_s.popitem(last=False)

    def remove(self, names: Iterable[PartName]) -> None:
        """Their chunks."""
        with self._lock:
            for name in names:
                self._until_s.pop((name.namespace, name.key), None)

    def cut(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys before the first that is absent."""
        now_s = self._clock()
        with self._lock:
            end = next(
                (at for at, key in enumerate(keys) if self._until_s.get((namespace, key), now_s) > now_s), len(keys)
            )
        return keys[:end]


@dataclass
class FetchTotals:
    """The number of fetches from the tier, each of one batch or several, and the seconds that they took in sum.
    `loading_bytes`: what is being loaded now."""

    count: int = 0
    seconds: float = 0.0
    loading_bytes: int = 0


class TierHandle:
    """`lost`: called when a call cannot be stopped and may write to the pool until the process ends. `writers`: as in
    Bundles."""

    def __init__(
        self, tier: Tier, *, clock: Callable[[], float], lost: Callable[[StillRunning], None],
        writers: Callable[[bytes], int] = lambda _: 1,
    ) -> None:
        self.tier, self._parts = tier, part_verbs(tier, writers)
        self.speed, self.breaker = Speed(), Breaker(clock)
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.fetches, self.absent, self.stores = FetchTotals(), Absent(clock), Stores(clock)
        self._clock, self._lost = clock, lost
        self._lock = threading.Lock()
        self._pools = {
            kind: ThreadPoolExecutor(threads, f"kvdock-{tier.name}-{kind}")
            for kind, threads in (
                ("ask", 2), ("note", 2), (CHANGE, 2), ("load", self.loads_at_once), ("store", 2), (PROBE, 1),
            )
        }
        self._probe: Future[None] | None = None
        self._calls: set[_Call] = set()
        self._trials = Trials()

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def loads_at_once(self) -> int:
        """How many calls load the tier's parts at once."""
        return self.tier.loads_at_once if isinstance(self.tier, LoadsMany) else MEASURERS

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        """Raises TierOff, TierError."""
        began_s = self._clock()

        def judge(found: list[bool]) -> str:
            return "it does not answer in time what it has" if deadline.is_over and not any(found) else ""

        found = self._call("ask", deadline, lambda: self._parts.exists(names, deadline), judge)
        self.absent.asked(self._clock() - began_s)
        return found

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> Future[list[Loaded]]:
        """The future is done once no one reads or writes the pages any more, even if that is after the deadline. It
        raises TierOff, TierError."""
        bytes_wanted = sum(part.length for part in parts)
        with self._lock:
            self.fetches.loading_bytes += bytes_wanted
        return self._pools["load"].submit(self._load, parts, bytes_wanted, deadline)

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        """Returns once no one reads the pages any more, even if that is after the deadline. Raises TierOff,
        TierError."""
        self._require_closed()
        try:
            found = self._guarded(_Call("store", deadline), lambda: self._parts.store(parts, deadline), _failure)
        except ReadOnly as error:
            self._refused("read_only", self._with_fault(error.why))
            raise
        if Outcome.DONE in found:
            if self.stores.taken():
                log.warning("the tier %s takes stores again", self.name)
        elif Outcome.FULL in found:
            self._refused("full", self._with_fault("it has no space"))
        if Outcome.TOO_LARGE in found:
            self._found_too_large(max(part.record.length for part in parts))
        for part, outcome in zip(parts, found, strict=True):
            self.counters[f"store_{outcome.value}"] += 1
            if outcome is Outcome.DONE:
                self.counters["stored_bytes"] += part.record.length
        self.absent.remove(part.record.name for part in parts)
        self._trials.stored_last = [
            (part.record.name, part.record.length)
            for part, outcome in zip(parts, found, strict=True) if outcome is Outcome.DONE
        ] or self._trials.stored_last
        return found

    def _found_too_large(self, length: int) -> None:
        most = f", wanted at most {self.tier.longest_part:,}" if isinstance(self.tier, Bounds) else ""
        if not self.stores.too_large:
            self.stores.too_large = f"found a part of {length:,} bytes{most}"
            log.warning("the tier %s does not take all that is to be stored: %s", self.name, self.stores.too_large)

    @property
    def is_only_read(self) -> bool:
        """See OnlyRead."""
        return isinstance(self.tier, OnlyRead) and self.tier.is_only_read

    def _refused(self, state: Literal["full", "read_only"], why: str) -> None:
        if not self.is_only_read and self.stores.refused(state, why):
            log.warning("nothing is stored in the tier %s for a while: %s", self.name, why)

    @property
    def fault(self) -> str:
        """What its storage said last when a part failed."""
        return self.tier.fault if isinstance(self.tier, TellsFaults) else ""

    def _with_fault(self, why: str) -> str:
        return f"{why}: {self.fault}" if self.fault else why

    def delete_damaged(self, names: Sequence[PartName]) -> None:
        """Deletes damaged parts. A part that cannot be deleted now is found damaged, and deleted, when it is next
        loaded."""
        deadline = Deadline(PROBE_S)
        try:
            self._call(CHANGE, deadline, lambda: self._parts.delete(names, deadline), _failure)
        except TierError as error:
            log.warning("%s: damaged parts are not deleted yet: %s", self.name, error)

    def remove(self, names: Sequence[PartName], deadline: Deadline) -> None:
        """Raises TierOff, TierError."""
        self._call(CHANGE, deadline, lambda: self._parts.delete(names, deadline), lambda _: "")

    def notes(
        self, namespaces: Sequence[bytes], deadline: Deadline, begins: Callable[[], None] = lambda: None
    ) -> list[Note | None]:
        """`begins`: called when the tier is about to be asked. Raises TierOff, TierError, NotAll."""

        def ask() -> list[Note | None]:
            begins()
            return self.tier.notes(namespaces, deadline)

        return self._call("note", deadline, ask, lambda _: "")

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """Raises TierOff, TierError, NotEverywhere, ReadOnly."""
        try:
            return self._call(CHANGE, deadline, lambda: self.tier.change(namespace, change, deadline), lambda _: "")
        except ReadOnly as error:
            self._refused("full" if isinstance(error, NoSpace) else "read_only", error.why)
            raise

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """Raises TierOff, TierError, ReadOnly."""
        return self._call("note", deadline, lambda: self.tier.namespaces(deadline), lambda _: "")

    def sweep(self, namespace: bytes, note: Note, deadline: Deadline) -> int:
        """Removes parts of former generations; returns how many. Raises TierOff, TierError."""
        tier = self.tier
        if not isinstance(tier, Sweeps):
            return 0
        return self._call(CHANGE, deadline, lambda: tier.sweep(namespace, note, deadline), lambda _: "")

    def expected_s(self, more_bytes: int) -> float:
        """The expected seconds until `more_bytes` are loaded, after the bytes that are being loaded now."""
        return self.speed.seconds(self.fetches.loading_bytes + more_bytes)

    def fetched(self, done_bytes: int, took_s: float) -> None:
        """A fetch has ended: it has loaded, hashed and published `done_bytes`, in one batch or several."""
        with self._lock:
            self.fetches.count += 1
            self.fetches.seconds += took_s
        if done_bytes:
            self._learn(done_bytes, took_s)

    def probe(self, *, may_measure: bool) -> None:
        """To be called at regular intervals. Counts calls that do not return. In the background, probes the tier while
        its breaker is open, and measures it if nothing was loaded for long. `may_measure`: whether an engine is there
        that may want to load."""
        now_s = self._clock()
        for call in [] if self.breaker.is_open else self._late():
            if call.counted_s is None:
                call.counted_s = now_s
            if now_s - call.counted_s > LATE_S:
                call.counted_s = now_s  # it is counted again if it goes on
                self._trials.unloaded = call.part or self._trials.unloaded
                self._fail(call.kind, UNRETURNED)
        if self._probe is None or self._probe.done():
            if self.breaker.wants_probe():
                self._probe = self._pools[PROBE].submit(self._try)
            elif self._trials.has_doubt and not self.breaker.is_open:
                self._probe = self._pools[PROBE].submit(self._end_doubt)
            elif may_measure and self._trials.is_due(now_s) and not self.breaker.is_open:
                self._probe = self._pools[PROBE].submit(self._measure)

    def close(self, deadline: Deadline) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.tier.close(deadline)
        except TierError as error:
            log.warning("%s: %s", self.name, error)

    # ------------------------------------------------------------------

    def _require_closed(self) -> None:
        """Raises TierOff."""
        if self.breaker.is_open:
            raise TierOff(self.name, self.breaker.why)

    def _call(self, kind: str, deadline: Deadline, run: Callable[[], R], judge: Callable[[R], str]) -> R:
        """Calls `run` in one of the threads for this kind of call, and waits for it until LATE_S after the deadline.
        `judge`: as in _guarded(). Raises TierOff, TierError."""
        self._require_closed()
        future = self._pools[kind].submit(self._guarded, _Call(kind, deadline), run, judge)
        try:
            return future.result(deadline.left_s + LATE_S)
        except TimeoutError:
            future.cancel()  # if it has begun already, probe() counts it
            raise TierError(self.name, "it does not answer in time") from None

    def _late(self) -> list[_Call]:
        with self._lock:
            return [call for call in self._calls if call.deadline.is_over]

    def _guarded(self, call: _Call, run: Callable[[], R], judge: Callable[[R], str]) -> R:
        """Calls `run` and counts its outcome. `judge` returns the reason why an answer counts as a failure; "": it does
        not. If the call was late and had little time, it counts for nothing, and the tier is tried."""
        kind, began_s = call.kind, self._clock()
        with self._lock:
            self._calls.add(call)
        try:
            found = run()
        except StillRunning as error:
            self._lost(error)
            raise
        except (ReadOnly, NotEverywhere):
            raise
        except NotAll:
            self.breaker.succeeded(kind)
            raise
        except TierError as error:
            if not self._was_short(call, began_s):
                self._fail(kind, error.why)
            raise
        except Exception as error:  # of the library that the tier uses
            self._fail(kind, f"{type(error).__name__}: {error}")
            raise TierError(self.name, str(error)) from error
        finally:
            with self._lock:
                self._calls.discard(call)
        why = judge(found)
        if not why:
            self.breaker.succeeded(kind)
        elif not self._was_short(call, began_s):
            self._fail(kind, self._with_fault(why))
        return found

    def _was_short(self, call: _Call, began_s: float) -> bool:
        """Whether a call that has not done its work is over, and had too little time to show that the tier fails."""
        took_s = self._clock() - began_s
        is_short = call.deadline.is_over and took_s < SURE_S
        self._trials.has_doubt |= is_short and took_s >= FAIR_S
        return is_short

    def _load(self, parts: Sequence[ToLoad], bytes_wanted: int, deadline: Deadline) -> list[Loaded]:
        try:
            self._require_closed()
            began_s = self._clock()

            def judge(found: list[Loaded]) -> str:
                is_fair = self._clock() - began_s >= max(FAIR_S, self.speed.seconds(bytes_wanted))
                why = _failure([loaded.outcome for loaded in found], is_fair=is_fair)
                self._trials.unloaded = parts[0] if why else self._trials.unloaded
                return why

            found = self._guarded(_Call("load", deadline, parts[0]), lambda: self._parts.load(parts, deadline), judge)
            done_bytes = 0
            for part, loaded in zip(parts, found, strict=True):
                self.counters[f"load_{loaded.outcome.value}"] += 1
                done_bytes += part.length if loaded.outcome is Outcome.DONE else 0
            self.counters["loaded_bytes"] += done_bytes
            return found
        finally:
            with self._lock:
                self.fetches.loading_bytes -= bytes_wanted

    def _learn(self, done_bytes: int, took_s: float) -> None:
        self.speed.learn(done_bytes, took_s)
        self._trials.learned_s = self._clock()

    def _measure(self) -> None:
        """Loads some of the parts stored last, and more of them if the tier is quick."""
        self._trials.begins(self._clock())
        with suppress(TierError):  # _guarded() has counted the failure
            found = self._load_own(MEASURED_BYTES)
            if found is not None and found[1] <= QUICK_S:
                found = self._load_own(MORE_BYTES) or found
            if found is not None:
                self._learn(*found)

    def _load_own(self, most_bytes: int) -> tuple[int, float] | None:
        """Loads parts as a fetch does, into memory outside the pool. Returns bytes and seconds; None: some parts were
        missing, damaged or late. That parts are late is no failure of the tier: nobody waits for them."""
        chunks: list[list[ToLoad]] = []
        size = 0
        for _, stored in itertools.groupby(self._trials.stored_last, lambda one: one[0].key):
            chunk = list(stored)
            chunk_bytes = sum(length for _, length in chunk)
            if chunks and size + chunk_bytes > most_bytes:
                break
            chunks.append([ToLoad(name, length, own_pages(length)) for name, length in chunk])
            size += chunk_bytes
        calls = [list(itertools.chain.from_iterable(chunks[at::MEASURERS])) for at in range(MEASURERS)]
        began_s = self._clock()
        deadline = Deadline(PROBE_S)

        def read(parts: list[ToLoad]) -> bool:
            found = self._guarded(
                _Call("load", deadline, parts[0]), lambda: self._parts.load(parts, deadline),
                lambda found: _failure([loaded.outcome for loaded in found], is_fair=False),
            )
            return all(
                loaded.outcome is Outcome.DONE and sum_of(part, loaded) == loaded.checksum
                for part, loaded in zip(parts, found, strict=True)
            )

        is_whole = all(self._pools["load"].map(read, filter(None, calls)))
        return (size, self._clock() - began_s) if is_whole else None

    def _fail(self, kind: str, why: str, times: int = 1) -> None:
        self.counters["failures"] += 1
        if kind in ("store", CHANGE) and why != UNRETURNED:
            if self.stores.failed():
                self._refused("read_only", why)
        elif self.breaker.failed(kind, why, times):
            log.warning("the tier %s is not used for a while: %s", self.name, why)

    def _try(self) -> None:
        """Probes the tier while its breaker is open."""
        why = self._trial()
        if any(call.kind == "store" for call in self._late()):  # only its end shows that the tier stores again
            why = UNRETURNED
        if why:
            self.breaker.failed(PROBE, why)
            return
        self._trials.unloaded, self._trials.pause_s = None, MEASURE_S
        self.breaker.close()
        log.warning("the tier %s is used again", self.name)

    def _end_doubt(self) -> None:
        """Tries a tier that was late when it had little time. It had enough time now."""
        if why := self._trial():
            self._fail(PROBE, why, MOST_FAILURES)

    def _trial(self) -> str:
        """Asks the tier which parts it has, and loads the part that last failed to load, into memory outside the pool.
        Returns why it fails; "": it works."""
        deadline, wanted = Deadline(PROBE_S, self._clock), self._trials.unloaded
        self._trials.has_doubt, why = False, ""
        try:
            self.tier.exists([PartName(bytes(32), bytes(32), 0, 0)], deadline)
            if wanted is not None:
                again = ToLoad(wanted.name, wanted.length, own_pages(wanted.length))
                (found,) = self._parts.load([again], deadline)
                why = _failure([found.outcome])
        except Exception as error:  # whatever a store raises: the trial has failed, and the text says how
            why = str(error)
        return "it answers too late" if deadline.is_over else why


def own_pages(length: int) -> memoryview:
    """Memory outside the pool, whose pages are mapped already."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, pages_bytes(length), flags=flags))


def _failure(outcomes: Sequence[Outcome], *, is_fair: bool = True) -> str:
    """Why these answers count as a failure of the tier: no part has the outcome DONE, and some part failed or was late.
    "": they do not. `is_fair`: whether there was enough time."""
    undone = {Outcome.FAILED, Outcome.LATE} if is_fair else {Outcome.FAILED}
    if Outcome.DONE in outcomes or undone.isdisjoint(outcomes):
        return ""
    return "its storage fails" if Outcome.FAILED in outcomes else "parts came too late"
