"""Waiting for what another engine computes: how long by a clock, and with a real server and producers that store, give
up, stand still and die. vLLM's own part is played by hand."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from api_helpers import PATIENCE_S, Engine as Member, ServerProcess, attach, eventually, manifest, unique
from forks import forked

from kvdock.client.client import Client
from kvdock.connectors.cost import START_TOKENS_PER_S, PrefillSpeed
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.scheduler import EngineView, VllmScheduler
from kvdock.connectors.vllm.setup import Settings
from kvdock.connectors.vllm.steps import Report
from kvdock.connectors.vllm.tables import BlockBudget
from kvdock.connectors.waits import ASK_S, STALL_SHARE, ComputeOnce
from kvdock.protocol.keys import chunk_keys
from kvdock.protocol.schemas import Abort, BeingStored, Group, Manifest

BLOCK, CHUNK, CHUNKS = 16, 32, 8
TOKENS = list(range(7, 7 + CHUNK * CHUNKS + 1))
"""The last one is computed by everybody."""
LONG_S = 20.0
WAITS = (None, False)


class Clock:
    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


# ---------------------------------------------------------------------- by the clock


def test_the_speed_is_that_of_the_step_that_has_ended_where_others_are_planned_ahead() -> None:
    """A step of 8,000 tokens takes 0.4 s, one that only decodes 0.01 s; a step is planned when the one before the last
    has ended."""
    clock = Clock()
    speed, ended_s = PrefillSpeed(clock, 1), [0.0]
    for tokens in [8000, 0, 0, 0] * 5:
        speed.step(tokens)
        clock.now_s = ended_s[-1]
        ended_s.append(ended_s[-1] + (0.4 if tokens else 0.01))
    assert speed.tokens_per_s == pytest.approx(20_000)


def test_the_speed_is_that_of_large_steps() -> None:
    clock = Clock()
    speed = PrefillSpeed(clock)
    assert speed.tokens_per_s == START_TOKENS_PER_S
    for tokens, took_s in ((8192, 0.5), (8192, 0.5), (100, 0.3), (0, 60.0), (8192, 0.5), (0, 9.0)):
        speed.step(tokens)
        clock.now_s += took_s
    speed.step(0)
    assert speed.tokens_per_s == pytest.approx(8192 / 0.5)


def test_a_first_large_step_makes_small_ones_count_no_more() -> None:
    clock = Clock()
    speed = PrefillSpeed(clock)
    for tokens, took_s in ((100, 0.1), (8192, 0.5)):
        speed.step(tokens)
        clock.now_s += took_s
    speed.step(0)
    assert speed.tokens_per_s == pytest.approx(8192 / 0.5)


def test_a_step_that_stood_still_does_not_change_the_speed() -> None:
    speed = PrefillSpeed(Clock())
    for took_s in (0.25, 60.0, 0.25, 0.25, 60.0, 0.25, 0.25):
        speed.ended(8192, took_s)
    assert speed.tokens_per_s == pytest.approx(8192 / 0.25)


@pytest.mark.parametrize(("prompt", "hit", "more_steps"), [
    (4000, 3900, 0), (8000, 7000, 0), (8000, 8000, 1), (8100, 8000, 1), (24_100, 24_000, 3), (20_000, 10_000, 1),
])
def test_what_a_hit_saves_are_its_tokens_and_whole_steps(prompt: int, hit: int, more_steps: int) -> None:
    """A step takes 20 ms, and 25 us for each token; the largest one has 8,000."""
    speed = PrefillSpeed(Clock())
    for tokens in (8000, 50, 1, 6000, 1, 600, 8000, 3, 1):
        speed.ended(tokens if tokens >= 50 else 0, 0.02 + 25e-6 * tokens, tokens)
    assert hit / speed.beside(hit, prompt - hit) == pytest.approx(0.02 * more_steps + 25e-6 * hit, rel=0.01)


def test_long_steps_of_an_engine_that_mostly_decodes_leave_a_prompt_half_of_its_time() -> None:
    speed = PrefillSpeed(Clock())
    for tokens, took_s in ((8000, 0.2), (1, 0.5), (1, 0.5)):
        speed.ended(tokens if tokens > 1 else 0, took_s, tokens)
    assert speed.beside(4000, 100) == pytest.approx(80_000), "in a step that it needs in any case"
    assert speed.beside(8000, 100) == pytest.approx(40_000), "and one more"


class Waiting:
    """One request, at a speed of 50,000 tokens a second."""

    def __init__(self, share: float = 1.0) -> None:
        self.clock, self.ends = Clock(), list[tuple[str, float]]()
        speed = PrefillSpeed(self.clock)
        self.once = ComputeOnce(share, speed, self.clock, lambda how, seconds: self.ends.append((how, seconds)))

    def after(self, seconds: float, tokens: int, committed: int, hit: int = 0, local: int = 0) -> bool:
        self.clock.now_s += seconds
        stored = BeingStored(tokens, committed) if tokens else None
        return self.once.waits("r", stored, hit, local)


def test_a_request_waits_no_longer_than_its_share_of_computing() -> None:
    waiting = Waiting(share=0.5)  # of 0.6 s
    assert waiting.after(0, 30_000, 0)
    for committed in range(1000, 15_000, 1000):
        assert waiting.after(0.02, 30_000, committed)
    assert not waiting.after(0.03, 30_000, 20_000), "0.31 s"
    assert [how for how, _ in waiting.ends] == ["expired"]
    assert not waiting.after(0.01, 30_000, 20_000), "it does not wait again"
    waiting.once.forget("r")
    assert waiting.after(0.01, 30_000, 0)


def test_a_request_waits_for_half_of_that_while_nothing_more_is_stored() -> None:
    waiting = Waiting()
    assert waiting.after(0, 30_000, 0)
    assert waiting.after(0.29, 30_000, 10_000)
    assert waiting.after(0.29, 30_000, 10_000)
    assert not waiting.after(0.011, 30_000, 10_000)
    assert [how for how, _ in waiting.ends] == ["stalled"] and waiting.ends[0][1] == pytest.approx(0.591)


@pytest.mark.parametrize(("hit", "how"), [(30_000, "fulfilled"), (10_000, "withdrawn")])
def test_a_wait_ends_when_nobody_stores_any_more(hit: int, how: str) -> None:
    waiting = Waiting()
    assert waiting.after(0, 30_000, 0) and waiting.once.is_waiting("r")
    assert not waiting.after(0.1, 0, 0, hit=hit) and not waiting.once.is_waiting("r")
    assert [name for name, _ in waiting.ends] == [how] and waiting.ends[0][1] == pytest.approx(0.1)


def test_nobody_waits_for_little() -> None:
    little = int(2 * ASK_S * START_TOKENS_PER_S) - 1
    assert not Waiting().after(0, little, 0)
    assert Waiting().after(0, little + 1, 0)
    assert not Waiting().after(0, little + 1, 1)
    assert not Waiting().after(0, little + 1, 0, local=BLOCK), "what is at hand needs no computing"
    assert not Waiting().after(0, 0, 0)


# ---------------------------------------------------------------------- with a server


STEP_S = 0.001


class Consumer:
    """A VllmScheduler whose engine computes so slowly that it may wait `may_wait_s` for TOKENS. By its clock, only
    steps take time: an answer of the server is there when a step wants it."""

    def __init__(self, address: str, described: Manifest, *, may_wait_s: float = LONG_S, on: bool = True) -> None:
        self.clock, self.client = Clock(), Client(address, timeout_s=PATIENCE_S)
        session = EngineSession(
            self.client, described, Identity(unique("instance"), unique("member"), ranks=(), scheduler=True)
        )
        group = KVGroup(None, BLOCK, {"a": 128}, False)
        budget = BlockBudget((group,), blocks=100, longest_tokens=1024, step_tokens=64)
        self.scheduler = VllmScheduler(
            session, EngineView((group,)), budget,
            Settings(address=address, compute_once=float(on), lookup_wait_s=LONG_S), clock=self.clock,
        )
        self.scheduler._speed.ended(CHUNK * CHUNKS, may_wait_s)
        self.asked, self.arrived = 0, set[str]()
        lookup = self.client.lookup

        def counted(*arguments: Any, **named: Any) -> Any:
            self.asked += 1
            return lookup(*arguments, **named)

        self.client.lookup = counted  # type: ignore[method-assign]  # counts
        self.scheduler.start()
        assert session.attachment is not None
        self.scheduler.take(Report(epochs={0: session.attachment.epoch}))  # the worker is attached to the same server

    def ask(self, name: str, tokens: list[int] = TOKENS) -> tuple[int | None, bool]:
        request = request_of(name, tokens)
        if name not in self.arrived:
            self.arrived.add(name)
            self.scheduler.arrived(request)
        return self.scheduler.lookup(request, 0)

    def idle(self) -> None:
        self.clock.now_s += STEP_S
        self.build({})

    def build(self, scheduled: dict[str, int], new: tuple[Any, ...] = ()) -> None:
        none = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        self.scheduler.build(SimpleNamespace(
            preempted_req_ids=None, scheduled_new_reqs=new, scheduled_cached_reqs=none,
            num_scheduled_tokens=scheduled, finished_req_ids=set(),
        ))

    def compute(self, name: str, count: int) -> None:
        """The first step of a request that was admitted."""
        blocks: list[list[int | None]] = [list(range(1, 1 + len(TOKENS) // BLOCK + 1))]
        self.scheduler.allocated(request_of(name), blocks, 0)
        self.build({name: count}, (SimpleNamespace(req_id=name, block_ids=blocks),))

    def until_admitted(self, name: str) -> tuple[int | None, bool]:
        """As vLLM steps an engine that has nothing else to do."""
        end_s = time.monotonic() + PATIENCE_S
        while (found := self.ask(name)) == WAITS:
            assert time.monotonic() < end_s, "it waits for ever"
            self.idle()
            time.sleep(STEP_S)  # others get no less time than the steps take
        return found

    def ends(self) -> dict[str, Any]:
        return {
            name.removeprefix("waits_"): count
            for name, count in self.scheduler.figures.take().items() if name.startswith("waits_")
        }


def wait_for(go: threading.Event) -> None:
    assert go.wait(PATIENCE_S)


def request_of(name: str, tokens: list[int] = TOKENS) -> Any:
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, all_token_ids=tokens, num_tokens=len(tokens),
        num_prompt_tokens=len(tokens), num_output_tokens=0, max_tokens=0, num_computed_tokens=0,
    )


@pytest.fixture
def described() -> Manifest:
    return manifest(
        chunk_tokens=CHUNK, block_tokens=BLOCK, cache_salt=unique("salt"), groups=(Group(part_bytes=256),)
    )


@contextmanager
def consumer(server: ServerProcess, described: Manifest, **more: Any) -> Iterator[Consumer]:
    made = Consumer(server.unix, described, **more)
    try:
        yield made
    finally:
        made.scheduler.close()


def member_like(client: Client, described: Manifest) -> tuple[Member, list[str]]:
    """A producer that is driven by hand, and the keys of TOKENS."""
    fields = {name: getattr(described, name) for name in ("chunk_tokens", "block_tokens", "cache_salt", "groups")}
    member = attach(client, **fields)
    namespace = bytes.fromhex(member.attached.namespace)
    return member, [key.hex() for key in chunk_keys(namespace, TOKENS, CHUNK)]


@pytest.fixture
def producer(server: ServerProcess, described: Manifest) -> Iterator[tuple[Member, list[str]]]:
    with Client(server.unix) as client:
        made = member_like(client, described)
        yield made
        client.leave(made[0].session, made[0].member)
        made[0].close()


def test_a_request_waits_until_all_is_stored(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    assert member.lookup(keys, computes=True).being_stored is None
    with consumer(server, described) as engine:
        assert engine.ask("r") == WAITS
        assert engine.ask("other", [3] * 100) == (0, False), "others go on"
        member.store(keys[:3])
        for _ in range(300):
            engine.idle()
            assert engine.ask("r") == WAITS
        member.store(keys[3:], parent=keys[2])
        assert engine.until_admitted("r") == (CHUNK * CHUNKS, True)
        assert engine.ends() == {"fulfilled": 1}


def test_the_step_that_asks_again_has_the_answer(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    member.lookup(keys, computes=True)
    with consumer(server, described) as engine:
        assert engine.ask("r") == WAITS
        engine.idle()
        member.store(keys)
        assert engine.ask("r") == WAITS, "it is asked about no sooner"
        engine.clock.now_s += 2 * ASK_S
        assert engine.ask("r") == (CHUNK * CHUNKS, True)


def test_who_waits_asks_every_20_ms_at_most(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    member.lookup(keys, computes=True)
    with consumer(server, described) as engine:
        for _ in range(500):
            assert engine.ask("r") == WAITS
            engine.idle()
        assert 500 * STEP_S / (2 * ASK_S) <= engine.asked <= 500 * STEP_S / ASK_S + 1


def test_who_has_waited_too_long_loads_what_is_there(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    member.lookup(keys, computes=True)
    with consumer(server, described, may_wait_s=0.4) as engine:
        began_s = engine.clock()
        assert engine.ask("r") == WAITS
        member.store(keys[:2])
        assert engine.until_admitted("r") == (2 * CHUNK, True)
        assert 0 <= engine.clock() - began_s - STALL_SHARE * 0.4 <= 3 * ASK_S
        assert engine.ends() == {"stalled": 1}


@pytest.mark.parametrize("end", ["withdraws", "has no room", "leaves"])
def test_nobody_waits_for_a_producer_that_gives_up(
    end: str, server: ServerProcess, described: Manifest
) -> None:
    with Client(server.unix) as client, consumer(server, described) as engine:
        member, keys = member_like(client, described)
        member.lookup(keys, computes=True)
        assert engine.ask("r") == WAITS
        if end == "withdraws":
            client.withdraw(member.session, ["another", "r"])
        elif end == "has no room":
            granted = member.reserve(keys)
            assert granted.reservation is not None and engine.ask("r") == WAITS
            client.abort(granted.reservation, Abort(session=member.session, member=member.member))
        else:
            client.leave(member.session, member.member)
        assert engine.until_admitted("r") == (0, False)
        assert engine.ends() == {"withdrawn": 1}
        member.close()


def promise_and_die(address: str, described: Manifest, parent: Connection) -> None:
    with Client(address) as client:
        member, keys = member_like(client, described)
        member.lookup(keys, computes=True)
        parent.send("promised")
        parent.recv()
        os.kill(os.getpid(), signal.SIGKILL)


def test_nobody_waits_for_a_producer_that_is_killed(server: ServerProcess, described: Manifest) -> None:
    with forked(promise_and_die, server.unix, described) as process, consumer(server, described) as engine:
        assert process.recv() == "promised"
        assert engine.ask("r") == WAITS
        process.send("die")
        assert engine.until_admitted("r") == (0, False)
        assert engine.ends() == {"withdrawn": 1}


@pytest.mark.parametrize("end", ["finished", "preempted", "dropped store"])
def test_a_request_that_ends_early_takes_its_promise_back(
    end: str, server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    with consumer(server, described) as engine:
        assert engine.until_admitted("r") == (0, False)
        found = member.lookup(keys).being_stored
        assert found is not None and found.tokens == CHUNK * CHUNKS and found.committed == 0
        if end == "dropped store":
            engine.scheduler.allocated(request_of("r"), [list(range(1, 20))], 0)
            go = threading.Event()
            engine.scheduler._connector.stores.run(wait_for, go)
            engine.build({"r": 2 * CHUNK}, (SimpleNamespace(req_id="r", block_ids=[list(range(1, 20))]),))
            engine.scheduler._stores.drop_unsent()  # before its slots are asked for
            go.set()
        else:
            engine.compute("r", 2 * CHUNK)
            if end == "finished":
                engine.scheduler.finished(request_of("r"), has_answered=False)
            else:
                engine.scheduler._forget("r")

        def promised() -> int:
            found = member.lookup(keys).being_stored
            return found.tokens if found is not None else 0

        eventually(lambda: promised() <= 2 * CHUNK)


def test_a_request_without_room_takes_back_what_it_cannot_store(server: ServerProcess) -> None:
    large = manifest(
        chunk_tokens=CHUNK, block_tokens=BLOCK, cache_salt=unique("salt"), groups=(Group(part_bytes=1 << 22),)
    )
    with Client(server.unix) as client, consumer(server, large) as engine:
        member, keys = member_like(client, large)
        assert engine.until_admitted("r") == (0, False)
        engine.compute("r", len(TOKENS))

        def promised() -> int | None:
            """What is reserved, in the end."""
            found = member.lookup(keys).being_stored
            return found.tokens if found is not None else None

        eventually(lambda: 0 < (promised() or 0) < CHUNK * CHUNKS)
        member.leave()


def test_a_request_that_stores_all_asks_for_nothing_more(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    """What was offered is reserved, and others know by that."""
    member, keys = producer
    with consumer(server, described) as engine:
        assert engine.until_admitted("r") == (0, False)
        withdrawn: list[Any] = []
        engine.client.withdraw = withdrawn.append  # type: ignore[method-assign,assignment]  # counts
        engine.compute("r", len(TOKENS))
        engine.scheduler.finished(request_of("r"), has_answered=False)
        engine.scheduler._connector.stores.run(lambda: None).result(PATIENCE_S)
        assert withdrawn == []
        found = member.lookup(keys).being_stored
        assert found is not None and found.tokens == CHUNK * CHUNKS


def test_off_is_as_if_nobody_else_computed(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    member.lookup(keys[:4], computes=True)
    with consumer(server, described, on=False) as engine:
        assert engine.until_admitted("r") == (0, False) and engine.asked == 1
        assert engine.ends() == {}
        with Client(server.unix) as client:
            third, _ = member_like(client, described)
            found = third.lookup(keys).being_stored
            assert found is not None and found.tokens == 4 * CHUNK, "the engine that is off has promised nothing"
            third.leave()


def test_a_request_that_ends_before_its_lookup_was_sent_promises_nothing(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    with consumer(server, described) as engine:
        lookup = engine.client.lookup
        ended, sent = threading.Event(), threading.Event()

        def late(*arguments: Any, **named: Any) -> Any:
            ended.wait(PATIENCE_S)
            try:
                return lookup(*arguments, **named)
            finally:
                sent.set()

        engine.client.lookup = late  # type: ignore[method-assign]  # the real one, a moment later
        engine.scheduler.arrived(request_of("r"))
        engine.scheduler.finished(request_of("r"), has_answered=False)
        ended.set()
        assert sent.wait(PATIENCE_S)
        eventually(lambda: member.lookup(keys).being_stored is None)


def test_a_late_withdrawal_leaves_the_promise_of_the_request_that_came_back(
    server: ServerProcess, described: Manifest, producer: tuple[Member, list[str]]
) -> None:
    member, keys = producer
    with consumer(server, described) as engine:
        assert engine.until_admitted("r") == (0, False)
        go = threading.Event()
        engine.scheduler._connector.stores.run(wait_for, go)  # at work for others
        engine.scheduler._forget("r")
        assert engine.until_admitted("r") == (0, False)
        go.set()
        engine.scheduler._connector.stores.run(lambda: None).result(PATIENCE_S)
        assert member.lookup(keys).being_stored is not None, "it computes"
