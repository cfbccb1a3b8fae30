"""What an engine's connector tells of its requests' loads: what they took, and what computing would have taken."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from api_helpers import ServerProcess, eventually
from connector_helpers import CHUNK, Spectator, engine_over, kvdock_of, mortal, successor, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.interface import Hit, LoadDone, Miss
from kvdock.connectors.outcomes import LONG_TOKENS, EngineOutcomes
from kvdock.engine.engine import Engine
from kvdock.engine.request import SamplingParams
from kvdock.protocol.hits import COMPUTED, PromptRun
from kvdock.protocol.outcomes import Outcome, OutcomeView


@pytest.fixture(scope="module")
def quick() -> Iterator[ServerProcess]:
    with ServerProcess(heartbeat_s=0.1) as server:
        yield server


class Telling:
    """An engine's verbs at times that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.told, self.epoch = 100.0, list[Outcome](), 0
        self.outcomes = EngineOutcomes(self.told.append, lambda: self.now_s, lambda request: self.epoch)

    def compute(self, request: str, computed: int, seconds: float) -> None:
        """A step of the request alone."""
        self.outcomes.step([])
        self.now_s += seconds
        self.outcomes.begin_store(request, computed)

    def load(
        self, request: str, local: int, hit: int, seconds: float, valid: int | None = None, tokens: int = 400
    ) -> None:
        """`tokens`: those that it has when it is looked up."""
        self.outcomes.lookup(request, tokens, local, Hit(hit))
        self.outcomes.begin_load(request, local, hit)
        self.outcomes.loading(request, 1 << 20)
        self.now_s += seconds
        self.outcomes.step([(LoadDone(request, hit if valid is None else valid), seconds / 2)])

    def end(self, request: str, *, comes_back: bool = False) -> None:
        self.outcomes.finished(request, comes_back=comes_back)


def test_the_speed_is_that_of_steps_that_compute_prompts_whatever_the_engine_waits() -> None:
    engine = Telling()
    for request in ("first", "second"):
        engine.outcomes.lookup(request, 400, 0, Miss())
        for end in (100, 200, 300, 400):
            engine.compute(request, end, 0.05)
            engine.now_s += 7.0  # nothing is to be computed: the engine sleeps before it polls
        for token in range(401, 420):
            engine.compute(request, token, 0.04)
        engine.end(request)
    engine.load("third", 100, 300, 0.02)
    engine.end("third")
    assert [one.prefill_tokens_per_s for one in engine.told[1:]] == pytest.approx([2000.0, 2000.0])
    last = engine.told[-1]
    assert (last.loaded_tokens, last.loaded_bytes, last.load_us, last.copy_us) == (200, 1 << 20, 20_000, 10_000)


def test_a_load_that_fell_short_took_its_time_and_what_lay_in_it_counts_as_loaded() -> None:
    engine = Telling()
    engine.load("r", 64, 320, 0.02, valid=128)
    engine.end("r")
    (told,) = engine.told
    assert (told.local_tokens, told.found_tokens, told.loaded_tokens, told.why) == (64, 320, 64, "load_failed")
    assert (told.load_us, told.copy_us) == (20_000, None)


def test_a_request_that_ends_during_its_load_has_not_run_and_is_told_of_by_nobody() -> None:
    engine = Telling()
    engine.outcomes.lookup("r", 400, 0, Hit(128))
    engine.outcomes.begin_load("r", 0, 128)
    engine.end("r")
    engine.outcomes.step([(LoadDone("r", 128), 0.1)])
    engine.end("r")
    assert engine.told == []


def test_a_preempted_request_that_ends_during_its_next_load_has_run() -> None:
    engine = Telling()
    engine.load("r", 0, 128, 0.02)
    engine.end("r", comes_back=True)
    engine.outcomes.lookup("r", 420, 64, Hit(384))
    engine.outcomes.begin_load("r", 64, 384)
    engine.now_s += 0.03
    engine.end("r")
    (told,) = engine.told
    assert (told.prompt_tokens, told.loaded_tokens, told.reloaded_tokens, told.load_us) == (400, 128, 0, 20_000)


def test_a_request_that_ends_before_it_is_admitted_is_told_of_by_nobody() -> None:
    engine = Telling()
    engine.outcomes.lookup("r", 400, 0, Hit(128))
    engine.end("r")
    assert engine.told == []


