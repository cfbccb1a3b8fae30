"""The linker inside whole SGLang engines on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import HITS, PROMPTS, Engine


@pytest.mark.same_tokens
def test_what_is_loaded_computes_as_a_local_hit_bit_for_bit(models: dict[str, Path], server: ServerProcess) -> None:
    """At page boundaries: an engine's own, and another's."""
    with Engine(models["llama"], server.unix) as first, Engine(models["llama"], server.unix) as second:
        assert first.generate(PROMPTS)[1] == [0, 0, 0]
        local, cached = first.generate(PROMPTS)
        assert cached == HITS
        assert first.do("flush")["flushed"]
        assert first.generate(PROMPTS) == (local, HITS)
        assert second.generate(PROMPTS) == (local, HITS)
        assert first.close() == second.close() == 0, first.log_text() + second.log_text()
