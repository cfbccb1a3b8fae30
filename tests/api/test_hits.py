"""Where prompts' tokens came from: each source and reason is caused in a real server, and read where people read it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from api_helpers import MIB, Engine, ServerProcess, attach, eventually, kept_of, keys
from app_rig import OWN, opened
from server_fixtures import fresh_server

from kvdock.api.pool.registry import digest16
from kvdock.api.record.hits import (
    MOST_DAYS,
    MOST_ENGINES,
    MOST_EPOCHS,
    MOST_MODELS,
    OTHERS,
    Answered,
    HitRecord,
    Missing,
    Whose,
    divided,
)
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache, DeleteChunks, EvictChunks
from kvdock.protocol.forms import JSON
from kvdock.protocol.hits import ComputedWhy, HitTotals, PromptRun
from kvdock.protocol.outcomes import Outcome, OutcomeView
from kvdock.protocol.reports import DayOfHits

server = fresh_server()
CHUNK = 16


def runs_of(client: Client, request: str) -> list[tuple[int, str]]:
    """The prompt of the request's latest row: (tokens, `local`, a source or a reason) of each run."""
    view = client.requests(request=request).requests[0]
    assert view.outcome is not None
    assert sum(run.tokens for run in view.outcome.runs) == view.outcome.prompt_tokens
    return short(view.outcome.runs)


def short(runs: list[PromptRun]) -> list[tuple[int, str]]:
    return [(run.tokens, run.source or run.why or run.origin) for run in runs]


def ended(engine: Engine, request: str, prompt: int, **more: Any) -> None:
    engine.heartbeat(outcomes=[Outcome(request=request, prompt_tokens=prompt, **more)])


# ------------------------------------------------------------------ with a server


def test_a_prompt_is_divided_when_its_request_has_ended(client: Client) -> None:
    engine = attach(client)
    chain = keys(6)
    engine.store(chain[:4])
    lease = engine.lookup(chain, "r").lease
    assert client.status().hits == HitTotals(), "nothing is a hit before the request has ended"
    engine.release(lease, 0)
    ended(engine, "r", 100, local_tokens=16, found_tokens=64, loaded_tokens=48)
    assert runs_of(client, "r") == [(16, "local"), (48, "memory"), (32, "never_stored"), (4, "tail")]
    wanted = HitTotals(
        requests=1, prompt_tokens=100, local_tokens=16, loaded={"memory": 48},
        computed={"never_stored": 32, "tail": 4},
    )
    (session,), (space,), (day,) = client.sessions().sessions, client.namespaces().namespaces, client.hits().days
    assert client.status().hits == session.totals.hits == space.totals.hits == wanted
    assert day == DayOfHits(date=day.date, tenant="", model="test-model", hits=wanted)
    counters = client.status().counters
    named = {name: counters[f"{name}_tokens"] for name in ("prompt", "local", "loaded", "computed")}
    assert named == {"prompt": 100, "local": 16, "loaded": 48, "computed": 36}
    engine.close()


def test_engines_are_told_apart_by_the_name_that_their_users_know(client: Client) -> None:
    large = attach(client, served_model_name="llama-70b", model="LlamaForCausalLM", layers=4)
    small, renamed = (
        attach(client, served_model_name=name, model="LlamaForCausalLM") for name in ("llama-8b", "production")
    )
    large.store(keys(1))
    small.store(keys(1))
    assert renamed.lookup(keys(1), "r").hit_tokens == CHUNK, "a name keeps no chunks apart"
    for engine, tokens in ((large, 30), (small, 20), (renamed, 10)):
        ended(engine, "r", tokens)
    assert {day.model: day.hits.prompt_tokens for day in client.hits().days} == {
        "llama-70b": 30, "llama-8b": 20, "production": 10
    }
    assert [one.model for one in client.sessions().sessions] == ["llama-70b", "llama-8b", "production"]
    spaces = {one.model: (one.chunks, one.sessions) for one in client.namespaces().namespaces}
    assert spaces == {"llama-70b": (1, 1), "production": (1, 2)}
    assert client.verdict().findings == []
    for engine in (large, small, renamed):
        engine.close()


def test_what_was_leased_and_given_back_is_no_hit_and_not_loaded(client: Client) -> None:
    engine = attach(client)
    engine.store(keys(4))
    lease = engine.lookup(keys(4), "r").lease
    assert lease is not None
    client.cancel(lease, engine.session, engine.member)
    ended(engine, "r", 70, local_tokens=64, found_tokens=64)
    assert runs_of(client, "r") == [(64, "local"), (6, "tail")]
    counters = client.status().counters
    assert (counters["loaded_chunks"], counters["loaded_bytes"], counters["loaded_tokens"]) == (0, 0, 0)
    engine.close()


