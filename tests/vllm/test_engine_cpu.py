"""Whole vLLM engines on the CPU: what is loaded beside other requests.

test_models.py has what each kind of model loads request by request.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import Engine
from whole_engines import HITS, NOTHING, OTHERS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.sweep), "gemma"])
def test_side_by_side_loaded_runs_have_the_bits_of_local_hits(
    kind: str, models: dict[str, Path], server: ServerProcess
) -> None:
    """One engine loads in the background, the other in the step that runs the request."""
    with (
        Engine(models[kind], server.unix, extra={"load_async": True}) as first,
        Engine(models[kind], server.unix, extra={"load_async": False}) as second,
    ):
        assert first.about == second.about
        for prompts, owner, other in ((PROMPTS, first, second), (OTHERS, second, first)):
            assert owner.generate(prompts)[1] == NOTHING
            owner.drain()
            assert other.generate(prompts)[1] == HITS

        # All in one step: as many as run at a time.
        four = [*PROMPTS, OTHERS[0]]
        local, at_hand = second.generate(four, at_once=True, admitted="together")
        assert at_hand == [*HITS, HITS[0]]
        assert second.generate(four, at_once=True, admitted="together")[0] == local, "the control: batches are alike"
        second.flush()
        assert second.generate(four, at_once=True, admitted="together") == (local, at_hand)

        # Loads in the background end when they end, so batches differ, and with them the last bits of what comes first.
        first.flush()
        loaded, at_hand = first.generate(PROMPTS + OTHERS, at_once=True)
        assert at_hand == 2 * HITS
        singly, _ = first.generate(PROMPTS + OTHERS)
        for run, alone in zip(loaded, singly, strict=True):
            (token, found), (wanted_token, wanted) = run[0], alone[0]
            assert token == wanted_token and float.fromhex(found) == pytest.approx(float.fromhex(wanted), abs=1e-3)
