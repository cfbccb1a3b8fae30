"""Engines that lose their server, and a server that loses an engine: a miss, never an error or a wrong token."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from api_helpers import PATIENCE_S, ServerProcess, eventually
from connector_helpers import CHUNK, engine_over, halted, kvdock_of, mortal, no_trace
from engine_helpers import TINY, config, make_engine, prompt, run_one, sampling
from engines_to_kill import store_half
from forks import forked

from kvdock.client.client import Client
from kvdock.engine.config import EngineConfig
from kvdock.engine.engine import Engine
from kvdock.engine.request import Completion
from kvdock.shm.objects import pool_objects

LENGTHS = [100 + 23 * number for number in range(8)]


def cold(tokens: list[int], max_tokens: int, settings: EngineConfig = TINY) -> list[int]:
    return run_one(make_engine(settings), tokens, sampling(max_tokens)).output_tokens


def step_all(engines: list[Engine], done: dict[str, Completion]) -> None:
    for engine in engines:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.check_integrity()


def finish(engines: list[Engine], done: dict[str, Completion]) -> None:
    while any(engine.has_unfinished for engine in engines):
        step_all(engines, done)


def attached(engine: Engine) -> bool:
    return kvdock_of(engine).session.attachment is not None


def test_a_server_killed_and_started_again_costs_misses_and_nothing_else() -> None:
    """Two engines with requests that run, wait, load and store when the server is killed."""
    wanted = {f"{name}{n}": cold(prompt(n, length), 20) for n, length in enumerate(LENGTHS) for name in "ab"}
    done: dict[str, Completion] = {}
    with no_trace(), mortal() as server:
        settings = config(num_blocks=200, max_local_hit_tokens=0)
        engines = [engine_over(server.unix, settings, label=name) for name in "AB"]
        for number, length in enumerate(LENGTHS[:4]):
            run_one(engines[0], prompt(number, length), sampling(1))
        assert engines[0].drain(20.0)
        for engine, name in zip(engines, "ab", strict=True):
            for number, length in enumerate(LENGTHS):
                engine.add_request(prompt(number, length), sampling(20), f"{name}{number}")
        while not any(engine.requests[key].output for engine in engines for key in engine.requests):
            step_all(engines, done)
        server.stop(signal.SIGKILL)
        finish(engines, done)
        assert {key: completion.output_tokens for key, completion in done.items()} == wanted
        assert any(completion.metrics.loaded_tokens for completion in done.values()), "the kill came too early"

        eventually(lambda: not any(attached(engine) for engine in engines))
        missed = run_one(engines[0], prompt(0, LENGTHS[0]))
        assert missed.metrics.loaded_tokens == 0

        with ServerProcess(socket_path=server.settings["socket_path"], adopt="never") as second:
            eventually(lambda: all(attached(engine) for engine in engines))
            assert second.pool_id != server.pool_id
            first = run_one(engines[0], prompt(0, LENGTHS[0]), sampling(20))
            assert first.metrics.loaded_tokens == 0, "nothing of the old pool may be served"
            assert engines[0].drain(20.0)
            again = run_one(engines[1], prompt(0, LENGTHS[0]), sampling(20))
            assert again.metrics.loaded_tokens == LENGTHS[0] // CHUNK * CHUNK
            assert again.output_tokens == first.output_tokens == wanted["a0"]
            for engine in engines:
                assert engine.drain(20.0)
                engine.close()
            assert second.stop() == 0
        assert second.shared_memory() == []


def test_engines_go_on_while_the_server_is_stopped_and_use_the_same_attachment_afterwards() -> None:
    with mortal() as server:
        engine = engine_over(server.unix, config(num_blocks=200, max_local_hit_tokens=0))
        for number, length in enumerate(LENGTHS[:3]):
            run_one(engine, prompt(number, length), sampling(1))
        assert engine.drain(20.0)
        before = kvdock_of(engine).session.attachment
        done: dict[str, Completion] = {}
        with halted(server, kvdock_of(engine)):
            for number, length in enumerate(LENGTHS):
                engine.add_request(prompt(number, length), sampling(5), f"r{number}")
            finish([engine], done)
            for number, length in enumerate(LENGTHS):
                assert done[f"r{number}"].output_tokens == cold(prompt(number, length), 5)
                assert done[f"r{number}"].metrics.loaded_tokens == 0
            eventually(lambda: not attached(engine))
            assert engine.drain(PATIENCE_S)
        eventually(lambda: kvdock_of(engine).session.attachment is before)
        found = run_one(engine, prompt(1, LENGTHS[1]), sampling(5))
        assert found.metrics.loaded_tokens == LENGTHS[1] // CHUNK * CHUNK
        assert found.output_tokens == done["r1"].output_tokens
        engine.close()


def test_an_engine_killed_in_the_middle_of_a_store_publishes_nothing_and_its_memory_comes_back() -> None:
    tokens = prompt(1, 330)
    with mortal(settle_s=0.5) as server, Client(server.unix) as client:
        with forked(store_half, server.unix, "salt", len(tokens)) as link:
            assert link.recv() == "halfway"
            assert client.status().chunks.reserved >= 1
            assert client.status().chunks.ready == 0

            other = engine_over(server.unix, salt="salt", label="survivor")
            while_it_hangs = run_one(other, tokens, sampling(3))
            assert while_it_hangs.metrics.loaded_tokens == 0, "half a store was served"
            assert other.drain(20.0)
        eventually(lambda: client.status().counters["dead_members"] == 1)
        eventually(lambda: client.status().chunks.reserved == 0)
        eventually(lambda: client.status().chunks.quarantined == 0)
        assert client.status().reservations == 0

        fresh = config(max_local_hit_tokens=0)
        second = engine_over(server.unix, fresh, salt="salt", label="second")
        found = run_one(second, tokens, sampling(3))
        assert second.drain(20.0)
        third = engine_over(server.unix, fresh, salt="salt", label="third")
        hit = run_one(third, tokens, sampling(3))
        assert hit.metrics.loaded_tokens == len(tokens) // CHUNK * CHUNK, "the keys could not be stored again"
        assert hit.output_tokens == found.output_tokens == while_it_hangs.output_tokens == cold(tokens, 3)
        assert client.status().counters["mismatches"] == 0
        for engine in (other, second, third):
            assert engine.drain(20.0)
            engine.close()
        assert server.stop() == 0
    assert server.shared_memory() == []


def test_engines_with_different_manifests_never_hit_each_other() -> None:
    tokens = prompt(2, 200)
    with ServerProcess() as server:
        variants: list[tuple[EngineConfig, dict[str, Any]]] = [
            (TINY, {}),
            (TINY, {"salt": "tenant"}),
            (TINY, {"chunk_tokens": 32}),
            (config(kv_format="NL_X_TWO_NB_NH_BS_HS"), {}),
            (config(model=dataclasses.replace(TINY.model, seed=1)), {}),
        ]
        for settings, options in variants:
            for turn in range(2):
                engine = engine_over(server.unix, settings, **options)
                found = run_one(engine, tokens, sampling(2))
                assert engine.drain(20.0)
                engine.close()
                assert (found.metrics.loaded_tokens > 0) == (turn == 1), f"{settings} {options}"
                assert found.output_tokens == cold(tokens, 2, settings)
        engine = engine_over(server.unix, config(kv_format="NB_NL_TWO_BS_NH_HS"))
        found = run_one(engine, tokens, sampling(2))
        assert found.metrics.loaded_tokens == 192, "formats with the same order of elements share bytes"
        assert found.output_tokens == cold(tokens, 2)
        engine.close()


def test_everything_closed_leaves_nothing_in_shared_memory_and_nothing_open() -> None:
    with no_trace(), ServerProcess() as server:
        with no_trace():
            engines = [engine_over(server.unix, label=str(number)) for number in range(3)]
            for engine in engines:
                run_one(engine, prompt(3, 150), sampling(2))
            for engine in engines:
                engine.add_request(prompt(4, 300))
                engine.step()
                engine.close()
        assert server.stop() == 0
        assert server.pool_id not in pool_objects()
