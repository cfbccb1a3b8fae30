"""What rank 0 of an SGLang engine asks, promises, remembers and forgets, at a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from api_helpers import PATIENCE_S, ServerProcess, eventually, unique
from frozen import frozen

from kvdock.client.client import Client
from kvdock.connectors.cost import LoadChoice, LoadOrCompute, PrefillSpeed
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.lookups import LookupRecord, Verification
from kvdock.connectors.requests import RequestCallbacks
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, EngineSession, Identity, SessionObserver
from kvdock.connectors.sglang.afterwards import Afterwards
from kvdock.connectors.sglang.figures import METRICS, Figures
from kvdock.connectors.sglang.holding import GOES, WAITS, Holding, admit, next_batch, put_back
from kvdock.connectors.sglang.loads import Loads, QueuedLoad, Ready
from kvdock.connectors.sglang.lookups import FORGET_S, HASH_WAIT_S, MOST_EXPECTED, Chains, PageLookups
from kvdock.connectors.sglang.marks import MarkedPages, Marks
from kvdock.connectors.sglang.offloads import Offloads
from kvdock.connectors.sglang.outcomes import PageOutcomes
from kvdock.connectors.sglang.page_names import About
from kvdock.connectors.sglang.pools import KVGroup, RankPools
from kvdock.connectors.sglang.rank_zero import Known, RankZero, known_of
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.verify import ChecksumVerifier, HashAhead, Trust
from kvdock.connectors.waits import Patience, Waits
from kvdock.datapath.layout import paged_layout
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.schemas import Group, LookupAnswer, Manifest

PAGE, PAGES, LAYERS = 64, 32, 2


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead_s


class GatedVerifier(ChecksumVerifier):
    """Hashes once the gate is open."""

    def __init__(self, session: EngineSession) -> None:
        super().__init__(session)
        self.gate = threading.Event()
        self.gate.set()
        self.is_trusting = False

    def trusts(self, attachment: Attachment, answer: LookupAnswer) -> bool:
        return self.is_trusting

    def verify(self, request_id: str, attachment: Attachment, answer: LookupAnswer) -> bool:
        assert self.gate.wait(PATIENCE_S)
        return super().verify(request_id, attachment, answer)


class CountingPatience(Patience):
    """Counts what it spends itself on."""

    spent = 0

    def spend(self, work: Future[None]) -> bool:
        self.spent += 1
        return super().spend(work)


class OneProbe(LoadOrCompute):
    """Wants to see one load, and finds all others dear."""

    asked = 0

    def is_too_slow(self, tokens: int) -> bool:
        self.asked += 1
        return self.asked > 1


class Engine:
    """One rank's parts, as kvdock/connectors/sglang/linker.py puts them together."""

    def __init__(self, server: ServerProcess, cost: LoadOrCompute | None = None) -> None:
        self.memory = [[torch.zeros(PAGES * PAGE, 1, 16) for _ in range(LAYERS)] for _ in range(2)]
        layout = paged_layout("TWO_X_NL_X_NBBS_NH_HS", self.memory, block_tokens=PAGE)
        self.groups = (KVGroup("kv", layout, {0: 1, 1: 3}),)
        label = unique("sglang")
        manifest = Manifest(
            model=label, kv_dtype="float32", layers=LAYERS, kv_heads=1, head_size=16, chunk_tokens=PAGE,
            block_tokens=PAGE, hash_function="sglang", groups=(Group(part_bytes=layout.part_bytes(1)),),
        )
        settings = ConnectorSettings(server.unix, timeout_s=PATIENCE_S)
        self.session, self.worker = open_worker(settings, manifest, Identity(label, label, label=label), [layout])
        self.weights = RunningWeights()
        self.chains, self.clock, self.figures, self.known = Chains(self.weights), Clock(), Figures(), Known()
        self.verifier = GatedVerifier(self.session)
        self.patience = CountingPatience(1.0, self.clock)
        self.connector = SchedulerConnector(
            self.session, callbacks=RequestCallbacks(self.chains.of), waits=Waits(self.patience, clock=self.clock),
            choice=LoadChoice(cost=cost), verification=Verification(self.verifier, is_eager=True),
            record=LookupRecord(declined=lambda name, why, tokens: self.lookups.declined(name, why, tokens)),
        )
        self.lookups = PageLookups(self.connector, self.chains, self.figures, PAGE, 5.0, 3.0, self.clock)
        pools = RankPools(self.worker, self.groups, PAGE)
        self.trust = Trust(60.0, self.clock)
        self.ahead = HashAhead(self.trust)
        self.outcomes = PageOutcomes(
            self.connector.ended, PrefillSpeed(self.clock), self.lookups, self.clock
        )
        zero = RankZero(
            self.connector, self.lookups, self.outcomes, self.chains, self.known, self.trust, self.ahead
        )
        self.loads = Loads(
            pools, Ranks(), self.weights, ended=zero.load_ended, took=lambda seconds, copies: None,
        )
        self.offloads = Offloads(pools, Ranks(), self.weights, self.figures, zero)
        start(self.session, self.worker, SessionObserver(self.connector.lookups.keeps_lease))

    def ask(self, rid: str, pages: list[str]) -> int:
        """Again, while it is worth waiting."""
        found = self.lookups.ask(rid, pages)
        while self.lookups.waits(rid, anew=False):
            time.sleep(0.001)  # as SGLang's loop turns
            found = self.lookups.ask(rid, pages)
        return found

    def store(self, pages: list[str], at: int = 0, parent: str | None = None) -> bool:
        self.offloads.offer(
            pages, parent, {"kv": indices(len(pages), at)}, {"kv": len(pages)}, lambda: None, may_store=True
        )
        eventually(lambda: self.offloads.count_ended() == 1)
        return self.offloads.take_ended()

    def load(self, rid: str, pages: int, at: int) -> bool:
        begun = self.lookups.begin_load(rid, pages)
        if begun is None:
            return False
        self.loads.queue(QueuedLoad(rid, *begun, {"kv": indices(pages, at)}, self.weights.epoch))
        return self.loads.finish(self.loads.start(Ready()))

    def close(self) -> None:
        self.loads.close()
        self.offloads.close()
        self.ahead.close()
        self.connector.close()
        self.worker.close()
        self.session.close()
        self.session.client.close()