def test_the_prompt_of_a_preempted_request_is_divided_as_it_was_first_admitted() -> None:
    engine = Telling()
    engine.epoch = 3
    engine.load("r", 64, 192, 0.02)
    engine.compute("r", 420, 0.1)
    engine.end("r", comes_back=True)
    assert engine.told == [], "it has not ended"
    engine.epoch = 4
    engine.load("r", 128, 384, 0.03, tokens=420)
    engine.compute("r", 421, 0.1)
    engine.end("r")
    assert engine.told == [Outcome(
        request="r", epoch=3, prompt_tokens=400, local_tokens=64, found_tokens=192, loaded_tokens=128,
        reloaded_tokens=256, loaded_bytes=2 << 20, load_us=50_000, copy_us=25_000,
    )]


def test_a_load_that_fails_after_a_preemption_changes_nothing_about_the_prompt() -> None:
    engine = Telling()
    engine.load("r", 0, 128, 0.02)
    engine.end("r", comes_back=True)
    engine.load("r", 64, 384, 0.03, valid=192)
    engine.end("r")
    (told,) = engine.told
    assert (told.local_tokens, told.loaded_tokens, told.reloaded_tokens, told.why) == (0, 128, 128, "")
    assert (told.load_us, told.copy_us) == (50_000, None)


@pytest.mark.parametrize(("rest", "shown"), [(LONG_TOKENS - 1, False), (LONG_TOKENS, True)])
@pytest.mark.parametrize("has_loaded", [True, False])
def test_the_rest_of_a_prompt_behind_a_hit_shows_the_speed_only_if_it_is_long(
    rest: int, shown: bool, has_loaded: bool
) -> None:
    """A step has a fixed cost, so short rests would make the engine look slow, and loads look good."""
    assert LONG_TOKENS == 1024
    engine = Telling()
    if has_loaded:
        engine.load("r", 0, 128, 0.02, tokens=4000)
    else:
        engine.outcomes.lookup("r", 4000, 128, Miss())
    engine.compute("r", 128 + rest, 0.5)
    engine.outcomes.step([])
    engine.end("r")
    assert [one.prefill_tokens_per_s for one in engine.told] == [rest / 0.5 if shown else 0.0]


def test_a_step_that_also_computes_a_prompt_without_a_hit_shows_the_speed() -> None:
    engine = Telling()
    engine.load("short rest", 0, 128, 0.02)
    engine.outcomes.lookup("whole", 400, 0, Miss())
    engine.compute("short rest", 228, 0.1)
    engine.outcomes.begin_store("whole", 100)
    engine.outcomes.step([])
    engine.end("whole")
    assert [one.prefill_tokens_per_s for one in engine.told] == pytest.approx([2000.0])


def run(engine: Engine, request: str, prompt: list[int]) -> None:
    engine.add_request(prompt, SamplingParams(max_tokens=2), request)
    while engine.has_unfinished:
        engine.step()
    assert engine.drain(20.0)


def explained(client: Client, request: str) -> str:
    """What people read of it, once its engine has told what became of it."""
    told(client, request)
    return "\n".join(one.text for one in client.explain(request).sentences)


def told(client: Client, request: str) -> OutcomeView:
    def outcomes() -> list[OutcomeView]:
        return [one.outcome for one in client.requests(request=request).requests if one.outcome is not None]

    eventually(lambda: bool(outcomes()))
    return outcomes()[0]


def test_a_real_engine_tells_what_its_load_took_and_saved(quick: ServerProcess) -> None:
    prompt = tokens_of(91, 6, tail=7)
    outcomes = dict[str, OutcomeView]()
    with Client(quick.unix) as client:
        for name in ("writes", "reads"):
            engine = engine_over(quick.unix)
            try:
                run(engine, f"before {name}", tokens_of(92 if name == "writes" else 93, 4))
                run(engine, name, prompt)
                outcomes[name] = told(client, name)
            finally:
                engine.close()
        wrote, read = outcomes["writes"], outcomes["reads"]
        assert (wrote.loaded_tokens, wrote.load_us, wrote.saved_s) == (0, None, None)
        assert read.loaded_tokens == 6 * CHUNK and read.prefill_tokens_per_s > 0
        assert wrote.runs == [
            PromptRun(tokens=6 * CHUNK, origin="computed", why="never_stored"),
            PromptRun(tokens=7, origin="computed", why="tail"),
        ]
        assert read.runs == [
            PromptRun(tokens=6 * CHUNK, origin="loaded", source="memory"),
            PromptRun(tokens=7, origin="computed", why="tail"),
        ]
        assert read.load_us is not None and read.copy_us is not None and read.saved_s is not None
        assert 0 < read.copy_us <= read.load_us
        assert read.saved_s == pytest.approx(
            read.loaded_tokens / read.prefill_tokens_per_s - read.load_us / 1e6, abs=1e-6
        )
        said = client.explain("reads")
        assert said.load is not None and said.load.bytes == read.loaded_bytes == said.lookups[0].bytes
        assert said.load.queue_ms == pytest.approx((read.load_us - read.copy_us) / 1000)
        (took,) = (one.text for one in said.sentences if one.code == "load_time")
        assert took.startswith("Loading took the engine")
        (gain,) = (one.text for one in said.sentences if one.code in ("saved", "cost_time"))
        assert "tokens/s that the engine computes" in gain
        assert said.saved_s == read.saved_s