def test_what_another_engine_stores_meanwhile_was_waited_for(client: Client) -> None:
    engine, other = attach(client), attach(client)
    chain = keys(4)
    other.store(chain[:1])
    granted = other.reserve(chain[:3])
    assert engine.lookup(chain, "r", epoch=1).hit_tokens == CHUNK
    other.commit(granted)
    lease = engine.lookup(chain, "r", epoch=1)
    assert lease.hit_tokens == 3 * CHUNK
    engine.release(lease.lease, 0)
    ended(engine, "r", 70, epoch=1, found_tokens=48, loaded_tokens=48)
    assert runs_of(client, "r") == [(16, "memory"), (32, "waited"), (16, "never_stored"), (6, "tail")]
    engine.close()
    other.close()


def test_a_request_that_did_not_wait_until_all_was_stored_computes_the_rest(client: Client) -> None:
    engine, other = attach(client), attach(client)
    granted = other.reserve(keys(3))
    engine.lookup(keys(3), "r", epoch=1)
    other.commit(granted)
    engine.lookup(keys(3), "r", epoch=1)  # the engine has gone on without this answer
    ended(engine, "r", 50, epoch=1)
    assert runs_of(client, "r") == [(48, "being_stored"), (2, "tail")]
    engine.close()
    other.close()


def test_only_the_chunks_that_are_gone_have_their_reason(client: Client) -> None:
    engine = attach(client)
    chain = keys(10)
    engine.store(chain[:4])
    client.delete(DeleteChunks(namespace=engine.attached.namespace, keys=chain[1:2]))
    engine.lookup(chain, "r")
    ended(engine, "r", 161, found_tokens=16, loaded_tokens=16)
    # The third and fourth chunk are there, behind one that is not: they would have been found with it.
    assert runs_of(client, "r") == [(16, "memory"), (48, "deleted"), (96, "never_stored"), (1, "tail")]
    engine.close()


def test_what_was_evicted_before_a_clear_was_cleared(client: Client) -> None:
    engine = attach(client)
    engine.store(keys(2))
    client.evict(EvictChunks(free_bytes=16 * MIB))
    engine.lookup(keys(2), "before", epoch=1)
    client.clear(ClearCache(namespace=engine.attached.namespace))
    engine.lookup(keys(2), "before", epoch=1)  # it has waited, and asks again
    ended(engine, "before", 33, epoch=1)
    assert runs_of(client, "before") == [(32, "cleared"), (1, "tail")]
    engine.store(keys(2))
    client.evict(EvictChunks(free_bytes=16 * MIB))
    engine.lookup(keys(2), "after")
    ended(engine, "after", 33)
    assert (runs_of(client, "after")[0][1]) != "cleared", "they were stored again"
    engine.close()


def test_prompts_that_are_shorter_than_a_chunk_count(client: Client) -> None:
    engine = attach(client)
    for number in range(100):
        ended(engine, f"short {number}", 15)
    engine.store(keys(1))
    engine.release(engine.lookup(keys(1), "r").lease, 0)
    ended(engine, "r", 17, found_tokens=16, loaded_tokens=16)
    hits = client.status().hits
    assert (hits.requests, hits.prompt_tokens, hits.loaded_share) == (101, 1517, 16 / 1517)
    assert hits.computed == {"short": 1500, "tail": 1}
    engine.close()


def test_a_preempted_request_counts_once(client: Client) -> None:
    engine = attach(client)
    chain = keys(4)
    engine.lookup(chain, "r", epoch=1)
    engine.store(chain)
    for epoch in (2, 3):
        engine.release(engine.lookup(chain, "r", epoch=epoch).lease, 0)
    ended(engine, "r", 64, epoch=1, reloaded_tokens=128, load_us=1000, prefill_tokens_per_s=128_000.0)
    assert runs_of(client, "r") == [(64, "never_stored")]
    hits = client.status().hits
    assert (hits.prompt_tokens, hits.loaded_tokens, hits.reloaded_tokens) == (64, 0, 128)
    assert hits.saved_s == pytest.approx(0.0), "what it loaded when it came back saved as long as it took"
    engine.close()


def test_an_outcome_that_is_reported_again_counts_once(client: Client) -> None:
    engine = attach(client)
    for number in (7, 7, 8, 7):
        ended(engine, f"r{number}", 15, number=number)
    assert client.status().hits.requests == 2
    engine.close()


def test_loads_that_took_longer_than_computing_cost_time(client: Client) -> None:
    engine = attach(client)
    ended(engine, "r", 100, loaded_tokens=64, load_us=2_000_000, prefill_tokens_per_s=1000.0)
    assert client.status().hits.saved_s == pytest.approx(0.064 - 2)
    engine.close()


