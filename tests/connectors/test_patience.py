"""How long a lookup waits: by a clock that moves when somebody waits, and by real questions to a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait as futures_wait
from typing import Any

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import Rig, continued, mortal, stopped, tokens_of

from kvdock.client.client import Client
from kvdock.connectors import waits as patience_module
from kvdock.connectors.cost import LoadChoice, LoadLimits
from kvdock.connectors.engine_client import BegunLookup, EngineClient
from kvdock.connectors.interface import Hit, LookupResult, Miss, Pending
from kvdock.connectors.lookups import FRESH_S
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.waits import (
    IDLE_WAITS,
    MOST_EARLY,
    STEP_SHARE,
    TURN_S,
    EarlyQuestions,
    Patience,
    SentQuestion,
    Waits,
)
from kvdock.protocol.schemas import Lookup, LookupAnswer

WAIT_S = 0.005
LONG_S = 30.0


class Clock:
    """Seconds, which pass while somebody waits. `due`: what ends at a time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def wait(self, futures: list[Future[None]], timeout_s: float) -> None:
        end_s = self.now_s + max(timeout_s, 1e-6)  # it moves, as time does
        while self.due and not futures[0].done() and self.due[0][0] <= end_s:
            due_s, ended = self.due.pop(0)
            self.now_s = max(self.now_s, due_s)
            ended()
        if not futures[0].done():
            self.now_s = end_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(patience_module, "wait", made.wait)
    return made


@pytest.fixture
def patience(clock: Clock) -> Patience:
    made = Patience(WAIT_S, clock)
    made.step(is_idle=False)
    return made


def asked(clock: Clock, patience: Patience, after_s: float | None, took_s: float = 0.001) -> SentQuestion:
    """A question that is answered `after_s` from now; None: never. `took_s`: how long the server takes over it."""
    question = SentQuestion(Future(), clock())
    if after_s is not None:
        def answered() -> None:
            patience.answered(took_s)
            question.answered.set_result(None)

        clock.due.append((clock() + after_s, answered))
    return question


def test_a_lookup_waits_until_its_answer_is_there(clock: Clock, patience: Patience) -> None:
    assert patience.wait(asked(clock, patience, 0.001)) and clock() == 100.001
    assert not patience.is_open


def test_an_answer_that_is_late_opens_the_breaker_and_one_in_time_closes_it(clock: Clock, patience: Patience) -> None:
    late = asked(clock, patience, 0.050, took_s=0.050)
    assert not patience.wait(late) and clock() == pytest.approx(100.0 + WAIT_S, abs=1e-5)
    assert patience.is_open
    patience.step(is_idle=False)
    before_s = clock()
    assert not patience.wait(asked(clock, patience, None)) and clock() == before_s, "nobody waits"
    states = []
    for question in (late, asked(clock, patience, 0.1, took_s=0.001)):
        clock.wait([question.answered], LONG_S)
        states.append(patience.is_open)
    assert states == [True, False]


def test_an_answer_that_is_late_already_gets_one_turn_of_the_interpreter(clock: Clock, patience: Patience) -> None:
    """Its thread may have had none since it was asked."""
    question = asked(clock, patience, 2 * WAIT_S + TURN_S / 2)
    clock.now_s += 2 * WAIT_S
    assert patience.wait(question)
    question = asked(clock, patience, None)
    clock.now_s += 2 * WAIT_S
    before_s = clock()
    assert not patience.wait(question) and patience.is_open
    assert clock() == pytest.approx(before_s + TURN_S)


def test_a_question_behind_one_that_took_long_has_its_own_time(clock: Clock, patience: Patience) -> None:
    asked(clock, patience, 0.008, took_s=0.008)
    clock.now_s += 0.008
    behind = asked(clock, patience, 0.001)
    assert patience.wait(behind) and not patience.is_open


def test_an_idle_engine_trusts_again_whom_it_would_wait_for(clock: Clock, patience: Patience) -> None:
    assert not patience.wait(asked(clock, patience, 0.02, took_s=0.02)) and patience.is_open
    patience.step(is_idle=True)
    again = asked(clock, patience, 0.02, took_s=0.02)
    clock.wait([again.answered], LONG_S)
    assert not patience.is_open


