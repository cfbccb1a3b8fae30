"""Weights that change in whole engines: nobody gets KV of other weights, by no route and whatever is flushed.

A story brings one engine from weights to weights, while another one lives and has those of the start, and a tier on
disk keeps what both have stored. Its tests ask what came of it. Each change has prompts of its own, and what they
compute is compared with what the same engine computes of them under a salt that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, ServerProcess
from changed_weights import LONG_HITS, NEW, generate, longer, truth
from engines import MARK, Engine
from stories import CHANGES, RELOAD, SHARE, SWEPT, VERSIONS, WEIGHTS
from tier_server import is_served, with_disk
from tier_stores import clear_once_written, has_state
from whole_engines import BEFORE, CONNECTOR, HITS, NEVER, NOTHING, WITH, comes_back, prompts_of, tokens_of
from workers import parameters_of

pytestmark = [MARK, pytest.mark.weights, pytest.mark.timeout(1800)]

ROOM = {"pool_bytes": 256 * MIB, "disk_bytes": 512 * MIB}
FLUSHED = (WITH, CONNECTOR, BEFORE)


NO_ANSWER = list[list[int]](), list[int]()


class Seen:
    """What came of one change."""

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.brought: int | None = None
        self.true, self.long_true, self.alive_true, self.start_true = [list[list[int]]()] * 4
        self.after, self.once, self.twice, self.thrice, self.alive, self.late, self.disk, self.now = [NO_ANSWER] * 8


def change(engine: Engine, route: str, reset: str, folder: Path, seen: Seen) -> None:
    """Prompts before, the change, and the same prompts and longer ones after it."""
    prompts, longs = seen.prompts, longer(seen.prompts)
    generate(engine, prompts)  # and its stores may still be queued
    if reset == BEFORE:
        engine.flush()
    engine.change(route, folder, flush=reset == WITH)
    if reset in (WITH, CONNECTOR):
        engine.flush(**({"connector": True} if reset == CONNECTOR else {}))
    found = engine.done(engine.do("generate", prompts=prompts, new=NEW))
    seen.after, seen.brought = (tokens_of(found["runs"]), found["cached"]), found.get("brought")
    generate(engine, longs)  # extends what its own cache has
    seen.true, seen.long_true = truth(engine, prompts), truth(engine, longs)
    engine.drain()


def heal(engine: Engine, seen: Seen) -> None:
    """Flushes twice, and once more: what is stored in front of a stale tail would be loaded with it."""
    engine.flush()
    seen.once = generate(engine, seen.prompts)
    engine.drain()
    engine.flush()
    seen.twice = generate(engine, longer(seen.prompts))
    engine.drain()
    engine.flush()
    seen.thrice = generate(engine, longer(seen.prompts))


@pytest.fixture(scope="module")
def weights_story(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Any, Seen]]:
    """By what was done, of all that some test asks about, and the first. Nobody asks about a change's prompts before it
    but the engine itself, and each of the other engines asks about one of them."""
    folder, start = tmp_path_factory.mktemp("weights"), models["llama"]
    asked = {CHANGES[0], *(parameters_of(item).get("done") for item in request.session.items)}
    happen = [done for done in CHANGES if done in asked]
    seen = {done: Seen(prompts_of(10_000 + 10 * at)) for at, done in enumerate(happen)}
    patient = {**WEIGHTS, "extra": {"tier_wait_s": 20.0}}
    with (
        with_disk(folder, **ROOM) as server,
        Engine(start, server.unix, **patient) as first, Engine(start, server.unix, **patient) as alive,
    ):
        for at, ((route, reset), one) in enumerate(seen.items()):
            change(first, route, reset, models["llama-c" if at % 2 else "llama-b"], one)
            one.alive = generate(alive, one.prompts[:1])
            one.alive_true, one.start_true = truth(alive, one.prompts[:1]), truth(alive, one.prompts[1:])
            if reset == NEVER:
                generate(first, longer(one.prompts))  # and nothing ends it but the next change
            heal(first, one)
        alive.drain()
        with Engine(start, server.unix, **patient) as late:
            for one in seen.values():
                one.late = generate(late, one.prompts[1:2])
        first.drain()
        # What is found from now on is in the tier alone. It has not all: changes drop what they find half stored.
        clear_once_written(server.unix, share=0.5)
        first.flush()
        for one in seen.values():
            one.now = generate(first, one.prompts[2:])
    with with_disk(folder, **ROOM) as again, Engine(start, again.unix, **patient) as engine:
        has_state(again.unix, "open")  # no lookup waits for a mover that is being started
        is_served(again, 1)
        for one in seen.values():
            one.disk = generate(engine, one.prompts[:1] + one.prompts[2:])
    yield seen


every_change = pytest.mark.parametrize("done", [
    pytest.param(done, id=", ".join(done), marks=[pytest.mark.sweep] if done in SWEPT else []) for done in CHANGES
])


@every_change
def test_nothing_that_was_computed_before_a_change_is_loaded_after_it(
    weights_story: dict[Any, Seen], done: Any
) -> None:
    """By the engine itself, whose stores were still queued. What it keeps in its own cache is not kvdock's."""
    one = weights_story[done]
    assert one.brought in (None, 0)
    if done[1] in FLUSHED:
        assert one.after == (one.true, NOTHING)
    else:
        assert one.after[1] == HITS and one.after[0] != one.true, "the control: other weights, other tokens"