def test_engines_that_report_no_end_of_requests_have_no_hits(client: Client) -> None:
    engine = attach(client)
    engine.store(keys(4))
    engine.release(engine.lookup(keys(4), "r").lease, 0)
    (session,) = client.sessions().sessions
    assert (session.totals.lookup_tokens, session.totals.hits) == (64, HitTotals())
    assert session.totals.loaded_bytes == 4 * 16384
    engine.close()


def test_the_next_server_of_a_killed_one_says_at_once_what_is_stored_and_what_was_loaded() -> None:
    with ServerProcess(history_interval_s=0.05) as first:
        with Client(first.unix) as client:
            engine = attach(client, served_model_name="kept-name", model="kept-model", cache_salt="a secret")
            engine.store(keys(2))
            ended(engine, "r", 100, loaded_tokens=40)
            before = client.namespaces().namespaces[0]
            kept = kept_of(first.pool_id, "history")
            eventually(lambda: kept.exists() and b"kept-model" in kept.read_bytes())
            engine.close()
        first.stop(signal.SIGKILL)
        with ServerProcess(**first.settings) as second, Client(second.unix) as client:
            assert second.pool_id == first.pool_id
            (space,) = client.namespaces().namespaces
            assert (space.namespace, space.manifest, space.chunks) == (before.namespace, before.manifest, 2)
            assert space.model == "kept-name"
            assert space.sessions == 0 and space.weights == ""


def outcome_of(prompt: int, *runs: PromptRun, saved_s: float | None = None) -> OutcomeView:
    return OutcomeView(
        prompt_tokens=prompt, local_tokens=0, found_tokens=0, loaded_tokens=0, runs=list(runs), saved_s=saved_s
    )


def days(record: HitRecord, *tenants: str) -> list[DayOfHits]:
    """Those of all tenants, if none is named."""
    return asyncio.run(record.days(lambda tenant: not tenants or tenant in tenants))


def test_days_go_on_in_the_next_server() -> None:
    now = {"s": 1_764_000_000.0}
    first = HitRecord(lambda: now["s"])
    loaded = PromptRun(tokens=60, origin="loaded", source="disk")
    computed = PromptRun(tokens=40, origin="computed", why="room")
    first.ended(Whose("a", "llama", "e"), outcome_of(100, loaded, computed, saved_s=2.0))
    now["s"] += 86_400
    first.ended(Whose("a", "llama", "e"), outcome_of(60, loaded, saved_s=-3.0))
    list(first.kept())
    first.ended(Whose("b", "gemma", "e"), outcome_of(40, computed))
    second = HitRecord(lambda: now["s"])
    second.take_over(msgspec.Raw(b"".join(first.kept())))
    assert days(second) == days(first) != []
    second.ended(Whose("a", "llama", "e"), outcome_of(60, loaded, saved_s=1.0))
    yesterday, today = days(second, "a")
    assert (yesterday.hits.prompt_tokens, yesterday.hits.loaded, yesterday.hits.saved_s) == (100, {"disk": 60}, 2.0)
    assert (today.hits.requests, today.hits.loaded, today.hits.saved_s) == (2, {"disk": 120}, -2.0)
    assert second.total.requests == 1, "totals are those of this server"


def test_models_and_days_beyond_what_is_counted_apart_are_bounded() -> None:
    now = {"s": 1_764_000_000.0}
    record = HitRecord(lambda: now["s"])
    for number in range(MOST_MODELS + 10):
        record.ended(Whose("", f"model {number}", "e"), outcome_of(1, PromptRun(tokens=1, origin="local")))
    assert len(record.by_model) == MOST_MODELS + 1 and record.by_model[OTHERS].requests == 10
    for _ in range(MOST_DAYS + 5):
        now["s"] += 86_400
        record.ended(Whose("", "m", "e"), outcome_of(1, PromptRun(tokens=1, origin="local")))
    assert len({day.date for day in days(record)}) == MOST_DAYS


@pytest.mark.security
def test_a_tenant_that_makes_names_up_leaves_others_their_models_and_engines() -> None:
    """Else the models of all that come later that day are counted together."""
    record, outcome = HitRecord(lambda: 1_764_000_000.0), outcome_of(1, PromptRun(tokens=1, origin="local"))
    for number in range(MOST_ENGINES + 10):
        record.ended(Whose("a", f"model {number}", f"engine {number}"), outcome)
    honest = Whose("b", "llama", "serves")
    record.ended(honest, outcome)
    assert record.by_model["b", "llama"].requests == 1
    assert record.by_model["a", OTHERS[1]].requests == MOST_ENGINES + 10 - MOST_MODELS // 2
    assert len(record.by_model) == MOST_MODELS // 2 + 2, "half of all, its others and the other tenant's"
    engines = asyncio.run(record.lately.sums(lambda tenant: True))
    assert len(engines) == MOST_ENGINES // 2 + 2 and engines[honest].requests == 1
    (day,) = days(record, "b")
    assert (day.model, day.hits.requests) == ("llama", 1)
    for number in range(MOST_MODELS):
        record.ended(Whose("b", f"model {number}", "serves"), outcome)
    record.ended(Whose("c", "gemma", "serves"), outcome)
    assert len(record.by_model) == MOST_MODELS + 1 and record.by_model[OTHERS].requests > 0, "all together are bounded"


