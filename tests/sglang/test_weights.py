"""Weights that change in whole SGLang engines: nobody gets KV of other weights, by no route and whatever is flushed.

A story brings one engine from weights to weights, while another one lives and has those of the start. Its tests ask
what came of it. Each change has prompts of its own, and what they compute is compared with what the same engine
computes of them under a salt that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, ServerProcess, comes_true
from engines import TP2, Engine
from tier_server import is_served, wait_until_written, with_disk
from tier_stores import has_state
from whole_engines import HITS, drawn_prompts, tokens_of
from workers import parameters_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.weights, pytest.mark.timeout(1800)]

LONG_HITS = [192, 384, 576]
NOTHING = [0, 0, 0]
NEW = 6
ROOM = {"pool_bytes": 128 * MIB, "disk_bytes": 512 * MIB}
WITH, LATER, NEVER = "flushed with it", "flushed later", "never flushed"
CHANGES = [
    *[("rdma", reset) for reset in (WITH, LATER, NEVER)], ("unknown", WITH), ("memory", WITH),
    *[(route, reset) for route in ("disk", "tensor") for reset in (WITH, LATER, NEVER)],
    ("buckets", WITH), ("distributed", WITH), ("ipc", WITH),
]
"""What is done to the first engine, one after the other. Its weights alternate, so each change is one. What no call
gives away comes first: who does not notice it goes on under the name of the first weights."""
SWEPT = {("rdma", LATER), ("rdma", NEVER), ("disk", WITH), ("disk", NEVER), ("tensor", WITH), ("tensor", LATER)}
"""Those that happen only with --sweeps: without them, each route and each reset is there."""

_salts = count()


def longer(prompts: list[list[int]]) -> list[list[int]]:
    """Each goes on for a page."""
    return [prompt + more[:70] for prompt, more in zip(prompts, drawn_prompts(sum(prompts[0]) + 7), strict=True)]


def generate(engine: Engine, prompts: list[list[int]], **how: Any) -> tuple[list[list[int]], list[int]]:
    runs, cached = engine.generate(prompts, new=NEW, **how)
    return tokens_of(runs), cached


def truth(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What its weights of now compute."""
    tokens, cached = generate(engine, prompts, cache_salt=f"truth {next(_salts)}")
    assert cached == [0] * len(prompts)
    return tokens


