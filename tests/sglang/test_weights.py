"""SGLang's own ways to change weights: updates in several calls, requests that run across one, two ranks, and hooks
that others put in the way. tests/whole/test_weights.py has what both engines tell alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, comes_true
from changed_weights import LONG_HITS, generate, longer, truth
from engines import PP2, TP2, Engine, odd
from whole_engines import HITS, NOTHING, prompts_of

from kvdock.client.client import Client

pytestmark = [pytest.mark.sglang, pytest.mark.weights, pytest.mark.timeout(1800)]


def stored(server: ServerProcess) -> int:
    with Client(server.unix) as client:
        return client.status().counters["stored_chunks"]


def test_between_begin_and_end_nothing_is_looked_up_or_stored(models: dict[str, Path], server: ServerProcess) -> None:
    prompts, others = prompts_of(1), prompts_of(2)
    with Engine(models["llama"], server.unix) as engine:
        generate(engine, prompts)
        engine.drain()
        engine.flush()
        engine.change("begin", models["llama-b"])
        before = stored(server)
        assert generate(engine, prompts)[1] == NOTHING
        generate(engine, others)
        engine.drain()
        assert stored(server) == before
        engine.change("end")
        engine.flush()
        assert generate(engine, others)[1] == NOTHING
        engine.drain()
        assert stored(server) > before, "and from then on it is"


def test_a_request_that_runs_across_a_change_is_not_stored(models: dict[str, Path], server: ServerProcess) -> None:
    """Nor what goes on from it, before the tree is flushed; what has nothing of it in front is."""
    prompt, other = prompts_of(3)[0], prompts_of(4)
    with Engine(models["llama"], server.unix) as engine:
        tokens = engine.do("across", prompt=prompt, model=str(models["llama-b"]), new=150)["tokens"]
        whole = [prompt + tokens]
        longs = [whole[0] + other[0][:70]]
        generate(engine, longs)
        generate(engine, other)
        true, other_true = truth(engine, longs), truth(engine, other)
        engine.drain()
        for hits in ([0], [len(longs[0]) // 64 * 64]):
            engine.flush()
            assert generate(engine, longs) == (true, hits)
            assert generate(engine, other) == (other_true, HITS)
            engine.drain()


def test_stores_that_are_queued_when_weights_change_are_not_filed_under_the_new_ones(
    models: dict[str, Path], server: ServerProcess, tmp_path: Path
) -> None:
    """Nor under any: nobody waits for them."""
    prompts = prompts_of(10)
    with Engine(models["llama"], server.unix, **odd("HeldOffersLinker", tmp_path)) as engine:
        generate(engine, prompts)
        engine.change("disk", models["llama-b"])
        (tmp_path / "go").touch()
        engine.flush()
        assert generate(engine, prompts) == (truth(engine, prompts), NOTHING)
        with Engine(models["llama"], server.unix) as other:
            assert generate(other, prompts)[1] == NOTHING
        engine.drain()
        engine.flush()
        assert generate(engine, prompts)[1] == HITS


@pytest.mark.sweep("route")
@pytest.mark.parametrize("route", ["rdma", "disk"])
@pytest.mark.parametrize("how", [TP2, PP2], ids=["two ranks", "two stages"])
def test_two_ranks_agree_about_each_change(
    route: str, how: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    prompts = prompts_of(5)
    with Engine(models["llama"], server.unix, **how) as engine:
        generate(engine, prompts)
        engine.change(route, models["llama-b"])
        engine.flush()
        found, true = generate(engine, prompts), truth(engine, prompts)
        assert found == (true, NOTHING)
        engine.drain()
        engine.flush()
        assert generate(engine, prompts) == (true, HITS)
        engine.change(route, models["llama-c"])
        generate(engine, longer(prompts))
        engine.drain()
        for hits in (NOTHING, LONG_HITS):
            engine.flush()
            assert generate(engine, longer(prompts)) == (truth(engine, longer(prompts)), hits)
            engine.drain()


@pytest.mark.parametrize("how", [TP2, PP2], ids=["two ranks", "two stages"])
def test_a_hook_that_one_rank_lacks_stops_all_of_them(
    how: dict[str, Any], models: dict[str, Path], server: ServerProcess
) -> None:
    """And none waits for another."""
    prompts = prompts_of(6)
    with Engine(models["llama"], server.unix, **how) as engine:
        true, _ = generate(engine, prompts)
        engine.drain()
        engine.do("rpc", method="take_the_updates_place", how={"only_rank": 1})
        before = stored(server)
        engine.flush()
        assert generate(engine, prompts) == (true, NOTHING)
        generate(engine, prompts_of(7))
        engine.drain()
        assert stored(server) == before
        assert "kvdock shares nothing with this engine" in engine.log_text()


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
    prompts = prompts_of(8)
    with Engine(models["llama"], server.unix, **how) as engine:
        true, _ = generate(engine, prompts)
        engine.drain()
        engine.flush()
        assert generate(engine, prompts) == (true, HITS if shares else NOTHING)
        assert bool(stored(server)) == shares
        assert ("kvdock shares nothing with this engine" in engine.log_text()) != shares


def test_who_takes_a_methods_place_later_ends_sharing_and_who_calls_through_does_not(
    models: dict[str, Path], server: ServerProcess
) -> None:
    prompts = prompts_of(9)
    with Engine(models["llama"], server.unix) as engine:
        true, _ = generate(engine, prompts)
        engine.do("rpc", method="take_the_updates_place", how={"calls_through": True})
        engine.drain()
        engine.flush()
        assert generate(engine, prompts) == (true, HITS)
        engine.do("rpc", method="take_the_updates_place", how={})
        engine.flush()
        assert generate(engine, prompts) == (true, NOTHING)
        assert comes_true(lambda: "kvdock shares nothing with this engine" in engine.log_text())