@pytest.mark.security
def test_of_a_request_s_epochs_the_last_ones_are_kept() -> None:
    """An engine that counts them up without an end would fill the server's memory."""
    with opened() as rig:
        async def look_up() -> None:
            for epoch in range(1, 3 * MOST_EPOCHS):
                body = s.Lookup(session=rig.session, member="m", request="r", keys=keys(2), epoch=epoch)
                await rig.parts.handlers.service.lookup(OWN, body, JSON)

        asyncio.run(look_up())
        tally = rig.parts.sampler._tally
        tally.count_answered()
        parts = tally.learned.answers._open._parts
        (of_request,) = [kept for part in parts for (_, request), kept in part.items() if request == digest16("r")]
        assert list(of_request) == list(range(2 * MOST_EPOCHS, 3 * MOST_EPOCHS))


# ------------------------------------------------------------------ the division itself


def answered(*found: tuple[int, str], missing: Sequence[tuple[int, ComputedWhy]] = (), asked: int = 8) -> Answered:
    return Answered(CHUNK, asked, 0, found=found, missing=tuple(Missing(end, why) for end, why in missing))


@pytest.mark.parametrize(("outcome", "answer", "wanted"), [
    ({"local_tokens": 0}, None, [(128, "not_asked"), (2, "tail")]),
    ({"local_tokens": 130}, None, [(130, "local")]),
    ({"why": "bypassed_media"}, None, [(128, "bypassed_media"), (2, "tail")]),
    ({"why": "strange"}, None, [(128, "other"), (2, "tail")]),
    ({"loaded_tokens": 64}, None, [(64, "memory"), (64, "not_asked"), (2, "tail")]),
    ({"why": "late"}, answered((8, "memory")), [(128, "late"), (2, "tail")]),
    ({"found_tokens": 128, "why": "declined_dear"}, answered((8, "memory")), [(128, "declined_dear"), (2, "tail")]),
    ({"found_tokens": 128}, answered((8, "memory")), [(128, "not_loaded"), (2, "tail")]),
    (
        {"found_tokens": 128, "loaded_tokens": 64, "local_tokens": 32, "why": "load_failed"}, answered((8, "memory")),
        [(32, "local"), (64, "memory"), (32, "load_failed"), (2, "tail")],
    ),
    (
        {"found_tokens": 32, "loaded_tokens": 32}, answered((2, "memory"), (6, "disk"), missing=((8, "never_stored"),)),
        [(32, "memory"), (64, "tier_slow"), (32, "never_stored"), (2, "tail")],
    ),
    (
        {"found_tokens": 96, "loaded_tokens": 80, "local_tokens": 16},
        answered((2, "memory"), (6, "disk"), missing=((7, "room"), (8, "never_stored"))),
        [(16, "local"), (16, "memory"), (64, "disk"), (16, "room"), (16, "never_stored"), (2, "tail")],
    ),
    ({}, answered(missing=((4, "cleared"),), asked=4), [(64, "cleared"), (64, "not_asked"), (2, "tail")]),
    (
        {"asked_from": 32, "local_tokens": 48, "found_tokens": 96, "loaded_tokens": 48},
        answered((2, "memory"), (4, "disk"), missing=((5, "room"),), asked=6),
        [(48, "local"), (16, "memory"), (32, "disk"), (16, "room"), (16, "not_asked"), (2, "tail")],
    ),
    ({"loaded_tokens": 1000}, answered((8, "memory")), [(128, "memory"), (2, "memory")]),
])
def test_each_token_of_a_prompt_has_one_origin(
    outcome: dict[str, Any], answer: Answered | None, wanted: list[tuple[int, str]]
) -> None:
    runs = short(divided(Outcome(request="r", prompt_tokens=130, **outcome), CHUNK, answer))
    merged: list[tuple[int, str]] = []
    for tokens, name in wanted:
        if merged and merged[-1][1] == name:
            tokens += merged.pop()[0]
        merged.append((tokens, name))
    assert runs == merged and sum(tokens for tokens, _ in runs) == 130


def test_an_answer_that_shrinks_and_grows_keeps_its_sources_in_order() -> None:
    answer = Answered(CHUNK, 8, 0)
    for end, source in ((2, "memory"), (4, "disk"), (6, "disk"), (3, "waited"), (5, "waited")):
        answer.grow(end, source)
    assert answer.found == ((2, "memory"), (3, "disk"), (5, "waited"))
