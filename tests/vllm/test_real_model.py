"""Real weights, served over HTTP: what people see of kvdock, which is that texts stay as they are.

SmolLM2-135M-Instruct answers word problems behind eight worked examples that all of them have in common, 30 at a time:
60 problems with --sweeps, and the first 16 of them without. Batches depend on when requests and loads end, and with
them the last bits of what is computed. So weights and KV are float32, and the problems of `word_problems.json` are such
that wherever the model chooses a token, the second best is far behind (MARGIN) of what rounding moves (ROUNDING): the
test measures both, in vLLM without a connector.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, ServerProcess, eventually
from engines import ENGINE_PYTHON
from served_engine import ServedEngine

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

WEIGHTS = ENGINE_PYTHON.parent.parent / "weights"
"""What `make vllm` makes of the package that has the weights (real_model.py)."""
DATA = json.loads((Path(__file__).parent / "word_problems.json").read_text())
AT_A_TIME = 30
CHUNK = 128
EXAMPLES_TOKENS = 5 * CHUNK
"""Whole chunks of what all prompts have in common, in tokens."""
PROMPT_TOKENS = 6 * CHUNK
"""Whole chunks of each prompt: the last one is its own."""
MARGIN, ROUNDING = 0.02, 0.002
"""Log-probabilities: the least distance of the second best token, and the most that two runs may differ."""
HOW = {"max_tokens": 32, "temperature": 0, "stop": ["\n"], "logprobs": 2}
ENGINE = (
    "--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "512", "--enable-prompt-tokens-details",
    "--enforce-eager",
)
"""vLLM's defaults otherwise. Compiling for the CPU takes minutes; blocks of 128 tokens, its default on the CPU, would
have each request compute most of a block of examples again; and a step of 2,048 tokens takes so long on a core that is
shared that stores pass their deadline (30 s)."""
CONNECTOR = {
    "kv_connector": "KvdockConnector", "kv_role": "kv_both",
    # How busy the machine is decides as little as can be set.
    "kv_connector_extra_config": {"lookup_wait_s": 1.0, "timeout_s": 30.0, "load_if_cheaper": False},
}


def prompts(count: int) -> list[str]:
    examples = "".join(f"Question: {e['question']}\nAnswer: {e['answer']}\n\n" for e in DATA["examples"])
    return [f"{examples}Question: {problem}\nAnswer:" for problem in DATA["problems"][:count]]


def run(engine: ServedEngine, count: int) -> list[dict[str, Any]]:
    return engine.complete(prompts(count), at_a_time=AT_A_TIME, **HOW)


def texts_of(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in answers]


def cached_of(answers: list[dict[str, Any]]) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [(answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for answer in answers]


def margins_of(answers: list[dict[str, Any]]) -> list[float]:
    """By problem: how far behind the best token the second best was, where that was least."""
    chosen = [answer["choices"][0]["logprobs"]["top_logprobs"] for answer in answers]
    return [min(max(at.values()) - min(at.values()) for at in tokens) for tokens in chosen]


def furthest(answers: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """How far apart the log-probabilities of the same texts' tokens are."""
    ours, theirs = ([answer["choices"][0]["logprobs"]["token_logprobs"] for answer in run] for run in (answers, others))
    return max(
        abs(one - other) for pair in zip(ours, theirs, strict=True) for one, other in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("count", [16, pytest.param(60, marks=pytest.mark.sweep)])
def test_problems_have_the_same_texts_with_kvdock_without_it_and_after_a_restart(count: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(pool_bytes=512 * MIB, segment_bytes=512 * MIB))
        client = stack.enter_context(Client(server.unix))
        with_kvdock = (*ENGINE, "--kv-transfer-config", json.dumps(CONNECTOR))
        at = {"KVDOCK_ADDRESS": server.unix}
        # Both at once: one core each.
        with ServedEngine(WEIGHTS, tmp_path, *ENGINE) as plain, \
                ServedEngine(WEIGHTS, tmp_path, *with_kvdock, environ=at) as first, ThreadPoolExecutor(1) as beside:
            plain.wait_ready()
            first.wait_ready()
            control = beside.submit(lambda: [run(plain, count), run(plain, count)])
            ours = [run(first, count), run(first, count)]
            wanted, again = control.result()
            assert first.metrics()["vllm:kvdock_store_tokens_total"] >= EXAMPLES_TOKENS
            # An answer comes a moment before what was computed for it has been stored.
            stored = (EXAMPLES_TOKENS + len(wanted) * (PROMPT_TOKENS - EXAMPLES_TOKENS)) // CHUNK
            eventually(lambda: client.status().chunks.ready >= stored, 60.0)
            assert first.close() == 0, first.log_text()[-4000:]

        assert texts_of(again) == texts_of(wanted) and furthest(again, wanted) < ROUNDING, "the control"
        assert min(margins_of(wanted)) > MARGIN, "the control"
        texts = texts_of(wanted)
        assert all(texts) and len(set(texts)) > count // 2, "the problems differ, and so do the answers"

        with ServedEngine(WEIGHTS, tmp_path, *with_kvdock, environ=at) as restarted:
            ours.append(run(restarted.wait_ready(), count))
            figures = restarted.metrics()
        for answers in ours:
            assert texts_of(answers) == texts_of(wanted)
            assert furthest(answers, wanted) < ROUNDING
        assert min(cached_of(ours[1])) >= PROMPT_TOKENS, "found in vLLM's own cache"
        # A new process can have all this only from kvdock, and each prompt has a chunk that no other has. An answer
        # that takes the server more than a second is a miss; on a machine that is so busy, each must have been counted.
        missed = sum(cached < PROMPT_TOKENS for cached in cached_of(ours[2]))
        assert missed <= figures["vllm:kvdock_lookups_late_total"] and missed < len(wanted) / 2
        assert figures["vllm:kvdock_load_seconds_count"] >= len(wanted) - missed, "loads"
        assert figures["vllm:kvdock_load_tokens_total"] > EXAMPLES_TOKENS
        assert figures["vllm:kvdock_load_failures_total"] == 0