class Seen:
    """What came of one change."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.after: tuple[Any, Any] | None = None
        self.true: Any = None
        self.long_true: Any = None
        self.once, self.twice, self.thrice = [None] * 3
        self.alive: Any = None
        self.alive_true: Any = None
        self.late: Any = None
        self.disk: Any = None
        self.start_true: Any = None


def change(engine: Engine, server: ServerProcess, route: str, reset: str, folder: Path, seen: Seen) -> None:
    """Prompts before, the change, and the same prompts and longer ones after it."""
    prompts, longs = seen.prompts, longer(seen.prompts)
    generate(engine, prompts)  # and its stores may still be queued
    engine.do("change", route=route, model=str(folder), flush=reset == WITH)
    if reset == WITH:
        engine.flush()
        seen.after = generate(engine, prompts)
    generate(engine, longs)  # extends what the tree has
    seen.true, seen.long_true = truth(engine, prompts), truth(engine, longs)
    engine.drain(server)


def heal(engine: Engine, server: ServerProcess, seen: Seen) -> None:
    """Flushes twice, and once more: what is stored in front of a stale tail would be loaded with it."""
    engine.flush()
    seen.once = generate(engine, seen.prompts)
    engine.drain(server)
    engine.flush()
    seen.twice = generate(engine, longer(seen.prompts))
    engine.drain(server)
    engine.flush()
    seen.thrice = generate(engine, longer(seen.prompts))


@pytest.fixture(scope="module")
def weights_story(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Any, Seen]]:
    """By what was done, of all that some test asks about, and the first. Nobody asks about a change's prompts before it
    but the engine itself, and each of the other engines asks about one of them."""
    folder = tmp_path_factory.mktemp("weights")
    asked = {CHANGES[0], *(parameters_of(item).get("done") for item in request.session.items)}
    happen = [done for done in CHANGES if done in asked]
    seen = {done: Seen(drawn_prompts(10_000 + 10 * at)) for at, done in enumerate(happen)}
    with (
        with_disk(folder, **ROOM) as server,
        Engine(models["llama"], server.unix) as first, Engine(models["llama"], server.unix) as alive,
    ):
        for at, ((route, reset), one) in enumerate(seen.items()):
            change(first, server, route, reset, models["llama-c" if at % 2 else "llama-b"], one)
            one.alive = generate(alive, one.prompts[:1])
            one.alive_true, one.start_true = truth(alive, one.prompts[:1]), truth(alive, one.prompts[1:])
            if reset == NEVER:
                generate(first, longer(one.prompts))  # and nothing ends it but the next change
            heal(first, server, one)
        alive.drain(server)
        with Engine(models["llama"], server.unix) as late:
            for one in seen.values():
                one.late = generate(late, one.prompts[1:2])
        wait_until_written(server)
        assert first.close() == alive.close() == 0, first.log_text() + alive.log_text()
    with with_disk(folder, **ROOM) as again, Engine(models["llama"], again.unix, extra={"tier_wait_s": 20.0}) as engine:
        has_state(again.unix, "open")  # no lookup waits for a mover that is being started
        is_served(again, 1)
        for one in seen.values():
            one.disk = generate(engine, one.prompts[:1] + one.prompts[2:])
    yield seen


def changes(*resets: str) -> list[Any]:
    return [
        pytest.param(done, id=", ".join(done), marks=[pytest.mark.sweep] if done in SWEPT else [])
        for done in CHANGES if not resets or done[1] in resets
    ]


@pytest.mark.parametrize("done", changes(WITH))
def test_nothing_that_was_computed_before_a_change_is_loaded_after_it(
    weights_story: dict[Any, Seen], done: Any
) -> None:
    """By the engine itself, whose stores were still queued."""
    one = weights_story[done]
    assert one.after == (one.true, NOTHING)


@pytest.mark.parametrize("done", changes())
def test_what_is_loaded_after_flushes_is_of_the_weights_of_now(weights_story: dict[Any, Seen], done: Any) -> None:
    """And not of a prefix or a tail from before; what the weights of now have computed is loaded."""
    one = weights_story[done]
    assert one.once is not None and one.twice is not None and one.thrice is not None
    assert one.once[0] == one.true and one.twice[0] == one.thrice[0] == one.long_true
    assert one.once[1] == (HITS if done[1] == WITH else NOTHING), "nothing of before the flush was stored without it"
    assert one.thrice[1] == LONG_HITS


@pytest.mark.parametrize("done", changes())
def test_an_engine_that_lives_meanwhile_gets_nothing_of_other_weights(
    weights_story: dict[Any, Seen], done: Any
) -> None:
    one = weights_story[done]
    first = done == CHANGES[0]
    assert one.alive == (one.alive_true, HITS[:1] if first else [0]), "the first had the weights of the start before"


@pytest.mark.parametrize("done", changes())
def test_an_engine_that_starts_later_gets_nothing_of_other_weights(weights_story: dict[Any, Seen], done: Any) -> None:
    one = weights_story[done]
    assert one.late == (one.start_true[:1], HITS[1:2] if done == CHANGES[0] else [0])


@pytest.mark.parametrize("done", changes())
def test_a_tier_on_disk_has_nothing_of_other_weights(weights_story: dict[Any, Seen], done: Any) -> None:
    """The server is another one, and so are all engines. What the one that lived has computed comes from the tier."""
    one = weights_story[done]
    assert one.disk == (
        one.alive_true + one.start_true[1:], [HITS[0], HITS[2] if done == CHANGES[0] else 0]
    )


# ---------------------------------------------------------------------- versions

VERSIONS = {
    "equal versions": ("disk", "step-1", "step-1", "llama-b"),
    "equal versions of an update in parts": ("buckets", "step-2", "step-2", "llama-c"),
    "equal versions of what trainers send": ("distributed", "step-3", "step-3", "llama-b"),
    "other versions": ("disk", "step-4", "step-4b", "llama-c"),
    "no version": ("disk", None, None, "llama-b"),
    "a version named afterwards": ("rdma", "step-5", "step-5", "llama-c"),
    "a version of a failed update": ("ipc", "step-6", "step-6", "llama-b"),
    "a version of an update that failed in part": ("memory and ipc", "step-7", "step-7", "llama-c"),
}
SHARE = {
    "equal versions", "equal versions of an update in parts", "equal versions of what trainers send",
    "a version named afterwards",
}


def bring(engine: Engine, route: str, version: str | None, folder: Path) -> None:
    if route == "rdma":  # SGLang takes no version with it
        engine.do("change", route="rdma", model=str(folder))
        engine.do("change", route="version", model="", version=version)
    else:
        for one in route.split(" and "):
            engine.do("change", route=one, model=str(folder), version=version)
    engine.flush()


@pytest.fixture(scope="module")
def versions_story(models: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Per name what a second engine found, and what is true. Both start from the same files."""
    found: dict[str, Any] = {}
    distrusts = {"extra": {"trust_weight_versions": False}}
    with (
        ServerProcess(pool_bytes=128 * MIB, segment_bytes=64 * MIB) as server,
        Engine(models["llama"], server.unix) as first, Engine(models["llama"], server.unix) as second,
        Engine(models["llama"], server.unix, **distrusts) as wary,
    ):
        for at, (name, (route, version, other, kind)) in enumerate(VERSIONS.items()):
            prompts = drawn_prompts(20_000 + 10 * at)
            bring(first, route, version, models[kind])
            generate(first, prompts)
            first.drain(server)
            bring(second, route, other, models[kind])
            found[name] = generate(second, prompts), truth(second, prompts)
        prompts = drawn_prompts(30_000)
        for engine in (first, wary):
            bring(engine, "disk", "step-20", models["llama-b"])
        generate(first, prompts)
        first.drain(server)
        found["not trusted"] = generate(wary, prompts), truth(wary, prompts)
        first.flush()
        found["nothing has changed"] = generate(first, prompts), truth(first, prompts)
        # The same version once more, for other weights.
        bring(first, "disk", "step-20", models["llama-c"])
        found["named twice"] = generate(first, prompts), truth(first, prompts)
        first.drain(server)
        bring(second, "disk", "step-20", models["llama-b"])
        found["named twice, elsewhere"] = generate(second, prompts), truth(second, prompts)
        assert first.close() == second.close() == wary.close() == 0, first.log_text() + second.log_text()
    yield found


