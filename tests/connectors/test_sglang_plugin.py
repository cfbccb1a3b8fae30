"""What the variable SGLANG_KVDOCK does not name kvdock's linker for, by SGLang's settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvdock.connectors.sglang.plugin import why_not


@pytest.mark.parametrize(("settings", "asked", "why"), [
    ({"page_size": 64}, 64, ""), ({"page_size": 128}, None, ""), ({"page_size": 1}, None, ""),
    ({"page_size": 1}, 1, "--page-size is 1, and 64, 128 or 256 is wanted"),
    ({"page_size": 32}, None, "--page-size is 32, and 64, 128 or 256 is wanted"),  # what the kernels need
    ({"page_size": 1, "mamba_radix_cache_strategy": "no_buffer"}, None, "extra_buffer alone"),
    ({"page_size": 1, "speculative_eagle_topk": 4}, None, "drafts of several branches"),
    ({"page_size": 1, "speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10}, None, "branches"),
    ({"page_size": 1, "speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, None, ""),
    ({"page_size": 1, "speculative_eagle_topk": 1, "mamba_radix_cache_strategy": "extra_buffer"}, None, ""),
    ({"page_size": 64, "enable_hierarchical_cache": True}, 64, "SGLang serves one of HiCache and a linker"),
    ({"page_size": 64, "disaggregation_mode": "decode"}, 64, "does not serve --disaggregation-mode"),
    ({"page_size": 64, "disaggregation_mode": "prefill"}, 64, ""), ({"page_size": 256}, None, ""),
    ({"page_size": 64, "disaggregation_mode": "null", "radix_cache_backend": None}, 64, ""),
])
def test_settings_that_it_leaves_alone(settings: dict[str, object], asked: int | None, why: str) -> None:
    found = why_not(SimpleNamespace(**settings), asked)
    assert why in found and bool(found) == bool(why)
