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
from kvdock.connectors.outcomes import EngineOutcomes
from kvdock.engine.engine import Engine
from kvdock.engine.request import SamplingParams
from kvdock.protocol.outcomes import Outcome, OutcomeView


@pytest.fixture(scope="module")
def quick() -> Iterator[ServerProcess]:
    with ServerProcess(heartbeat_s=0.1) as server:
        yield server


class Telling:
    """An engine's verbs at times that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.told = 100.0, list[Outcome]()
        self.outcomes = EngineOutcomes(self.told.append, lambda: self.now_s)

    def compute(self, request: str, computed: int, seconds: float) -> None:
        """A step of the request alone."""
        self.outcomes.step([])
        self.now_s += seconds
        self.outcomes.begin_store(request, computed)

    def load(self, request: str, local: int, hit: int, seconds: float, valid: int | None = None) -> None:
        self.outcomes.lookup(request, 400, local, Hit(hit))
        self.outcomes.begin_load(request, local, hit)
        self.outcomes.loading(request, 1 << 20)
        self.now_s += seconds
        self.outcomes.step([(LoadDone(request, hit if valid is None else valid), seconds / 2)])


def test_the_speed_is_that_of_steps_that_compute_prompts_whatever_the_engine_waits() -> None:
    engine = Telling()
    for request in ("first", "second"):
        engine.outcomes.lookup(request, 400, 0, Miss())
        for end in (100, 200, 300, 400):
            engine.compute(request, end, 0.05)
            engine.now_s += 7.0  # nothing is to be computed: the engine sleeps before it polls
        for token in range(401, 420):
            engine.compute(request, token, 0.04)
        engine.outcomes.finished(request)
    engine.load("third", 100, 300, 0.02)
    engine.outcomes.finished("third")
    assert [one.prefill_tokens_per_s for one in engine.told[1:]] == pytest.approx([2000.0, 2000.0])
    last = engine.told[-1]
    assert (last.loaded_tokens, last.loaded_bytes, last.load_us, last.copy_us) == (200, 1 << 20, 20_000, 10_000)


def test_a_load_that_fell_short_has_no_time_and_what_lay_in_it_counts_as_loaded() -> None:
    engine = Telling()
    engine.load("r", 64, 320, 0.02, valid=128)
    engine.outcomes.finished("r")
    (told,) = engine.told
    assert (told.local_tokens, told.found_tokens, told.loaded_tokens, told.why) == (64, 320, 64, "load_failed")
    assert told.load_us is None and told.copy_us is None


def test_a_load_that_ends_behind_its_request_is_told_of_by_nobody() -> None:
    engine = Telling()
    engine.outcomes.lookup("r", 400, 0, Hit(128))
    engine.outcomes.begin_load("r", 0, 128)
    engine.outcomes.finished("r")
    engine.outcomes.step([(LoadDone("r", 128), 0.1)])
    engine.outcomes.finished("r")
    assert [one.load_us for one in engine.told] == [None]


def run(engine: Engine, request: str, prompt: list[int]) -> None:
    engine.add_request(prompt, SamplingParams(max_tokens=2), request)
    while engine.has_unfinished:
        engine.step()
    assert engine.drain(20.0)


def explained(client: Client, request: str) -> str:
    """What people read of it, once its engine has told what became of it."""
    told(client, request)
    return "\n".join(client.explain(request).sentences)


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
        assert read.load_us is not None and read.copy_us is not None and read.saved_s is not None
        assert 0 < read.copy_us <= read.load_us
        assert read.saved_s == pytest.approx(
            read.loaded_tokens / read.prefill_tokens_per_s - read.load_us / 1e6, abs=1e-6
        )
        said = client.explain("reads")
        assert said.load is not None and said.load.bytes == read.loaded_bytes == said.lookups[0].bytes
        assert said.load.queue_ms == pytest.approx((read.load_us - read.copy_us) / 1000)
        assert any(sentence.startswith("Loading took the engine") for sentence in said.sentences)
        assert any("tokens/s that the engine computes" in sentence for sentence in said.sentences)
        assert said.saved_s == read.saved_s


def test_a_hit_that_is_below_the_minimum_is_explained(quick: ServerProcess) -> None:
    prompt = tokens_of(94, 2, tail=7)
    with Client(quick.unix) as client:
        for name, least in (("stores it", 0), ("declines it", 3 * CHUNK)):
            with closing(engine_over(quick.unix, min_load_tokens=least)) as engine:
                run(engine, name, prompt)
                outcome = told(client, name)
        assert (outcome.found_tokens, outcome.loaded_tokens, outcome.why) == (2 * CHUNK, 0, "declined_short")
        assert "Not more were loaded: fewer tokens than min_load_tokens." in explained(client, "declines it")


def test_bytes_that_were_damaged_are_explained_to_the_one_that_met_them_and_to_the_next(quick: ServerProcess) -> None:
    prompt = tokens_of(95, 3, tail=7)
    with Client(quick.unix) as client:
        with closing(engine_over(quick.unix)) as engine:
            run(engine, "wrote", prompt)
            with Spectator(client, kvdock_of(engine).session.manifest) as spectator:
                spectator.flip(spectator.slots(prompt[: 3 * CHUNK])[1], 100)
        with closing(engine_over(quick.unix)) as engine:
            run(engine, "met it", prompt)
            assert "Not more were loaded: not all of a load came." in explained(client, "met it")
            assert told(client, "met it").loaded_tokens < 3 * CHUNK
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
        assert "Another namespace of the model has chunks, which it cannot use" in said
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