def indices(pages: int, at: int) -> Any:
    return torch.arange(at * PAGE, (at + pages) * PAGE)


def names(count: int) -> list[str]:
    return [unique("page").encode().hex().ljust(64, "0")[:64] for _ in range(count)]


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    made = Engine(server)
    yield made
    made.close()


def held(server: ServerProcess) -> Callable[[], bool]:
    def nothing() -> bool:
        with Client(server.unix) as client:
            status = client.status()
        return status.leases == status.reservations == 0

    return nothing


def test_a_prefix_is_promised_once_and_remembered(engine: Engine, server: ServerProcess) -> None:
    pages = names(3)
    engine.memory[0][0][: 3 * PAGE] = torch.randn(3 * PAGE, 1, 16)
    assert engine.store(pages)
    with Client(server.unix) as client:
        tail, before = [*pages, *names(1)], client.status().counters["lookups"]
        for _ in range(5):
            assert engine.ask("r", tail) == 3
        assert client.status().counters["lookups"] == before + 1
    assert engine.ask("r", names(2)) == 0, "another tail is another question"
    assert engine.load("r", 1, 8) is False, "nothing was found for it"
    assert engine.ask("r", pages) == 3
    assert engine.load("r", 3, 8)
    assert torch.equal(engine.memory[0][0][8 * PAGE : 11 * PAGE], engine.memory[0][0][: 3 * PAGE])
    eventually(held(server))


def test_a_server_that_does_not_answer_delays_no_load(engine: Engine, server: ServerProcess) -> None:
    """The first load is reported to the server, and the second one does not wait for this."""
    first, second = names(2), names(2)
    assert engine.store(first) and engine.store(second, at=2)
    assert engine.ask("first", first) == engine.ask("second", second) == 2
    began_s = time.monotonic()
    with frozen(server.process):
        assert engine.load("first", 2, 8) and engine.load("second", 2, 12)
        assert time.monotonic() - began_s < PATIENCE_S / 2
    eventually(held(server))


def test_who_has_asked_on_arrival_needs_no_server_when_it_is_admitted(engine: Engine, server: ServerProcess) -> None:
    """Not even if the device has more of its pages by then. The number of those who may ask so early is bounded."""
    pages = names(3)
    assert engine.store(pages)
    for rid in ("more", "all"):
        engine.lookups.expect(rid, pages)
    for asked in list(engine.lookups._asked.values()):
        eventually(partial(engine.connector.lookups.is_verified, asked.name))
    with frozen(server.process):
        assert engine.lookups.ask("all", pages) == 3
        assert engine.lookups.ask("more", pages[1:]) == 2
        assert engine.load("all", 3, 8) and engine.load("more", 2, 12)
    assert torch.equal(engine.memory[0][0][12 * PAGE : 14 * PAGE], engine.memory[0][0][PAGE : 3 * PAGE])
    with Client(server.unix) as client:
        before = client.status().counters["lookups"]
        for at in range(MOST_EXPECTED + 2):
            engine.lookups.expect(f"many {at}", pages)
        eventually(lambda: client.status().counters["lookups"] == before + MOST_EXPECTED)
        engine.lookups.reset()
    eventually(held(server))