@pytest.mark.parametrize("name", VERSIONS)
def test_engines_share_under_equal_versions_and_no_others(versions_story: dict[str, Any], name: str) -> None:
    (tokens, cached), true = versions_story[name]
    assert tokens == true and cached == (HITS if name in SHARE else NOTHING)


def test_an_engine_that_trusts_no_versions_shares_nothing(versions_story: dict[str, Any]) -> None:
    (tokens, cached), true = versions_story["not trusted"]
    assert tokens == true and cached == NOTHING


def test_without_a_change_a_flush_costs_nothing(versions_story: dict[str, Any]) -> None:
    (tokens, cached), true = versions_story["nothing has changed"]
    assert tokens == true and cached == HITS


def test_a_version_that_is_given_to_other_weights_is_shared_no_more(versions_story: dict[str, Any]) -> None:
    """What it stood for first is still right for others."""
    (tokens, cached), true = versions_story["named twice"]
    assert tokens == true and cached == NOTHING
    (tokens, cached), true = versions_story["named twice, elsewhere"]
    assert tokens == true and cached == HITS


# ---------------------------------------------------------------------- while weights change


def stored(server: ServerProcess) -> int:
    with Client(server.unix) as client:
        return client.status().counters["stored_chunks"]


def test_between_begin_and_end_nothing_is_looked_up_or_stored(models: dict[str, Path], server: ServerProcess) -> None:
    prompts, others = drawn_prompts(1), drawn_prompts(2)
    with Engine(models["llama"], server.unix) as engine:
        generate(engine, prompts)
        engine.drain(server)
        engine.flush()
        engine.do("change", route="begin", model=str(models["llama-b"]))
        before = stored(server)
        assert generate(engine, prompts)[1] == NOTHING
        generate(engine, others)
        engine.drain(server)
        assert stored(server) == before
        engine.do("change", route="end", model="")
        engine.flush()
        assert generate(engine, others)[1] == NOTHING
        engine.drain(server)
        assert stored(server) > before, "and from then on it is"
        assert engine.close() == 0, engine.log_text()