def test_a_hit_that_is_below_the_minimum_is_explained(quick: ServerProcess) -> None:
    prompt = tokens_of(94, 2, tail=7)
    with Client(quick.unix) as client:
        for name, least in (("stores it", 0), ("declines it", 3 * CHUNK)):
            with closing(engine_over(quick.unix, min_load_tokens=least)) as engine:
                run(engine, name, prompt)
                outcome = told(client, name)
        assert (outcome.found_tokens, outcome.loaded_tokens, outcome.why) == (2 * CHUNK, 0, "declined_short")
        assert outcome.runs == [
            PromptRun(tokens=2 * CHUNK, origin="computed", why="declined_short"),
            PromptRun(tokens=7, origin="computed", why="tail"),
        ]
        said = f"{2 * CHUNK} tokens computed: {COMPUTED['declined_short']}."
        assert said in explained(client, "declines it")


def test_bytes_that_were_damaged_are_explained_to_the_one_that_met_them_and_to_the_next(quick: ServerProcess) -> None:
    prompt = tokens_of(95, 3, tail=7)
    with Client(quick.unix) as client:
        with closing(engine_over(quick.unix)) as engine:
            run(engine, "wrote", prompt)
            with Spectator(client, kvdock_of(engine).session.manifest) as spectator:
                spectator.flip(spectator.slots(prompt[: 3 * CHUNK])[1], 100)
        with closing(engine_over(quick.unix)) as engine:
            run(engine, "met it", prompt)
            met = told(client, "met it")
            assert met.loaded_tokens < 3 * CHUNK and met.why == "load_failed"
            said = f"{3 * CHUNK - met.loaded_tokens} tokens computed: {COMPUTED['load_failed']}."
            assert said in explained(client, "met it")
        with closing(engine_over(quick.unix)) as engine:
            engine.connector.lookup("next", prompt, 0)
            eventually(lambda: bool(client.requests(request="next").requests))
        why = [story.broke.why for story in client.explain("next").lookups if story.broke is not None]
        assert why in ([], ["mismatched"]), "it was stored anew, or is known to have gone for that"


def test_engines_that_cannot_share_are_told_which_field_keeps_them_apart(quick: ServerProcess) -> None:
    prompt = tokens_of(96, 2, tail=7)
    with Client(quick.unix) as client:
        for name, salt in (("salted", "a"), ("salted otherwise", "b")):
            with closing(engine_over(quick.unix, salt=salt)) as engine:
                run(engine, name, prompt)
                said = explained(client, name)
        assert "has the first 64 tokens of this prompt, or more, and this request cannot use them" in said
        assert "cache_salt: 'hidden' here, " in said


def test_what_ended_just_before_an_engine_left_is_told() -> None:
    with ServerProcess(heartbeat_s=60.0, missed_heartbeats=100) as slow, Client(slow.unix) as client:
        with closing(engine_over(slow.unix)) as engine:
            run(engine, "the last one", tokens_of(99, 2))
            assert not any(one.outcome for one in client.requests(request="the last one").requests)
        assert told(client, "the last one").prompt_tokens == 2 * CHUNK


def test_a_load_whose_server_was_lost_is_explained_by_the_next_one() -> None:
    """The engine tells the server that takes the pool over what became of the request."""
    prompt = tokens_of(97, 2, tail=7)
    with mortal(heartbeat_s=0.1) as server, closing(engine_over(server.unix)) as engine:
        run(engine, "stored", prompt)
        server.stop(signal.SIGKILL)
        run(engine, "while it was away", tokens_of(98, 2))
        with successor(server) as second, Client(second.unix) as client:
            outcome = told(client, "while it was away")
            assert (outcome.found_tokens, outcome.loaded_tokens) == (0, 0)