def test_without_a_wait_what_is_not_there_is_late(clock: Clock) -> None:
    patience = Patience(0.0, clock)
    patience.step(is_idle=False)
    assert not patience.wait(asked(clock, patience, 0.001)) and patience.is_open and clock() == 100.0


def test_many_questions_that_are_answered_one_by_one_are_not_late(clock: Clock, patience: Patience) -> None:
    for _ in range(20):  # a step takes 0.2 s, so a tenth of it may be waited
        patience.step(is_idle=False)
        clock.now_s += 0.2
    patience.step(is_idle=False)
    questions = [asked(clock, patience, 0.001 * (1 + number)) for number in range(15)]
    assert all(patience.wait(question) for question in questions) and not patience.is_open
    assert clock() == pytest.approx(100.0 + 20 * 0.2 + 0.015)


def test_the_waiting_of_a_step_is_bounded_and_a_server_in_time_stays_trusted(clock: Clock, patience: Patience) -> None:
    """A question without an answer when the bound is reached makes the engine ask again in its next step."""
    for _ in range(20):
        patience.step(is_idle=False)
        clock.now_s += 0.2
    patience.step(is_idle=False)
    began_s = clock()
    found = [patience.wait(asked(clock, patience, 0.003)) for _ in range(20)]
    assert not all(found) and not patience.is_open
    assert clock() - began_s == pytest.approx(STEP_SHARE * 0.2, rel=0.1)
    patience.step(is_idle=False)
    assert patience.wait(asked(clock, patience, 0.003)), "the next step waits again"


def test_idle_steps_say_nothing_of_what_a_step_costs(clock: Clock, patience: Patience) -> None:
    for _ in range(20):
        patience.step(is_idle=True)
        clock.now_s += 0.2
    patience.step(is_idle=True)
    began_s = clock()
    for _ in range(20):
        patience.wait(asked(clock, patience, 0.003))
    assert clock() - began_s == pytest.approx(WAIT_S, rel=0.01)


def test_an_engine_with_nothing_else_to_do_makes_many_short_steps_before_an_answer_is_late(
    clock: Clock, patience: Patience
) -> None:
    question = asked(clock, patience, None)
    for _ in range(IDLE_WAITS):
        patience.step(is_idle=True)
        began_s = clock()
        assert not patience.is_open and not patience.wait(question)
        assert clock() - began_s <= WAIT_S + 1e-5
    patience.step(is_idle=True)
    assert not patience.wait(question) and patience.is_open
    assert clock() == pytest.approx(100.0 + IDLE_WAITS * WAIT_S, rel=1e-3)


def test_an_idle_engine_waits_no_longer_than_a_call_may_take(clock: Clock) -> None:
    patience, began_s = Patience(WAIT_S, clock, most_s=3 * WAIT_S), clock()
    question = asked(clock, patience, None)
    while not patience.is_open:
        patience.step(is_idle=True)
        assert not patience.wait(question)
    assert clock() == pytest.approx(began_s + 3 * WAIT_S, abs=TURN_S + 1e-5)
    again = asked(clock, patience, 5 * WAIT_S, took_s=5 * WAIT_S)
    clock.wait([again.answered], LONG_S)
    assert patience.is_open, "nor does it trust a server again that takes longer"


def test_other_work_is_waited_for_within_the_same_bound_and_opens_nothing(clock: Clock, patience: Patience) -> None:
    work: Future[None] = Future()
    assert not patience.spend(work) and clock() == pytest.approx(100.0 + WAIT_S, abs=1e-5)
    assert not patience.spend(work) and clock() == pytest.approx(100.0 + WAIT_S, abs=1e-5) and not patience.is_open
    work.set_result(None)
    assert patience.spend(work)