class ImageMarks(Marks):
    """The marks of a request whose image begins in its second page."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def why_not(self) -> str:
        return self.why

    def named(self, first: int, pages: Sequence[str]) -> list[str]:
        return [page if at == 0 else page[::-1] for at, page in enumerate(pages, first)]


def test_pages_with_images_have_names_of_their_own_once_the_images_are_hashed(engine: Engine) -> None:
    pages = [f"{at}{name[1:]}" for at, name in enumerate(names(3), 1)]
    marks = ImageMarks()
    about = About(marked=MarkedPages(marks, 0))
    engine.offloads.offer(pages, "", {"kv": indices(3, 0)}, {"kv": 3}, lambda: None, may_store=True, about=about)
    eventually(lambda: engine.offloads.count_ended() == 1)
    assert engine.offloads.take_ended()
    assert engine.ask("text", pages) == 1, "the page before the image"

    marks.why = "unready"
    engine.lookups.expect("image", pages, about)
    assert engine.lookups.ask("image", pages, about) == 0 and engine.lookups.waits("image", anew=False)
    marks.why = ""
    eventually(lambda: engine.lookups.ask("image", pages, about) == 3)
    assert engine.lookups.ask("image", pages[1:], about.behind(pages[:1])) == 2

    for why, waits in (("unready", True), ("media", False)):
        marks.why = why
        assert engine.lookups.ask(why, pages, about) == 0 and engine.lookups.waits(why, anew=False) is waits
        engine.clock.ahead_s += 2 * HASH_WAIT_S
        assert engine.lookups.ask(why, pages, about) == 0 and not engine.lookups.waits(why, anew=False)
        answered = engine.lookups.admitted(why)
        assert answered is not None and answered.why == f"bypassed_{why}"


def test_a_request_is_held_back_until_what_was_found_is_verified_but_not_for_ever(engine: Engine) -> None:
    pages, holding = names(2), Holding(Ranks(), engine.lookups, lambda tokens: None)
    assert engine.store(pages)

    def is_held_back(rid: str) -> bool:
        """Asked about, and not admitted."""
        engine.lookups.tick(0)
        assert engine.lookups.ask(rid, pages) in (0, 2)
        holding.looked_up(rid)
        if holding.starts(rid) == GOES:
            return False
        holding.hold(rid)
        return True

    engine.verifier.gate.clear()
    assert is_held_back("soon") and holding.held(["other", "soon"]) == {"soon"}
    engine.verifier.gate.set()
    eventually(lambda: not holding.held(["other", "soon"]))
    assert not is_held_back("soon") and engine.lookups.ask("soon", pages) == 2

    engine.verifier.gate.clear()
    assert is_held_back("late") and is_held_back("gone")
    assert holding.held(["late"]) == {"late"} and not engine.lookups.waits("gone", anew=True), "the other has ended"
    engine.clock.ahead_s += 6.0
    assert not holding.held(["late"]) and not is_held_back("late") and engine.lookups.ask("late", pages) == 0
    assert engine.figures.counted["lookups_unverified"] == 1
    assert not holding.starts("late"), "it was not asked about"
    engine.verifier.gate.set()


def test_one_step_waits_for_a_hash_and_later_ones_only_look(engine: Engine) -> None:
    pages = names(2)
    assert engine.store(pages)
    engine.verifier.gate.clear()
    for _ in range(5):
        engine.lookups.tick(0)
        assert engine.lookups.ask("r", pages) == 0
    assert engine.patience.spent == 1
    engine.verifier.gate.set()
    assert engine.ask("r", pages) == 2


def test_a_load_that_is_to_show_what_loads_take_is_made_however_often_it_is_asked_about(server: ServerProcess) -> None:
    engine = Engine(server, OneProbe(PrefillSpeed(time.perf_counter), time.perf_counter))
    try:
        pages = names(2)
        assert engine.store(pages)
        for _ in range(3):
            assert engine.ask("first", pages) == 2
        assert engine.load("first", 2, 8)
        assert engine.ask("second", pages) == engine.ask("second", pages) == 0, "dear, and so it stays"
    finally:
        engine.close()


def test_who_is_asked_about_by_other_pages_each_time_does_not_wait_anew_each_time(engine: Engine) -> None:
    """SGLang asks about a prompt of whole pages with and without its last page, when it sorts its queue by hits."""
    pages = names(3)
    assert engine.store(pages)
    engine.verifier.gate.clear()
    for ahead_s, waits in ((0.0, True), (4.5, True), (4.5, False)):  # 5 s for hashes and 3 s for tiers, all in all
        engine.clock.ahead_s += ahead_s
        for tail in (pages, pages[:2]):
            engine.lookups.tick(0)
            assert engine.lookups.ask("r", tail) == 0
            assert engine.lookups.waits("r", anew=False) is waits
    engine.verifier.gate.set()


def test_who_is_held_back_is_out_of_the_queue_while_others_are_admitted(engine: Engine) -> None:
    held, other, third, new = (SimpleNamespace(rid=rid) for rid in ("held", "other", "third", "new"))
    assert put_back([held, other, third], {"held"}, [third, new]) == [held, third, new]
    planned: list[int] = []
    holding = Holding(Ranks(), engine.lookups, planned.append)
    pages = names(1)
    assert engine.store(pages)
    engine.verifier.gate.clear()
    assert engine.lookups.ask("held", pages) == 0
    holding.looked_up("held")
    assert holding.starts("held") == WAITS
    holding.hold("held")
    scheduler = SimpleNamespace(waiting_queue=[other, held, third])

    def admits_all(scheduler: Any) -> tuple[Any, Any]:
        assert scheduler.waiting_queue == [other, third]
        scheduler.waiting_queue = []
        return SimpleNamespace(extend_num_tokens=70, hicache_consumer_index=-1, reqs=[other, third]), None

    def fails(scheduler: Any) -> tuple[Any, Any]:
        raise MemoryError

    engine.lookups.ask("other", pages)
    holding.looked_up("other")
    adder = SimpleNamespace(preempt_list=[third])
    assert admit(holding, lambda adder, req: "admitted", adder, SimpleNamespace(rid="other", host_hit_length=0)) == (
        "admitted"
    ), "others were preempted for it"
    with pytest.raises(MemoryError):
        next_batch(holding, fails, scheduler)
    assert scheduler.waiting_queue == [other, held, third]
    next_batch(holding, admits_all, scheduler)
    assert scheduler.waiting_queue == [held] and planned == [70]
    loads = SimpleNamespace(extend_num_tokens=9, hicache_consumer_index=0, reqs=[new])
    next_batch(holding, lambda scheduler: (loads, None), scheduler)
    assert planned == [70, 0], "what a step takes that loads says nothing of computing"
    holding.shows_speed = lambda req: req is not other
    for reqs, tokens in (([other], 0), ([other, new], 70)):
        batch = SimpleNamespace(extend_num_tokens=70, hicache_consumer_index=-1, reqs=reqs)
        next_batch(holding, lambda scheduler, batch=batch: (batch, None), scheduler)
        assert planned[-1] == tokens
    engine.verifier.gate.set()


def test_what_the_device_has_by_now_is_not_loaded(engine: Engine, server: ServerProcess) -> None:
    """Another request has computed it; the question is the same."""
    pages = names(3)
    engine.memory[1][1][: 3 * PAGE] = torch.randn(3 * PAGE, 1, 16)
    assert engine.store(pages)
    assert engine.ask("r", pages) == 3
    assert engine.ask("r", pages[1:]) == 2
    assert engine.load("r", 2, 8)
    assert torch.equal(engine.memory[1][1][8 * PAGE : 10 * PAGE], engine.memory[1][1][PAGE : 3 * PAGE])
    eventually(held(server))


def test_who_is_not_asked_about_any_more_gives_back_its_lease(engine: Engine, server: ServerProcess) -> None:
    pages = names(2)
    assert engine.store(pages)
    assert engine.ask("r", pages) == 2
    engine.lookups.tick(0)
    assert not held(server)()
    engine.clock.ahead_s = FORGET_S + 1.0
    engine.lookups.tick(0)
    eventually(held(server))
    assert engine.load("r", 2, 8) is False
    assert engine.ask("r", pages) == 2


def test_a_cancelled_load_and_a_reset_hold_nothing(engine: Engine, server: ServerProcess) -> None:
    pages = names(2)
    assert engine.store(pages)
    for end in (lambda: engine.loads.cancel("r"), engine.loads.reset):
        assert engine.ask("r", pages) == 2
        begun = engine.lookups.begin_load("r", 2)
        assert begun is not None
        engine.loads.queue(QueuedLoad("r", *begun, {"kv": indices(2, 8)}, 0))
        end()
        eventually(held(server))
    assert engine.ask("r", pages) == 2
    engine.lookups.reset()
    eventually(held(server))


def test_what_was_just_loaded_is_offered_without_a_call(engine: Engine, server: ServerProcess) -> None:
    pages = names(3)
    assert engine.store(pages[:2])
    epoch = engine.session.attachment.session if engine.session.attachment is not None else ""
    with Client(server.unix) as client:
        before = client.status().counters["reservations"]
        engine.known.add(pages[:2], known_of(epoch, 0))
        assert engine.store(pages[:2])
        assert client.status().counters["reservations"] == before
        engine.known.add(pages[:2], known_of(epoch, 0))
        assert engine.store(pages), "what is not known is stored behind it"
        assert client.status().counters["reservations"] == before + 1
    assert engine.ask("r", pages) == 3
    assert engine.figures.counted["stores_known"] == 1


def test_what_was_stored_is_hashed_before_anybody_asks(engine: Engine) -> None:
    pages = names(3)
    assert engine.store(pages)
    eventually(lambda: len(engine.trust) == 3)
    assert engine.ask("r", pages) == 3
    begun = engine.lookups.begin_load("r", 3)
    assert begun is not None
    attachment, plan = begun
    parts = [part for piece in plan.pieces for part in piece.parts]
    assert len(parts) == 3 and all(engine.trust.has(attachment.session, part) for part in parts)
    engine.loads.give_up(attachment, plan)


def test_a_state_is_known_only_where_a_load_ended() -> None:
    for pages, count in ((["a", "b", "c"], 3), (["a", "b"], 1), (["a", "b", "c", "d"], 3)):
        known = Known()
        known.add(["a", "b", "c"], "one")
        assert known.take(pages, "one", has_state=True) == count
        known.add(["a", "b", "c"], "one")
        assert known.take(pages, "one") == min(3, len(pages)), "without a state the page is enough"


def test_known_pages_are_of_one_server_and_few() -> None:
    known = Known(most=3)
    known.add(["a", "b"], "one")
    assert known.take(["a", "c"], "two") == 0
    assert known.take(["a", "c"], "one") == 1
    assert known.take(["a"], "one") == 0, "taken"
    known.add(["c", "d", "e"], "one")
    assert known.take(["b"], "one") == 0, "the oldest went"
    known.add(["f"], "two")
    assert known.take(["c"], "one") == known.take(["c"], "two") == 0


def test_other_weights_have_other_keys(engine: Engine) -> None:
    pages = names(2)
    assert engine.store(pages)
    engine.weights.changed()
    engine.lookups.reset()
    assert engine.ask("r", pages) == 0
    assert engine.store(pages)
    assert engine.ask("r2", pages) == 2


def keys_of(engine: Engine, name: str) -> list[bytes]:
    chain = engine.chains.of(name, b"space", PAGE)
    chain.follow(range(2 * PAGE))
    assert len(chain.keys) == 2
    return chain.keys


@pytest.mark.weights
def test_stores_that_wait_when_weights_change_are_dropped(engine: Engine) -> None:
    """So a flush does not wait for their copies."""
    first, second = names(2), names(2)
    gate, began = threading.Event(), threading.Event()

    def ready() -> None:
        began.set()
        assert gate.wait(PATIENCE_S)

    for pages, wait in ((first, ready), (second, lambda: None)):
        engine.offloads.offer(pages, None, {"kv": indices(2, 0)}, {"kv": 2}, wait, may_store=True)
    assert began.wait(PATIENCE_S)
    engine.weights.changed()
    gate.set()
    eventually(lambda: engine.offloads.count_ended() == 2)
    assert [engine.offloads.take_ended() for _ in range(2)] == [False, False]
    assert engine.figures.counted["stores_outdated"] == 2
    for rid, pages in (("a", first), ("b", second)):
        assert engine.ask(rid, pages) == 0, "neither is filed under the weights of now"
    assert engine.store(second) and engine.ask("c", second) == 2, "and what was given up is reserved anew"


@pytest.mark.weights
def test_what_was_stored_is_filed_under_the_weights_that_ran_when_it_was_offered(engine: Engine) -> None:
    """Though the server is asked for room later."""
    pages = names(2)
    engine.chains.named("offer", pages)
    before = keys_of(engine, "offer")
    engine.weights.changed()
    assert keys_of(engine, "offer") == before
    engine.chains.named("another", pages)
    assert set(keys_of(engine, "another")).isdisjoint(before)


@pytest.mark.weights
def test_a_load_that_was_promised_for_other_weights_is_not_begun(engine: Engine, server: ServerProcess) -> None:
    pages = names(2)
    assert engine.store(pages)
    assert engine.ask("r", pages) == 2
    begun = engine.lookups.begin_load("r", 2)
    assert begun is not None
    engine.loads.queue(QueuedLoad("r", *begun, {"kv": indices(2, 8)}, engine.weights.epoch))
    engine.weights.changed()
    before = [plane.clone() for side in engine.memory for plane in side]
    assert not engine.loads.finish(engine.loads.start(Ready()))
    assert all(torch.equal(*pair) for pair in zip(before, (p for side in engine.memory for p in side), strict=True))
    eventually(held(server))


def begun_load(engine: Engine, rid: str, at: int) -> list[str]:
    """Stores two pages and queues the load of them into the pages from `at` on."""
    pages = names(2)
    assert engine.store(pages)
    assert engine.ask(rid, pages) == 2
    begun = engine.lookups.begin_load(rid, 2)
    assert begun is not None
    engine.loads.queue(QueuedLoad(rid, *begun, {"kv": indices(2, at)}, engine.weights.epoch))
    return pages


def test_a_load_is_submitted_later_if_its_pages_are_not_known_soon_and_so_are_those_after_it(engine: Engine) -> None:
    may_begin, submitted = threading.Event(), list[str]()
    submit_load = engine.worker.submit_load

    def noted(attachment: Any, plan: Any, *more: Any) -> Any:
        submitted.append(threading.current_thread().name)
        return submit_load(attachment, plan, *more)

    engine.worker.submit_load = noted  # type: ignore[method-assign,assignment]  # of this worker alone
    begun_load(engine, "late", 8)
    late = engine.loads.start(Ready(lambda: False, may_begin.wait))
    begun_load(engine, "next", 10)
    following = engine.loads.start(Ready())
    try:
        assert submitted == [], "the next batch is submitted after the one before"
    finally:
        may_begin.set()
    assert engine.loads.finish(late) and engine.loads.finish(following)
    begun_load(engine, "last", 12)
    assert engine.loads.finish(engine.loads.start(Ready()))
    assert [name.startswith("kvdock-load") for name in submitted] == [True, True, False]


@pytest.mark.parametrize("method", ["submit_load", "submit_together", "_described", "_scatter", "finish_load"])
def test_loads_that_cannot_be_submitted_or_judged_fail_and_end_no_engine(
    method: str, engine: Engine, server: ServerProcess
) -> None:
    for count in (1, 2):
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(engine.worker, method, lambda *given: 1 / 0)
            for number in range(count):
                begun_load(engine, f"{method} {count} {number}", 8 + 2 * number)
            landed = engine.loads.finish(engine.loads.start(Ready()))
            assert landed is (method == "submit_load" and count == 2), "several loads are one copy"
            eventually(held(server))
        attachment = engine.worker.session.attachment
        assert attachment is not None and not attachment.grants._active


def test_a_load_is_told_and_its_pages_are_offered_once_sglang_has_sent_the_tokens(
    engine: Engine, server: ServerProcess
) -> None:
    """Until then nothing is noted, and no thread takes the interpreter lock to report."""
    ended, pages = list[str](), begun_load(engine, "r", 8)
    load_ended = engine.loads._ended

    def noted(load: QueuedLoad, ok: bool | None) -> None:
        ended.append(load.rid)
        load_ended(load, ok)

    engine.loads._ended = noted
    with engine.loads.afterwards.held():
        assert engine.loads.finish(engine.loads.start(Ready()))
        engine.loads.afterwards.run(ended.append, "offered")
        assert ended == [] and engine.loads._threads.settles.is_idle()
        assert not held(server)()
    assert ended == ["r", "offered"]
    eventually(held(server))
    engine.loads.afterwards.run(ended.append, "at once")
    assert ended[-1] == "at once" and pages


def test_a_call_that_fails_afterwards_keeps_no_other_from_running() -> None:
    afterwards, ran = Afterwards(), list[str]()
    with pytest.raises(ZeroDivisionError), afterwards.held():
        afterwards.run(lambda: 1 / 0)
        afterwards.run(ran.append, "the next")
    assert ran == ["the next"]


def test_what_waits_runs_even_if_the_result_cannot_be_processed(engine: Engine, server: ServerProcess) -> None:
    begun_load(engine, "r", 8)
    with pytest.raises(ZeroDivisionError), engine.loads.afterwards.held():
        assert engine.loads.finish(engine.loads.start(Ready()))
        assert 1 / 0
    eventually(held(server))


def test_an_engine_that_ends_before_the_verdict_gives_its_lease_back(engine: Engine, server: ServerProcess) -> None:
    begun_load(engine, "r", 8)
    engine.loads.start(Ready())
    engine.loads.close()
    eventually(held(server))


def test_pages_that_are_trusted_are_promised_without_another_thread(engine: Engine) -> None:
    pages = names(2)
    assert engine.store(pages)
    engine.verifier.is_trusting = True
    engine.verifier.gate.clear()
    assert engine.ask("r", pages) == 2, "nothing was hashed"
    engine.verifier.gate.set()


@pytest.mark.weights
def test_what_was_loaded_is_not_known_under_other_weights(engine: Engine) -> None:
    pages = names(2)
    assert engine.store(pages)
    session = engine.session.attachment.session if engine.session.attachment is not None else ""
    engine.known.add(pages, known_of(session, engine.weights.epoch))
    engine.weights.changed()
    assert engine.store(pages), "it is asked for and stored"
    assert engine.figures.counted.get("stores_known", 0) == 0
    assert engine.ask("r", pages) == 2


def test_every_metric_is_made_and_counts() -> None:
    made: dict[str, Any] = {}

    def make(name: str, help: str, **how: Any) -> Any:
        made[name] = []
        return SimpleNamespace(**dict.fromkeys(("inc", "set", "observe"), made[name].append))

    figures = Figures(SimpleNamespace(Counter=make, Gauge=make, Histogram=make))
    assert set(made) == {f"sglang:kvdock_{name}" for name in METRICS}
    for _ in range(2):
        figures.add("attached", 1)
        figures.add("load_tokens", 64)
        figures.add("load_seconds", 0.5)
    assert made["sglang:kvdock_attached"] == [1], "told when it changes"
    assert made["sglang:kvdock_load_tokens"] == [64, 64] and made["sglang:kvdock_load_seconds"] == [0.5, 0.5]


# --------------------------------------------------------------------------------
# How requests ended.


class Request:
    """What SGLang's Req says of a request."""

    def __init__(self, rid: str, prompt: int) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, range(prompt), list[int]()
        self.prefix_len = self.extend_len = self.retraction_count = 0
        self.to_finish: object = None
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished


