"""What the server learns of how requests of whole SGLang engines on the CPU ended: each token of a prompt, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from engines import Engine
from whole_engines import HITS, PROMPTS, prompts_of

from kvdock.client.client import Client
from kvdock.protocol.hits import HitTotals

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

TOKENS = sum(map(len, PROMPTS))


def hits_of(client: Client, requests: int) -> HitTotals:
    eventually(lambda: client.status().hits.requests >= requests)
    return client.status().hits


def test_each_token_of_a_prompt_has_the_origin_that_it_had(models: dict[str, Path], server: ServerProcess) -> None:
    with Engine(models["llama"], server.unix) as engine, Client(server.unix) as client:
        engine.generate(PROMPTS)
        assert engine.generate(PROMPTS)[1] == HITS, "local"
        engine.drain()
        engine.flush()
        assert engine.generate(PROMPTS)[1] == HITS, "loaded"
        engine.flush()
        longer = [prompt + prompts_of(900)[2][:200] for prompt in PROMPTS]
        assert engine.generate(longer)[1] == HITS, "loaded, and the rest computed"
        found = hits_of(client, 12)
        assert found.requests == 12 and found.prompt_tokens == 3 * TOKENS + sum(map(len, longer))
        assert found.local_tokens == sum(HITS) and found.loaded == {"memory": 2 * sum(HITS)}
        tails = sum(3 * (len(prompt) - (len(prompt) - 1) // 64 * 64) for prompt in PROMPTS)
        tails += sum(len(prompt) - (len(prompt) - 1) // 64 * 64 for prompt in longer)
        never = found.prompt_tokens - found.local_tokens - found.loaded_tokens - tails
        assert found.computed == {"never_stored": never, "tail": tails} and found.reloaded_tokens == 0
        assert found.saved_s is not None
        assert engine.close() == 0, engine.log_text()


def test_a_request_that_sglang_retracts_counts_once(models: dict[str, Path], server: ServerProcess) -> None:
    four = [prompts_of(seed)[0] for seed in (100, 200, 300, 400)]
    retracts = {"plugin_of_others": "retract_now_and_then"}
    with Engine(models["llama"], server.unix, **retracts) as engine, Client(server.unix) as client:
        runs, _ = engine.generate(four, new=40, at_once=True)
        assert all(len(run) == 40 for run in runs)
        assert "Testing retraction. #retracted_reqs: " in engine.log_text()
        found = hits_of(client, 4)
        assert (found.requests, found.prompt_tokens) == (4, sum(map(len, four)))
        assert (found.local_tokens, found.loaded) == (0, {}) and found.computed_tokens == found.prompt_tokens