def test_the_first_that_wait_are_asked_about_and_the_next_when_one_of_them_leaves() -> None:
    sent: list[str] = []
    early = EarlyQuestions(sent.append)
    for number in range(MOST_EARLY + 3):
        early.arrived(f"r{number}")
    for name in ("r0", f"r{MOST_EARLY + 1}"):  # the engine has received them, and now its scheduler has
        early.arrived(name)
    assert sent == [f"r{number}" for number in range(MOST_EARLY)]
    early.left("r1")
    assert sent[-1] == f"r{MOST_EARLY}"
    early.left(f"r{MOST_EARLY + 1}")  # aborted while it waited
    early.asked(f"r{MOST_EARLY + 2}")  # the engine takes it first
    early.left("r0")
    early.left("r2")
    assert len(sent) == MOST_EARLY + 1 and not early._waiting
    for name in ("r3", f"r{MOST_EARLY}", f"r{MOST_EARLY + 2}", "never arrived"):
        early.left(name)
    assert not early._open


# --------------------------------------------------------------------------- with a server


class Slow:
    """A client's lookups, which are sent once `go` is set."""

    def __init__(self, client: Client) -> None:
        self.go, self._lookup = threading.Event(), client.lookup
        self.go.set()
        self.bodies: list[Lookup] = []
        client.lookup = self.lookup  # type: ignore[method-assign]  # the real one, later
        client.begin_lookup = lambda body: None  # type: ignore[attr-defined]  # nothing is sent before lookup()

    def lookup(self, body: Lookup, **named: Any) -> LookupAnswer:
        self.bodies.append(body)
        self.go.wait(LONG_S)
        return self._lookup(body, **named)


class LetsGo(Patience):
    """Waits as long as an answer takes. No lookup is sent before the first wait."""

    def __init__(self, clock: Clock, slow: Slow) -> None:
        super().__init__(LONG_S, clock)
        self._slow = slow

    def wait(self, question: SentQuestion) -> bool:
        self._slow.go.set()
        return super().wait(question)


@pytest.fixture
def rig(server: ServerProcess) -> Iterator[Rig]:
    with Rig(server.unix) as made:
        yield made


@pytest.fixture
def slow(rig: Rig) -> Slow:
    return Slow(rig.connector.session.client)


@pytest.fixture
def still() -> Clock:
    """It stands still, so a lookup waits as long as its answer takes. A test moves it."""
    return Clock()


@pytest.fixture
def connector(rig: Rig, still: Clock) -> Iterator[SchedulerConnector]:
    made = SchedulerConnector(rig.connector.session, waits=Waits(Patience(LONG_S, still), clock=still))
    yield made
    made.close()


def hasty(connector: SchedulerConnector) -> None:
    """From now on answers are late at once."""
    connector.lookups.waits.patience = Patience(0.0, connector.lookups.waits.clock)
    connector.lookups.waits.patience.step(is_idle=False)


def test_what_is_expected_is_asked_once_and_answers_for_any_local_tokens(
    rig: Rig, connector: SchedulerConnector, slow: Slow
) -> None:
    tokens = tokens_of(1, 3)
    rig.store("s", tokens, range(12))
    for request, local in (("a", 0), ("b", 64), ("c", 112)):
        connector.lookups.expect(request, tokens)
        assert connector.lookups.lookup(request, tokens, local) == Hit(192)
        assert len(slow.bodies) == 1
        slow.bodies.clear()
        begun = connector.lookups.begin_load(request, [range(20, 32)], local, 192)
        assert begun is not None
        attachment, plan = begun
        assert rig.connector.worker.load(attachment, plan) == 192
        attachment.release()
        first = local // 16
        assert rig.blocks(range(20 + first, 32)).equal(rig.blocks(range(first, 12)))
        connector.finished(request)


def test_a_lookup_whose_answer_is_late_is_a_miss_and_what_it_finds_is_given_back(
    rig: Rig, client: Client, connector: SchedulerConnector, slow: Slow, still: Clock
) -> None:
    tokens = tokens_of(2, 3)
    rig.store("s", tokens, range(12))
    hasty(connector)
    slow.go.clear()
    assert connector.lookups.lookup("r", tokens, 0) == Miss()
    assert connector.lookups.lookup("r", tokens, 0) == Miss() and connector.lookups.late == 1
    connector.lookups.drop_lookup("r")  # it was admitted, with nothing to load
    slow.go.set()
    connector.lookups.wait_for_answer(LONG_S)
    assert len(slow.bodies) == 1
    eventually(lambda: rig.leases(client) == 0)
    connector.lookups.waits.patience = Patience(LONG_S, still)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(192), "after a preemption it is asked about anew"
    connector.finished("r")
    eventually(lambda: rig.leases(client) == 0)