def run(
    engine: Engine, req: Request, device: int, pages: list[str], *, loads: bool = True, fails: bool = False
) -> None:
    """SGLang looks up the pages behind the first `device` tokens, admits the request, and loads what it was promised.
    `pages`: () when the rest of the prompt has no whole page."""
    found = engine.ask(req.rid, pages) if pages else 0
    req.prefix_len = device
    begun = engine.lookups.begin_load(req.rid, found) if found and loads else None
    if begun is not None:
        if fails:
            engine.weights.changed()
        engine.loads.queue(QueuedLoad(req.rid, *begun, {"kv": indices(found, 8)}, 0))
        req.prefix_len += found * PAGE
    engine.outcomes.admitted(req, device)
    if begun is not None:
        assert engine.loads.finish(engine.loads.start(Ready())) is not fails
    req.output_ids.append(1)


def end(engine: Engine, req: Request) -> None:
    req.is_finished = True
    engine.outcomes.released(req)


def outcome_of(client: Client, request: str) -> OutcomeView:
    """What the server knows of the request, once the engine has reported its end."""

    def known() -> OutcomeView | None:
        ended = [row.outcome for row in client.requests(request=request).requests if row.outcome is not None]
        return ended[0] if ended else None

    eventually(lambda: known() is not None)
    found = known()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def quick() -> Iterator[ServerProcess]:
    with ServerProcess(heartbeat_s=0.1) as server:
        yield server


