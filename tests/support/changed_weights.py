"""What tests of weights that change ask a whole engine."""

from __future__ import annotations

from itertools import count
from typing import Any

from whole_engines import WholeEngine, prompts_of, tokens_of

LONG_HITS = [192, 384, 576]
NEW = 6
_salts = count()


def longer(prompts: list[list[int]]) -> list[list[int]]:
    """Each goes on for a chunk."""
    return [prompt + more[:70] for prompt, more in zip(prompts, prompts_of(sum(prompts[0]) + 7), strict=True)]


def generate(engine: WholeEngine, prompts: list[list[int]], **how: Any) -> tuple[list[list[int]], list[int]]:
    runs, cached = engine.generate(prompts, new=NEW, **how)
    return tokens_of(runs), cached


def truth(engine: WholeEngine, prompts: list[list[int]]) -> list[list[int]]:
    """What its weights of now compute."""
    tokens, cached = generate(engine, prompts, cache_salt=f"truth {next(_salts)}")
    assert cached == [0] * len(prompts)
    return tokens