def test_the_engines_thread_sends_a_question_unless_others_wait_for_the_thread_that_asks(
    rig: Rig, connector: SchedulerConnector
) -> None:
    client, begun = rig.connector.session.client, list[str]()
    assert isinstance(client, EngineClient)
    real = client.begin_lookup

    def begin_lookup(body: Lookup) -> BegunLookup | None:
        begun.append(threading.current_thread().name)
        return real(body)

    client.begin_lookup = begin_lookup  # type: ignore[method-assign]  # the real one, and noted
    rig.store("s", tokens_of(11, 3), range(12))
    assert connector.lookups.lookup("r", tokens_of(11, 3), 0) == Hit(192)
    assert begun == [threading.current_thread().name]
    go = threading.Event()
    connector.lookups._asking.run(lambda: (go.wait(LONG_S), None)[1])
    connector.lookups.expect("later", tokens_of(11, 3))
    go.set()
    assert connector.lookups.lookup("later", tokens_of(11, 3), 0) == Hit(192) and len(begun) == 1
    connector.finished("r")
    connector.finished("later")


def test_a_late_answer_serves_the_lookups_after_it(rig: Rig, connector: SchedulerConnector, slow: Slow) -> None:
    tokens = tokens_of(3, 3)
    rig.store("s", tokens, range(12))
    hasty(connector)
    slow.go.clear()
    assert connector.lookups.lookup("r", tokens, 0) == Miss()
    slow.go.set()
    connector.lookups.wait_for_answer(LONG_S)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(192) and len(slow.bodies) == 1
    connector.finished("r")


def test_an_old_answer_that_was_not_all_is_asked_for_once_more(
    rig: Rig, client: Client, connector: SchedulerConnector, slow: Slow, still: Clock
) -> None:
    tokens = tokens_of(4, 3)
    rig.store("s", tokens, range(12), computed=64)
    connector.lookups.expect("r", tokens)
    connector.lookups.expect("never", tokens_of(5, 3))
    connector.lookups.wait_for_answer(LONG_S)
    rig.store("t", tokens, range(12))
    assert connector.lookups.lookup("r", tokens, 0) == Hit(64), "the answer is new"
    still.now_s += 2 * FRESH_S
    assert connector.lookups.lookup("r", tokens, 0) == Hit(192)
    assert connector.lookups.lookup("never", tokens_of(5, 3), 0) == Miss()
    assert rig.leases(client) == 1, "the same lease, longer"
    still.now_s += 2 * FRESH_S
    asked_before = len(slow.bodies)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(192)
    assert len(slow.bodies) == asked_before, "there is no more to find"
    connector.finished("r")
    connector.finished("never")
    eventually(lambda: rig.leases(client) == 0)


def test_an_old_answer_holds_while_it_is_asked_for_once_more(
    rig: Rig, client: Client, connector: SchedulerConnector, slow: Slow, still: Clock
) -> None:
    """The lease of the answer that was used is not given back when the other one comes."""
    tokens = tokens_of(6, 3)
    rig.store("s", tokens, range(12), computed=64)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(64)
    rig.store("t", tokens, range(12))
    still.now_s += 2 * FRESH_S
    hasty(connector)
    slow.go.clear()
    assert connector.lookups.lookup("r", tokens, 0) == Hit(64)
    eventually(lambda: len(slow.bodies) == 2)
    begun = connector.lookups.begin_load("r", [range(20, 24)], 0, 64)
    assert begun is not None
    slow.go.set()
    connector.lookups.wait_for_answer(LONG_S)
    attachment, plan = begun
    assert rig.leases(client) == 1
    assert rig.connector.worker.load(attachment, plan) == 64
    attachment.release()
    assert rig.blocks(range(20, 24)).equal(rig.blocks(range(4)))
    connector.finished("r")


