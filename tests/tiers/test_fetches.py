"""In which order the mover's fetches run: over a tier in memory that loads when the test lets it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from api_helpers import ServerProcess, eventually
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_notes import BareTier
from tier_server import PART, POOL, POOL_CHUNKS

from kvdock.protocol.mover_schemas import Generation, Promise
from kvdock.shm.checksum import checksum
from kvdock.tiers.mover.agreement import Agreement, AgreementObserver
from kvdock.tiers.mover.fetches import AHEAD_BATCH_BYTES, ASKED_AT_ONCE, Fetch, Fetches, FetchObserver, Wanted
from kvdock.tiers.mover.herds import SLOWER, STALL_S, STALLED, Following
from kvdock.tiers.mover.namespaces import NamespaceSession
from kvdock.tiers.mover.tier_handle import ABSENT_TIMES, MOST_ABSENT_S, Absent, TierHandle
from kvdock.tiers.record import PartName
from kvdock.tiers.stores.peers.tier import CALL_S
from kvdock.tiers.tier import AT_STORE, Coming, Deadline, Loaded, Outcome, Place, ToLoad, ToStore

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(60)]

BATCH = AHEAD_BATCH_BYTES // PART
"""Chunks that come together ahead of requests."""


class HeldTier(BareTier):
    """It has every chunk. A load waits until the test sets the event of its first key."""

    name = "memory"

    def __init__(self, engine: TierEngine) -> None:
        super().__init__()
        self._engine, self.held = engine, defaultdict[bytes, threading.Event](threading.Event)
        self.began: list[bytes] = []
        """The first key of each load."""
        self.lacks: set[bytes] = set()
        self.asked: list[int] = []
        """How many parts each call asked about."""

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        self.asked.append(len(names))
        return [name.key not in self.lacks for name in names]

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        self.began.append(parts[0].name.key)
        assert self.held[parts[0].name.key].wait(30.0)
        if deadline.is_over:
            return [Loaded(Outcome.LATE)] * len(parts)
        for part in parts:
            part.pages[: part.length] = self._engine.bytes_of(part.name.key)
        return [Loaded(Outcome.DONE, checksum(part.pages[: part.length])) for part in parts]

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        return [Outcome.FULL] * len(parts)

    def close(self, deadline: Deadline) -> None:
        for event in self.held.values():
            event.set()


@pytest.fixture
def engine() -> Iterator[TierEngine]:
    with ServerProcess(pool_bytes=POOL, segment_bytes=POOL) as server:
        made = TierEngine(server.unix, manifest(PART))
        yield made
        made.close()


@pytest.fixture
def tier(engine: TierEngine) -> HeldTier:
    return HeldTier(engine)


@pytest.fixture
def space(engine: TierEngine) -> NamespaceSession:
    return NamespaceSession(engine.attachment.namespace, engine.manifest, engine.session)


@pytest.fixture
def ended() -> list[Fetch]:
    return []


@pytest.fixture
def news() -> list[int]:
    """How many chunks were still coming, of those that running requests want, whenever a fetch said that something has
    changed."""
    return []


@pytest.fixture
def promises() -> list[Promise]:
    return []


@pytest.fixture
def observer(ended: list[Fetch], news: list[int], promises: list[Promise]) -> FetchObserver:
    return FetchObserver(
        promised=promises.append, ended=ended.append, loaded=lambda handle, fetch, keys: None,
        lacked=lambda handle, namespace, keys: None, progressed=lambda: news.append(0),
    )


@contextmanager
def fetching(
    engine: TierEngine, space: NamespaceSession, tiers: Sequence[HeldTier], observer: FetchObserver
) -> Iterator[Fetches]:
    agreement = Agreement(
        lambda: [space.digest],
        AgreementObserver(note_changed=lambda change: None, order_done=lambda done: None, renewed=lambda tier: None),
    )
    agreement.follow([Generation(namespace=space.digest.hex(), generation=1, edition=0)])
    handles = [TierHandle(tier, clock=lambda: 0.0, lost=lambda error: None) for tier in tiers]
    for handle in handles:
        agreement.use(handle)
    made = Fetches(handles, engine.client, agreement, observer, pool_bytes=POOL)
    yield made
    for tier in tiers:
        tier.close(Deadline(1.0))
    made.close()
    agreement.close()
    for handle in handles:
        handle.close(Deadline(1.0))


@pytest.fixture
def fetches(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, observer: FetchObserver, news: list[int]
) -> Iterator[Fetches]:
    def coming() -> int:
        return sum(made.coming(space.digest, fetch.wanted.keys, 1) for fetch in list(made._running))

    with fetching(engine, space, [tier], observer._replace(progressed=lambda: news.append(coming()))) as made:
        yield made


class FailedPools(HeldTier):
    """The pools of other nodes, which have every chunk, and fail at each load."""

    name, node, are_many = "peers", "a", False

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        return [Loaded(Outcome.FAILED)] * len(parts)

    def admit(self, address: str) -> str:
        return ""

    def claimed(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> Place:
        return AT_STORE

    def claim(self, name: PartName, deadline: Deadline) -> Place:
        return AT_STORE

    def coming(self, at: Place, names: Sequence[PartName], lease: int, deadline: Deadline) -> Coming | None:
        return None

    def lag_s(self, node: str) -> float:
        return 0.0

    def release(self, node: str, lease: int, name: PartName) -> None: ...


def test_what_a_store_gives_in_place_of_other_nodes_was_promised_before(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, observer: FetchObserver, promises: list[Promise],
    ended: list[Fetch],
) -> None:
    keys, pools = engine.chain(6), FailedPools(engine)
    pools.lacks = tier.lacks = {keys[5]}
    tier.held[keys[0]].set()
    with fetching(engine, space, [pools, tier], observer) as made:
        made.start(Fetch(Wanted(space, keys, 0, ticket=7), 60.0))
        eventually(lambda: len(promises) == 1)
        tier.lacks = set()  # another node has stored it meanwhile
        eventually(lambda: bool(ended), 30.0)
    assert [(one.ticket, one.chunks, one.tier) for one in promises] == [(7, 5, "peers")]
    assert [fetch.loaded for fetch in ended] == [5]
    assert engine.lookup(keys, "is there").hit_tokens == 5 * CHUNK_TOKENS


def test_what_requests_wait_for_goes_before_what_comes_ahead_of_them(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, fetches: Fetches, ended: list[Fetch]
) -> None:
    ahead, also, waits = engine.chain(BATCH + 2), engine.chain(2), engine.chain(4)
    assert len(ahead) + len(also) + len(waits) <= POOL_CHUNKS
    fetches.start(Fetch(Wanted(space, ahead, 0, prefetch=1), 60.0))
    fetches.start(Fetch(Wanted(space, also, 0, prefetch=2), 60.0))
    eventually(lambda: tier.began == [ahead[0]])
    fetches.start(Fetch(Wanted(space, waits, 0, 7), 60.0))
    eventually(lambda: tier.began == [ahead[0], waits[0]])
    tier.held[ahead[0]].set()
    eventually(lambda: engine.lookup(ahead, "is there").hit_tokens == BATCH * CHUNK_TOKENS)
    time.sleep(0.3)  # nothing says that a load will not begin
    assert tier.began == [ahead[0], waits[0]], "the rest waits, and so does the other prefetch"
    for key in (waits[0], ahead[BATCH], also[0]):
        tier.held[key].set()
    wanted = [(7, 0), (0, 1), (0, 2)]
    eventually(lambda: [(fetch.wanted.ticket, fetch.wanted.prefetch) for fetch in ended] == wanted, 30.0)
    assert tier.began == [ahead[0], waits[0], ahead[BATCH], also[0]]
    assert [fetch.loaded for fetch in ended] == [4, BATCH + 2, 2]


def test_a_request_loads_for_itself_what_another_one_has_given_up(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, fetches: Fetches, ended: list[Fetch]
) -> None:
    keys = engine.chain(8)
    fetches.start(Fetch(Wanted(space, keys[:6], 0, 1), 60.0))
    eventually(lambda: tier.began == [keys[0]])
    fetches.start(Fetch(Wanted(space, keys, 0, 2), 60.0))
    eventually(lambda: tier.began == [keys[0], keys[6]])
    tier.held[keys[6]].set()
    fetches.cancel(1)
    tier.held[keys[0]].set()
    eventually(lambda: [fetch.wanted.ticket for fetch in ended] == [1, 2], 30.0)
    assert tier.began == [keys[0], keys[6], keys[0]]
    assert [fetch.loaded for fetch in ended] == [0, 8]
    assert engine.lookup(keys, "is there").hit_tokens == 8 * CHUNK_TOKENS


@pytest.mark.parametrize("way", ["cancel", "drop"])
def test_that_no_more_comes_is_said_at_once(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, fetches: Fetches, news: list[int], way: str
) -> None:
    keys = engine.chain(4)
    fetches.start(Fetch(Wanted(space, keys, 0, 1), 60.0))
    eventually(lambda: tier.began == [keys[0]])
    assert news[-1] == 4
    if way == "cancel":
        fetches.cancel(1)
    else:
        fetches.drop(space.digest)
    assert news[-1] == 0


def test_that_a_fetch_waits_for_room_is_said_at_once(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, fetches: Fetches, news: list[int]
) -> None:
    most = POOL_CHUNKS * 3 // 4
    first, second = engine.chain(most), engine.chain(most)
    fetches.start(Fetch(Wanted(space, first, 0, 1), 60.0))
    eventually(lambda: tier.began[:1] == first[:1])
    said = len(news)
    fetches.start(Fetch(Wanted(space, second, 0, 2), 60.0))
    eventually(lambda: news[said:] == [2 * most, most])


class OtherPool:
    """Another node's pool. Each of its answers says that nothing has come yet; after so many `answers` it gives none.
    `left_s`: how long each could take, in seconds."""

    def __init__(self, answers: int) -> None:
        self.node, self.are_many, self.now_s, self._answers = "b", False, 100.0, answers
        self.left_s: list[float] = []
        self.place = AT_STORE
        """What claim() returns."""
        self.released: list[int] = []
        self.lag = 0.0

    def lag_s(self, node: str) -> float:
        return self.lag

    def admit(self, address: str) -> str:
        return ""

    def claimed(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> Place:
        return AT_STORE

    def claim(self, name: PartName, deadline: Deadline) -> Place:
        return self.place

    def coming(self, at: Place, names: Sequence[PartName], lease: int, deadline: Deadline) -> Coming | None:
        self.left_s.append(deadline.left_s)
        self.now_s += 0.12
        return Coming(0, len(names), 7) if len(self.left_s) <= self._answers else None

    def release(self, node: str, lease: int, name: PartName) -> None:
        self.released.append(lease)


@pytest.mark.parametrize(("answers", "depth", "lag", "calls"), [
    (2, 1, 0.0, 3), (9, 1, 0.0, 3), (9, 2, 0.0, 8), (9, 1, 0.125, 8),
])
def test_another_node_is_asked_only_while_it_can_wait_and_keeps_no_lease(
    tier: HeldTier, answers: int, depth: int, lag: float, calls: int
) -> None:
    """Its lease ends, though its last answer did not come. With one more node between, it is given as much time again,
    and more where it takes long to answer.
    """
    pool, handle = OtherPool(answers), TierHandle(tier, clock=lambda: 0.0, lost=lambda error: None)
    pool.lag = lag
    names = [PartName(bytes(32), bytes([at]) * 32, 0, 0) for at in range(4)]
    following = Following(pool, Place("a", depth), handle, names, chunk_bytes=PART, clock=lambda: pool.now_s)
    assert following.there(0, 4, Deadline(60.0)) == 0
    following.close()
    handle.close(Deadline(1.0))
    assert len(pool.left_s) == calls and all(left_s > 1.4 * CALL_S for left_s in pool.left_s)
    assert pool.released == [7]


@pytest.mark.parametrize(("nodes", "calls"), [(1, 1), (2, 2), (9, 3)])
def test_another_node_may_be_slower_than_the_store_where_more_nodes_would_share_it(
    tier: HeldTier, nodes: int, calls: int
) -> None:
    """How many there are by now is asked before nothing more is read there."""
    pool, handle = OtherPool(9), TierHandle(tier, clock=lambda: 0.0, lost=lambda error: None)
    handle.fetches.count, handle.speed.latency_s, handle.speed.rate = 1, 0.0, 4 * PART / 0.125
    names = [PartName(bytes(32), bytes([at]) * 32, 0, 0) for at in range(4)]
    following = Following(pool, Place("a", 1), handle, names, chunk_bytes=PART, clock=lambda: pool.now_s)
    pool.now_s += STALL_S - 0.1
    following.came()
    pool.place = Place("a", 1, nodes)
    assert following.there(0, 4, Deadline(60.0)) == 0
    handle.close(Deadline(1.0))
    assert (len(pool.left_s), following.why) == (calls, SLOWER if nodes < 9 else STALLED)


@pytest.mark.parametrize(("has", "calls"), [(0, 1), (1, 2), (17, 2), (100, 2), (255, 2), (256, 1)])
def test_few_questions_find_the_longest_prefix(
    engine: TierEngine, tier: HeldTier, space: NamespaceSession, fetches: Fetches, ended: list[Fetch], has: int,
    calls: int,
) -> None:
    keys = engine.chain(256)
    tier.lacks = set(keys[has:])
    (handle,) = fetches._handles
    found = fetches._find(Fetch(Wanted(space, keys, 0, ticket=1), 60.0), handle, 0)
    assert len(found) == has
    assert len(tier.asked) <= calls and sum(tier.asked) <= 2 * (ASKED_AT_ONCE + 1)


def test_a_chunk_that_a_slow_tier_lacked_a_moment_ago_is_not_asked_for_again() -> None:
    now_s, keys = 0.0, [bytes([number]) * 32 for number in range(4)]
    space, of_other_weights = bytes(32), bytes([1]) * 32
    absent = Absent(lambda: now_s)
    absent.asked(0.025)
    absent.add(space, keys[2])
    assert absent.cut(space, keys) == keys[:2] and absent.cut(space, keys[:2]) == keys[:2]
    assert absent.cut(of_other_weights, keys) == keys
    absent.remove([PartName(space, keys[2], 0, 0)])
    assert absent.cut(space, keys) == keys
    absent.add(space, keys[0])
    now_s = ABSENT_TIMES * 0.025
    assert absent.cut(space, keys) == keys
    absent.asked(1000.0)
    absent.add(space, keys[1])
    now_s += MOST_ABSENT_S
    assert absent.cut(space, keys) == keys


@pytest.mark.parametrize(("rate", "left_s", "slow", "late"), [
    (1e3, 60.0, 1, 0), (1e9, 0.0, 0, 1), (1e9, 60.0, 0, 0), (1e3, 0.0, 1, 0),
], ids=["slow", "time is over", "quick", "slow and over"])
def test_a_request_whose_time_is_over_does_not_make_the_tier_slow(
    space: NamespaceSession, fetches: Fetches, rate: float, left_s: float, slow: int, late: int
) -> None:
    (handle,) = fetches._handles
    handle.speed.rate = rate
    fetch = Fetch(Wanted(space, [bytes(32)] * 8, 0, ticket=1, tokens_per_s=1000.0), 60.0)
    fetch.deadline = Deadline(left_s)
    assert (fetches._worth(fetch, handle, 8) == 0) == (slow + late > 0)
    counters = handle.counters
    assert (counters["declined_too_slow"], counters["declined_too_late"]) == (slow, late)


def test_a_request_that_went_on_counts_for_nothing(space: NamespaceSession, fetches: Fetches) -> None:
    (handle,) = fetches._handles
    fetch = Fetch(Wanted(space, [bytes(32)] * 8, 0, ticket=1), 60.0)
    fetch.deadline.cancel()
    assert fetches._worth(fetch, handle, 8) == 0
    assert (handle.counters["declined_too_slow"], handle.counters["declined_too_late"]) == (0, 0)


def test_a_tier_that_is_too_slow_does_not_hide_a_quicker_one(
    engine: TierEngine, space: NamespaceSession, fetches: Fetches
) -> None:
    tier, keys = HeldTier(engine), engine.chain(8)
    tier.name = "quick"
    quick, (slow,) = TierHandle(tier, clock=lambda: 0.0, lost=lambda error: None), fetches._handles
    fetches._agreement.use(quick)
    slow.speed.rate = 1e3
    fetch = Fetch(Wanted(space, keys, 0, ticket=1, tokens_per_s=1000.0), 60.0)
    steps, _ = fetches._plan(fetch, [slow, quick])
    assert [(step.handle.name, len(step.found)) for step in steps] == [("quick", len(keys))]
    assert slow.counters["declined_too_slow"] == 1
    quick.close(Deadline(1.0))