@pytest.fixture
def ending(quick: ServerProcess) -> Iterator[tuple[Engine, Client]]:
    made = Engine(quick)
    with Client(quick.unix) as client:
        yield made, client
    made.close()


def runs_of(outcome: OutcomeView) -> list[tuple[int, str, str]]:
    return [(run.tokens, run.origin, run.source or run.why) for run in outcome.runs]


def test_a_prompt_whose_tail_was_looked_up_is_divided_from_its_first_token(ending: tuple[Engine, Client]) -> None:
    engine, client = ending
    pages = names(3)
    assert engine.store(pages)
    req = Request(unique("r"), 2 * PAGE + 4 * PAGE + 10)
    run(engine, req, 2 * PAGE, [*pages, *names(1)])
    end(engine, req)
    found = outcome_of(client, req.rid)
    assert (found.local_tokens, found.asked_from, found.found_tokens) == (2 * PAGE, 2 * PAGE, 5 * PAGE)
    assert (found.loaded_tokens, found.reloaded_tokens, found.why) == (3 * PAGE, 0, "")
    assert runs_of(found) == [
        (2 * PAGE, "local", ""), (3 * PAGE, "loaded", "memory"), (PAGE, "computed", "never_stored"),
        (10, "computed", "tail"),
    ]
    assert found.loaded_bytes == 3 * PAGE * 16 * 4 * LAYERS * 2
    assert found.load_us is not None and found.copy_us is not None and 0 < found.copy_us <= found.load_us