def test_a_request_that_runs_across_a_change_is_not_stored(models: dict[str, Path], server: ServerProcess) -> None:
    """Nor what goes on from it, before the tree is flushed; what has nothing of it in front is."""
    prompt, other = drawn_prompts(3)[0], drawn_prompts(4)
    with Engine(models["llama"], server.unix) as engine:
        tokens = engine.do("across", prompt=prompt, model=str(models["llama-b"]), new=150)["tokens"]
        whole = [prompt + tokens]
        longs = [whole[0] + other[0][:70]]
        generate(engine, longs)
        generate(engine, other)
        true, other_true = truth(engine, longs), truth(engine, other)
        engine.drain(server)
        for hits in ([0], [len(longs[0]) // 64 * 64]):
            engine.flush()
            assert generate(engine, longs) == (true, hits)
            assert generate(engine, other) == (other_true, HITS)
            engine.drain(server)
        assert engine.close() == 0, engine.log_text()


def test_stores_that_are_queued_when_weights_change_are_not_filed_under_the_new_ones(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Nor under any: nobody waits for them."""
    prompts = drawn_prompts(10)
    odd = {"linker": ["HeldOffersLinker", "odd_linkers"], "environ": {"KVDOCK_ODD": str(tmp_path)}}
    with Engine(models["llama"], server.unix, **odd) as engine:
        generate(engine, prompts)
        engine.do("change", route="disk", model=str(models["llama-b"]))
        (tmp_path / "go").touch()
        engine.flush()
        assert generate(engine, prompts) == (truth(engine, prompts), NOTHING)
        with Engine(models["llama"], server.unix) as other:
            assert generate(other, prompts)[1] == NOTHING
        engine.drain(server)
        engine.flush()
        assert generate(engine, prompts)[1] == HITS
        assert engine.close() == 0, engine.log_text()


@pytest.mark.sweep("route")
@pytest.mark.parametrize("route", ["rdma", "disk"])
@pytest.mark.parametrize("how", [TP2], ids=["two ranks"])
def test_two_ranks_agree_about_each_change(
    route: str, how: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    prompts = drawn_prompts(5)
    with Engine(models["llama"], server.unix, **how) as engine:
        generate(engine, prompts)
        engine.do("change", route=route, model=str(models["llama-b"]))
        engine.flush()
        found, true = generate(engine, prompts), truth(engine, prompts)
        assert found == (true, NOTHING)
        engine.drain(server)
        engine.flush()
        assert generate(engine, prompts) == (true, HITS)
        engine.do("change", route=route, model=str(models["llama-c"]))
        generate(engine, longer(prompts))
        engine.drain(server)
        for hits in (NOTHING, LONG_HITS):
            engine.flush()
            assert generate(engine, longer(prompts)) == (truth(engine, longer(prompts)), hits)
            engine.drain(server)
        assert engine.close() == 0, engine.log_text()


@pytest.mark.parametrize("how", [TP2], ids=["two ranks"])
def test_a_hook_that_one_rank_lacks_stops_all_of_them(
    how: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """And none waits for another."""
    prompts = drawn_prompts(6)
    with Engine(models["llama"], server.unix, **how) as engine:
        true, _ = generate(engine, prompts)
        engine.drain(server)
        engine.do("rpc", method="take_the_updates_place", how={"only_rank": 1})
        before = stored(server)
        engine.flush()
        assert generate(engine, prompts) == (true, NOTHING)
        generate(engine, drawn_prompts(7))
        engine.drain(server)
        assert stored(server) == before
        assert "kvdock shares nothing with this engine" in engine.log_text()
        assert engine.close() == 0, engine.log_text()


# ---------------------------------------------------------------------- hooks that are not in force


@pytest.mark.parametrize(("how", "shares"), [
    ({"plugin_of_others": "take_a_methods_place"}, False), ({"plugin_of_others": "rename_a_method"}, False),
    ({"plugin_of_others": "answer_without_the_method"}, False),
    ({"plugin_of_others": "bring_what_no_hook_goes_around"}, False),
    ({"plugin_of_others": "hook_the_same_method"}, True), ({"environ": {"SGLANG_PLUGINS": "others"}}, True),
], ids=["taken", "renamed", "not called", "unhookable", "shared hook", "not among SGLANG_PLUGINS"])
def test_what_is_not_proven_to_be_heard_lets_nothing_be_shared(
    how: dict[str, Any], shares: bool, models: dict[str, Path], server: ServerProcess
) -> None:
    prompts = drawn_prompts(8)
    with Engine(models["llama"], server.unix, **how) as engine:
        true, _ = generate(engine, prompts)
        engine.drain(server)
        engine.flush()
        assert generate(engine, prompts) == (true, HITS if shares else NOTHING)
        assert bool(stored(server)) == shares
        assert ("kvdock shares nothing with this engine" in engine.log_text()) != shares
        assert engine.close() == 0, engine.log_text()


def test_who_takes_a_methods_place_later_ends_sharing_and_who_calls_through_does_not(
    models: dict[str, Path], server: ServerProcess
) -> None:
    prompts = drawn_prompts(9)
    with Engine(models["llama"], server.unix) as engine:
        true, _ = generate(engine, prompts)
        engine.do("rpc", method="take_the_updates_place", how={"calls_through": True})
        engine.drain(server)
        engine.flush()
        assert generate(engine, prompts) == (true, HITS)
        engine.do("rpc", method="take_the_updates_place", how={})
        engine.flush()
        assert generate(engine, prompts) == (true, NOTHING)
        assert comes_true(lambda: "kvdock shares nothing with this engine" in engine.log_text())
        assert engine.close() == 0, engine.log_text()