def test_an_answer_to_an_earlier_question_is_not_taken_for_the_present_one(
    rig: Rig, client: Client, connector: SchedulerConnector, slow: Slow, still: Clock
) -> None:
    """Asked with 128 local tokens, once more, and then with none: what was leased for the first two leaves a gap."""
    tokens = tokens_of(10, 6)
    rig.store("s", tokens, range(24), computed=256)
    assert connector.lookups.lookup("r", tokens, 128) == Hit(256)
    still.now_s += 2 * FRESH_S
    hasty(connector)
    slow.go.clear()
    assert connector.lookups.lookup("r", tokens, 128) == Hit(256), "the older answer"
    connector.lookups.waits.patience = LetsGo(still, slow)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(256)
    begun = connector.lookups.begin_load("r", [range(40, 56)], 0, 256)
    assert begun is not None
    attachment, plan = begun
    assert sorted(piece.chunk for piece in plan.pieces) == [0, 1, 2, 3]
    assert rig.connector.worker.load(attachment, plan) == 256
    attachment.release()
    assert rig.blocks(range(40, 56)).equal(rig.blocks(range(16)))
    connector.finished("r")
    eventually(lambda: rig.leases(client) == 0)


def test_nothing_is_loaded_from_a_lease_that_begins_behind_what_is_at_hand(
    rig: Rig, connector: SchedulerConnector
) -> None:
    tokens = tokens_of(11, 4)
    rig.store("s", tokens, range(16))
    assert connector.lookups.lookup("r", tokens, 128) == Hit(256)
    assert connector.lookups.begin_load("r", [range(20, 36)], 0, 256) is None
    connector.finished("r")


def test_a_question_with_fewer_keys_gets_a_lease_of_its_own(rig: Rig, client: Client, slow: Slow) -> None:
    """A share of the prompt may be loaded: the more is local, the more keys are asked for."""
    tokens = tokens_of(12, 8)
    rig.store("s", tokens, range(32))
    connector = SchedulerConnector(
        rig.connector.session, waits=Waits(Patience(LONG_S, time.perf_counter)),
        choice=LoadChoice(LoadLimits(max_load_share=0.5)),
    )
    assert connector.lookups.lookup("r", tokens, 192) == Hit(448)
    assert connector.lookups.lookup("r", tokens, 0) == Hit(256)
    connector.lookups.expect("early", tokens)
    assert connector.lookups.lookup("early", tokens, 192) == Hit(448), "asked behind the early question, and waited for"
    connector.finished("r")
    connector.finished("early")
    eventually(lambda: rig.leases(client) == 0)
    connector.close()


def test_a_stopped_server_costs_one_moment_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with mortal() as server, Rig(server.unix) as rig:
        patience = Patience(0.05, time.perf_counter)
        patience.step(is_idle=False)
        connector = SchedulerConnector(rig.connector.session, waits=Waits(patience))
        waited = [0.0]

        def counted(futures: list[Future[None]], timeout_s: float) -> object:
            waited.append(timeout_s)
            return futures_wait(futures, timeout_s)

        monkeypatch.setattr(patience_module, "wait", counted)
        stopped(server)
        found: list[LookupResult] = []
        for number in range(10):
            patience.step(is_idle=False)
            found.append(connector.lookups.lookup(f"r{number}", tokens_of(7 + number, 2), 0))
        continued(server)
        assert found == [Miss()] * 10
        assert sum(waited) <= 0.05 + 0.01
        connector.close()


def test_no_lookup_waits_behind_another_call(rig: Rig, connector: SchedulerConnector) -> None:
    """Cancels, verifications and the like have a thread of their own."""
    tokens, go = tokens_of(8, 1), threading.Event()
    rig.store("s", tokens, range(4))

    def hold() -> None:
        go.wait(LONG_S)

    connector.run(hold)
    try:
        assert connector.lookups.lookup("r", tokens, 0) == Hit(64)
    finally:
        go.set()
    connector.finished("r")
    assert not isinstance(connector.lookups.lookup("other", tokens_of(9, 1), 0), Pending)
    connector.finished("other")