def test_what_the_device_has_by_the_time_of_admission_is_local(ending: tuple[Engine, Client]) -> None:
    """Another request has computed it; the question names it still."""
    engine, client = ending
    pages = names(3)
    assert engine.store(pages)
    req = Request(unique("r"), 4 * PAGE + 1)
    assert engine.ask(req.rid, pages) == 3
    run(engine, req, 2 * PAGE, pages[1:])
    end(engine, req)
    found = outcome_of(client, req.rid)
    assert (found.asked_from, found.found_tokens) == (PAGE, 4 * PAGE)
    assert runs_of(found) == [(2 * PAGE, "local", ""), (2 * PAGE, "loaded", "memory"), (1, "computed", "tail")]


def test_a_retracted_request_counts_once_and_what_it_loads_again_apart(ending: tuple[Engine, Client]) -> None:
    engine, client = ending
    pages = names(3)
    assert engine.store(pages)
    req = Request(unique("r"), 3 * PAGE + 1)
    before = client.status().hits.requests
    run(engine, req, 0, pages)
    engine.outcomes.released(req)  # retracted
    req.retraction_count += 1
    run(engine, req, PAGE, pages[1:])
    for _ in range(2):
        end(engine, req)
    run(engine, req, 0, pages)  # a request whose end was reported is not reported anew
    end(engine, req)
    last = Request(unique("last"), 10)
    run(engine, last, 0, [])
    end(engine, last)
    assert runs_of(outcome_of(client, last.rid)) == [(10, "computed", "short")]
    assert client.status().hits.requests == before + 2
    found = outcome_of(client, req.rid)
    assert (found.loaded_tokens, found.reloaded_tokens) == (3 * PAGE, 2 * PAGE)
    assert runs_of(found) == [(3 * PAGE, "loaded", "memory"), (1, "computed", "tail")]


