"""Settings, groups and room of the vLLM connector: what needs no vLLM to be checked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvdock.connectors.vllm.config import NotSupported, Settings
from kvdock.connectors.vllm.groups import KVGroup, groups_of
from kvdock.connectors.vllm.identity import depends_on_more_than_tokens
from kvdock.connectors.vllm.room import Room
from kvdock.connectors.vllm.setup import refuse_what_is_not_supported


@pytest.mark.parametrize(("extra", "named"), [
    ({}, "address is ''"),
    ({"address": "localhost:1"}, "address is 'localhost:1'"),
    ({"address": "unix:/s", "chunk_token": 64}, "'chunk_token' is no setting"),
    ({"address": "unix:/s", "chunk_tokens": "64"}, "chunk_tokens is '64'"),
    ({"address": "unix:/s", "chunk_tokens": True}, "chunk_tokens is True"),
    ({"address": "unix:/s", "chunk_tokens": 0}, "above zero"),
])
def test_wrong_settings_are_refused_by_name(extra: dict[str, object], named: str) -> None:
    with pytest.raises(NotSupported, match=named.replace("(", r"\(")):
        Settings.load(extra)


def test_whole_seconds_are_a_timeout() -> None:
    assert Settings.load({"address": "unix:/s", "timeout_s": 3}).timeout_s == 3.0


def config(**parallel: int) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        speculative_config=None, cache_config=SimpleNamespace(), model_config=SimpleNamespace(),
    )


@pytest.mark.parametrize("name", [
    "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
])
def test_parallelism_that_is_not_served_is_refused_at_start(name: str) -> None:
    refuse_what_is_not_supported(config(**{name: 1}))
    with pytest.raises(NotSupported, match=f"{name} is 2, and 1 is wanted"):
        refuse_what_is_not_supported(config(**{name: 2}))


def test_kinds_of_kv_that_a_prefix_does_not_name_are_refused() -> None:
    class MambaSpec:
        block_size, page_size_bytes = 16, 128

    group = SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["a"])
    with pytest.raises(NotSupported, match="KV of kind MambaSpec"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]))


@pytest.mark.parametrize("extra", [
    {"lora_request": object()}, {"mm_features": [1]}, {"cache_salt": "a"}, {"prompt_embeds": object()},
    {"prompt_token_ids": None}, {"resumable": True},
])
def test_requests_that_depend_on_more_than_tokens_are_told_apart(extra: dict[str, object]) -> None:
    assert not depends_on_more_than_tokens(SimpleNamespace(prompt_token_ids=[1]))
    assert depends_on_more_than_tokens(SimpleNamespace(**{"prompt_token_ids": [1], **extra}))


def test_background_loads_always_leave_room_for_the_largest_request() -> None:
    room = Room([KVGroup(None, 16, {"a": 128}, False)], blocks=20, longest_tokens=1024, step_tokens=64)
    small, other, large = (
        SimpleNamespace(request_id=name, num_prompt_tokens=tokens, max_tokens=0)
        for name, tokens in (("small", 64), ("other", 64), ("large", 160))
    )
    for request in (small, other, large):
        room.add(request)
    assert room.fits(small)  # 5 + 11 <= 20
    room.take(small)
    assert not room.fits(other)  # 5 + 5 + 11 > 20
    room.remove("large")
    assert room.fits(other)  # 5 + 5 + 5 <= 20
    room.take(other)
    room.give_back("small")
    room.add(large)
    assert not room.fits(large)  # 5 + 11 + 11 > 20
