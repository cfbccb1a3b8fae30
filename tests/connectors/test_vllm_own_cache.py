"""What of one request's load others find in vLLM's own prefix cache, by vLLM's settings and its names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from kvdock.connectors.vllm.groups import KVGroup
from kvdock.connectors.vllm.tables import OwnCache, own_cache_of

FULL = KVGroup(None, 16, {"layer": 64}, False)
WINDOW = KVGroup(47, 32, {"layer": 64}, False)
STATE = KVGroup(1, 16, {"layer": 64}, False, state="mamba")


@pytest.mark.parametrize(("groups", "prefix_caching", "method", "wanted"), [
    ([FULL], True, None, OwnCache(16)), ([FULL, WINDOW], True, None, OwnCache(16, whole=True)),
    ([FULL], False, None, None), ([FULL, STATE], True, None, None),
    ([FULL], True, "ngram", OwnCache(16)), ([FULL], True, "eagle", OwnCache(16, lost_tokens=16)),
    ([FULL, WINDOW], True, "mtp", None),
])
def test_who_finds_what_others_have_loaded(
    groups: Sequence[KVGroup], prefix_caching: bool, method: str | None, wanted: OwnCache | None
) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        speculative_config=SimpleNamespace(method=method) if method is not None else None,
    )
    assert own_cache_of(config, groups, 16) == wanted


@pytest.mark.parametrize(("tokens", "other", "shares"), [
    (32, [b"a", b"b", b"x"], True), (48, [b"a", b"b", b"x"], False), (48, [b"a", b"b"], False), (15, [b"a"], False),
])
def test_a_prefix_is_shared_if_vllm_has_one_name_for_it(tokens: int, other: list[bytes], shares: bool) -> None:
    loader = SimpleNamespace(block_hashes=[b"a", b"b", b"c"])
    assert OwnCache(16).shares(loader, SimpleNamespace(block_hashes=other), tokens) == shares
