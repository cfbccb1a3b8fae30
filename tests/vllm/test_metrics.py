"""vLLM's own hooks: statistics as it logs and exports them, its reset, its sleep mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import Engine
from prometheus_client.parser import text_string_to_metric_families
from schedulers import ITSELF, VERSIONS, Schedulers
from whole_engines import HITS, PROMPTS

from kvdock.connectors.vllm.figures import METRICS

pytestmark = pytest.mark.vllm

LLAMA_TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
"""Layers, K and V, heads, head size, bytes of a float32: models.py."""


@pytest.fixture(params=[*VERSIONS, pytest.param(ITSELF, marks=pytest.mark.sweep)])
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def told(version: str, server: ServerProcess, schedulers: Schedulers) -> Callable[[str], dict[str, Any]]:
    """What a scenario of hook_scenarios.py tells with that vLLM."""
    return lambda scenario: schedulers.run(version, scenario, server.unix, module="hook_scenarios")


@pytest.mark.every_minor
def test_a_load_is_in_prometheus_and_in_the_log(told: Callable[[str], dict[str, Any]]) -> None:
    found = told("statistics")
    cold, warm, lines = found["cold"], found["warm"], "\n".join(found["lines"])
    assert cold["attached"] == 1
    assert "load_tokens_total" not in cold and "load_seconds_count" not in cold
    assert warm["load_tokens_total"] == warm["store_tokens_total"] == 128
    assert warm["load_bytes_total"] == warm["store_bytes_total"] == 128 * 8
    assert warm["load_seconds_count"] == 1 and 0 < warm["load_seconds_sum"] < 10
    assert warm["store_seconds_count"] >= 1
    assert 2 <= warm["lookup_seconds_count"] <= 4, "two requests, each asked about once more if its answer was old"
    assert "load_failures_total" not in warm
    assert "KV Transfer metrics: " in lines and "Loads=1, Load MB=0.001, Avg load GB/s=" in lines


def test_figures_of_two_workers_are_added(told: Callable[[str], dict[str, Any]]) -> None:
    one = {"load_bytes": 5, "load_seconds": [0.5]}
    both = {"load_bytes": 12, "load_seconds": [0.5, 0.25], "fence_seconds": 0.125}
    assert told("two_workers") == {"sums": [one, both, None], "untouched": one}


@pytest.mark.every_minor
def test_what_vllm_receives_and_refuses_leaves_nothing_behind(told: Callable[[str], dict[str, Any]]) -> None:
    nothing = dict.fromkeys(("tracked", "open", "waiting", "asked", "stories"), 0)
    assert told("refused") == {"leases": [4, 0], "hit": 128, "left": nothing}


@pytest.mark.every_minor
def test_nothing_stored_before_a_reset_is_loaded_after_it(told: Callable[[str], dict[str, Any]]) -> None:
    assert told("reset") == {"hits": [0, 128, 0, 128], "answer": True, "bad_reads": 0}


def test_a_store_that_ends_after_a_reset_publishes_nothing(told: Callable[[str], dict[str, Any]]) -> None:
    found = told("reset_during_store")
    assert found["stores"] >= 1 and found["published"] == 0
    assert found["answer"] is True and found["bad_reads"] == 0
    assert found["hits"][0] == 0 and found["hits"][-1] == 128


def test_what_a_running_request_computes_over_a_reset_is_not_stored(told: Callable[[str], dict[str, Any]]) -> None:
    assert told("reset_while_one_runs") == {"hits": [0, 128], "answer": False, "bad_reads": 0}


def test_a_request_that_a_reset_preempts_is_computed_and_stored_anew(told: Callable[[str], dict[str, Any]]) -> None:
    found = told("reset_preempts_one")
    assert found["answer"] is True and found["hits"][-1] == 128 and found["bad_reads"] == 0


def test_sleep_mode_wants_a_word_on_the_pool_and_a_vllm_that_says_when_memory_goes(
    version: str, told: Callable[[str], dict[str, Any]]
) -> None:
    found = told("sleep")
    assert "on_reset is 'clear'" in found["clear"] and "wanted: 'leave' if" in found["clear"]
    for on_reset in ("apart", "leave"):
        assert found[on_reset] == "" if version == "0.33.0" else "wanted: off, or vLLM 0.33" in found[on_reset]


def samples(engine: Engine) -> dict[str, float]:
    """By name, of kvdock and of vLLM's external prefix cache; one engine, so one of each."""
    found = {}
    for family in text_string_to_metric_families(engine.do("metrics")["text"]):
        for sample in family.samples:
            if sample.name.startswith(("vllm:kvdock_", "vllm:external_prefix_cache_")) and "le" not in sample.labels:
                assert sample.labels["engine"] == "0"
                found[sample.name] = sample.value
    return found


@pytest.mark.timeout(400)  # on a machine with much else to do
def test_a_whole_engine_exports_what_it_loaded(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix, engine={"disable_log_stats": False}) as engine:
        engine.generate(PROMPTS)
        cold = samples(engine)
        assert all(any(name.startswith(f"vllm:kvdock_{figure}") for name in cold) for figure in METRICS)
        assert cold["vllm:kvdock_attached"] == 1
        assert cold["vllm:kvdock_store_tokens_total"] == sum(HITS)
        assert cold["vllm:kvdock_store_bytes_total"] == sum(HITS) * LLAMA_TOKEN_BYTES
        assert cold["vllm:kvdock_load_tokens_total"] == cold["vllm:kvdock_load_seconds_count"] == 0
        assert engine.do("reset")["reset"]
        assert engine.generate(PROMPTS)[1] == HITS
        warm = samples(engine)
        assert warm["vllm:kvdock_load_tokens_total"] == sum(HITS)
        assert warm["vllm:kvdock_load_bytes_total"] == sum(HITS) * LLAMA_TOKEN_BYTES
        assert warm["vllm:kvdock_load_seconds_count"] == 3
        assert warm["vllm:kvdock_load_failures_total"] == 0
        assert warm["vllm:external_prefix_cache_hits_total"] == sum(HITS)
        assert engine.do("reset", connector=True)["reset"]
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]


def test_beside_recurrent_states_without_a_prefix_cache_it_stands_aside(told: Callable[[str], dict[str, Any]]) -> None:
    found = told("aside")
    assert [line for line in found["said"] if "aside" in line] == [
        "kvdock stands aside, and vLLM runs as without it: kvdock cannot cache recurrent states here: prefix caching "
        "is off, and --enable-prefix-caching --mamba-cache-mode align is wanted."
    ]
    assert found["made"] == [4, 4] and found["loaded"] == 0 and found["remembered"] == 0
    assert found["told"] == [None, False, False]