def test_why_less_was_loaded_than_found(ending: tuple[Engine, Client]) -> None:
    engine, client = ending
    pages = names(2)
    assert engine.store(pages)
    given_up, unverified, aborted = (Request(unique(name), 2 * PAGE + 1) for name in ("given", "slow", "gone"))
    run(engine, given_up, 0, pages, loads=False)
    engine.verifier.gate.clear()
    assert engine.lookups.ask(unverified.rid, pages) == 0
    engine.clock.ahead_s += 6.0
    run(engine, unverified, 0, pages)
    engine.verifier.gate.set()
    run(engine, aborted, 0, pages)
    engine.outcomes.aborted(aborted.rid)
    for req, why in ((given_up, "not_loaded"), (unverified, "unverified")):
        end(engine, req)
        assert runs_of(outcome_of(client, req.rid)) == [(2 * PAGE, "computed", why), (1, "computed", "tail")]
    assert runs_of(outcome_of(client, aborted.rid))[0] == (2 * PAGE, "loaded", "memory")
    failed = Request(unique("failed"), 2 * PAGE + 1)
    run(engine, failed, 0, pages, fails=True)
    end(engine, failed)
    assert runs_of(outcome_of(client, failed.rid)) == [(2 * PAGE, "computed", "load_failed"), (1, "computed", "tail")]


def test_a_declined_hit_is_told_with_its_reason(quick: ServerProcess) -> None:
    engine = Engine(quick, OneProbe(PrefillSpeed(time.perf_counter), time.perf_counter))
    try:
        pages = names(2)
        assert engine.store(pages)
        with Client(quick.unix) as client:
            for name, why in (("first", ""), ("second", "declined_dear")):
                req = Request(unique(name), 2 * PAGE + 1)
                run(engine, req, 0, pages)
                end(engine, req)
                found = outcome_of(client, req.rid)
                assert (found.why, found.found_tokens) == (why, 2 * PAGE)
    finally:
        engine.close()


def test_rests_behind_a_hit_do_not_show_how_fast_prompts_are_computed(engine: Engine) -> None:
    fresh, behind = Request("fresh", 5 * PAGE), Request("behind", 3000)
    engine.outcomes.admitted(fresh, 0)
    behind.prefix_len = PAGE
    engine.outcomes.admitted(behind, PAGE)
    for req, tokens, shows in (
        (fresh, 5 * PAGE, True), (fresh, PAGE - 1, False), (behind, 5 * PAGE, False), (behind, 2000, True),
    ):
        req.extend_len = tokens
        assert engine.outcomes.shows_speed(req) is shows