@every_change
def test_what_is_loaded_after_flushes_is_of_the_weights_of_now(weights_story: dict[Any, Seen], done: Any) -> None:
    """And not of a prefix or a tail from before; what the weights of now have computed is loaded."""
    one = weights_story[done]
    assert one.once[0] == one.true and one.twice[0] == one.thrice[0] == one.long_true
    stored = done[1] in FLUSHED
    assert one.once[1] == (HITS if stored else NOTHING), "nothing of before the flush was stored without it"
    assert one.thrice[1] == LONG_HITS


@every_change
def test_an_engine_that_lives_meanwhile_gets_nothing_of_other_weights(
    weights_story: dict[Any, Seen], done: Any
) -> None:
    one = weights_story[done]
    first = done == CHANGES[0]
    assert one.alive == (one.alive_true, HITS[:1] if first else [0]), "the first had the weights of the start before"


@every_change
def test_an_engine_that_starts_later_gets_nothing_of_other_weights(weights_story: dict[Any, Seen], done: Any) -> None:
    one = weights_story[done]
    assert one.late == (one.start_true[:1], HITS[1:2] if done == CHANGES[0] else [0])


@every_change
def test_a_tier_has_nothing_of_other_weights(weights_story: dict[Any, Seen], done: Any) -> None:
    """On disk. The engine itself finds there what its weights of now have computed, since they are those of now. The
    server after it is another one, and so are all engines: what the one that lived has computed comes from the tier."""
    one = weights_story[done]
    assert one.now[1] == (HITS[2:] if done == list(weights_story)[-1] else [0])
    assert one.disk == (
        one.alive_true + one.start_true[1:], [HITS[0], HITS[2] if done == CHANGES[0] else 0]
    )


# ---------------------------------------------------------------------- versions


@pytest.fixture(scope="module")
def versions_story(models: dict[str, Path]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Per name what two engines found of the same prompts, one after the other. Both start from the same files."""
    found: dict[str, tuple[Any, Any]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(pool_bytes=128 * MIB, segment_bytes=64 * MIB))
        first, second, wary = [
            stack.enter_context(Engine(models["llama"], server.unix, **WEIGHTS, extra=extra))
            for extra in ({}, {}, {"trust_weight_versions": False})
        ]

        def bring(engine: Engine, route: str, version: str | None, kind: str, prompts: list[list[int]]) -> Any:
            engine.change(route, models[kind], version=version)
            runs, cached = comes_back(engine, prompts)
            engine.drain()
            return tokens_of(runs), cached

        last = prompts_of(20_000)[2]  # asked for after each change
        for at, (name, (route, version, other, kind)) in enumerate(VERSIONS.items()):
            prompts = [*prompts_of(20_001 + at)[:2], last]
            found[name] = tuple(bring(*one, kind, prompts) for one in ((first, route, version), (second, route, other)))

        def step_20(engine: Engine, kind: str = "llama-b") -> Any:
            return bring(engine, RELOAD, "step-20", kind, prompts_of(30_000))

        named = step_20(first)
        found["not trusted"] = named, step_20(wary)
        runs, cached = comes_back(first, prompts_of(30_000))
        found["nothing has changed"] = named, (tokens_of(runs), cached)
        # The same version once more, for other weights.
        again = step_20(first, "llama-c")
        found["named twice, elsewhere once"] = named, step_20(second)
        found["named twice"] = again, step_20(second, "llama-c")
    yield found


@pytest.mark.parametrize("name", [
    *VERSIONS, "not trusted", "nothing has changed", "named twice, elsewhere once", "named twice",
])
def test_engines_share_under_equal_versions_that_are_trusted_and_were_given_once(
    versions_story: dict[str, tuple[Any, Any]], name: str
) -> None:
    """And a flush without a change costs nothing. What a version stood for first is still right for others."""
    (true, nothing), found = versions_story[name]
    assert nothing == NOTHING, "of before"
    shared = name in {*SHARE, "nothing has changed", "named twice, elsewhere once"}
    assert found == (true, HITS if shared else NOTHING)
