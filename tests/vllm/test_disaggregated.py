"""Prefill on one whole vLLM engine, decode on another: NIXL moves the KV between them, and kvdock stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess
from engines import KV_DEVICE, Engine
from ports import held_port
from whole_engines import HITS, OTHERS, PROMPTS, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

NOTHING, WHOLE = [0, 0, 0], [len(prompt) for prompt in PROMPTS]
LAYOUT = {"VLLM_KV_CACHE_LAYOUT": "HND"}
"""Which NIXL wants on a GPU. Engines of another layout are in another namespace."""
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
LEFT_ALONE = {"load": False, "store": False}


@contextmanager
def pair(model: Path, address: str, order: str) -> Iterator[tuple[Engine, Engine]]:
    """One that prefills and one that decodes. `order`: where NIXL stands, seen from kvdock."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": KV_DEVICE}
    side = {**LAYOUT, "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    # Where somebody else listens at its port, vLLM waits for a thread of its own that has ended, and never starts.
    engines = [
        Engine(model, address, environ={**side, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(held_port())}, **{order: [nixl]})
        for _ in range(2)
    ]
    with engines[0] as prefills, engines[1] as decodes:
        yield prefills, decodes


def handed_over(
    prefills: Engine, decodes: Engine, prompts: list[list[int]], first: dict[str, Any], second: dict[str, Any]
) -> tuple[list[list[int]], list[int], list[int]]:
    """What the second engine generates, and how many tokens a prompt connectors brought to the first and to the second.
    `first`, `second`: what each is told for kvdock."""
    runs, to_first, to_second = [], [], []
    for prompt in prompts:
        answer = prefills.do("generate", prompts=[prompt], new=1, handed=PREFILL_ONLY, kvdock=first)
        to_first.append(answer["brought"])
        given = answer["handed"][0]
        assert given["do_remote_prefill"] and "kvdock" not in given
        answer = decodes.do("generate", prompts=[prompt], handed=given, kvdock=second)
        runs += answer["runs"]
        to_second.append(answer["brought"])
        prefills.drain()  # it keeps the blocks until they have been read
        decodes.drain()
    return tokens_of(runs), to_first, to_second


@pytest.mark.parametrize("order", [pytest.param("before", marks=pytest.mark.sweep), "behind"])
def test_nixl_hands_on_what_kvdock_loads_and_kvdock_stores_what_nixl_hands_on(
    order: str, models: dict[str, Path], server: ServerProcess
) -> None:
    model = models["llama"]
    with Engine(model, server.unix, environ=LAYOUT) as third, pair(model, server.unix, order) as (prefills, decodes):
        wanted, others = (tokens_of(third.generate(some, kvdock=LEFT_ALONE)[0]) for some in (PROMPTS, OTHERS))
        third.flush()

        assert handed_over(prefills, decodes, PROMPTS, {}, LEFT_ALONE) == (wanted, NOTHING, WHOLE)
        assert third.generate(PROMPTS)[1] == HITS, "what the first computed"

        assert handed_over(prefills, decodes, OTHERS, LEFT_ALONE, {}) == (others, NOTHING, WHOLE)
        runs, found = third.generate(OTHERS)
        assert (tokens_of(runs), found) == (others, HITS), "what NIXL brought to the second"

        prefills.flush()
        decodes.flush()
        assert handed_over(prefills, decodes, PROMPTS, {}, LEFT_ALONE) == (wanted, HITS, WHOLE)
        asked_first = WHOLE if order == "before" else HITS
        assert handed_over(prefills, decodes, OTHERS, {}, {}) == (others, HITS, asked_first), "both have it"
