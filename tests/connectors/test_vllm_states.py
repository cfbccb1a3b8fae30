"""Recurrent states in vLLM's groups: which set-ups are served, and what of a state tells engines apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvdock.connectors.errors import CannotCacheError, NotSupportedError
from kvdock.connectors.vllm.groups import (
    KVGroup,
    chunk_tokens,
    groups_of,
    refuse_states,
    refuse_unreconciled_hits,
    signature,
)
from kvdock.connectors.vllm.tables import STATE_BLOCKS, BlockBudget, settled

FULL = KVGroup(None, 16, {"a": 128}, False)
STATE = KVGroup(1, 16, {"b": 128}, False, state="mamba")


class MambaSpec(SimpleNamespace):
    """By its name, as vLLM's."""


def spec(**other: Any) -> MambaSpec:
    made = {"block_size": 16, "page_size_bytes": 128, "mamba_type": "mamba2", "shapes": ((3, 4), (8,)),
            "dtypes": (torch.float16, torch.float32)}
    return MambaSpec(**{**made, **other})


def group_of(**other: Any) -> KVGroup:
    group = SimpleNamespace(kv_cache_spec=spec(**other), layer_names=["b"])
    [made] = groups_of(SimpleNamespace(kv_cache_groups=[group]))
    return made


def test_a_state_is_a_window_of_one_token_and_a_chunk_is_one_block() -> None:
    group = group_of()
    assert (group.window_tokens, group.block_tokens, group.latent) == (1, 16, False)
    assert [group.left_behind(tokens) for tokens in (0, 1, 16, 17)] == [0, 0, 15, 16]
    assert chunk_tokens([FULL, group], 128) == 16


@pytest.mark.parametrize("other", [
    {"dtypes": (torch.float16, torch.float16)}, {"shapes": ((4, 3), (8,))}, {"mamba_type": "gdn_attention"},
])
def test_engines_whose_states_differ_inside_a_page_never_meet(other: dict[str, Any]) -> None:
    """Pages come as bytes, whatever is in them."""
    pages = {"b": torch.zeros((5, 1, 1, 128), dtype=torch.int8)}
    assert signature([group_of()], pages, 5) == signature([group_of()], pages, 5)
    assert signature([group_of()], pages, 5) != signature([group_of(**other)], pages, 5)


def test_a_state_whose_types_are_not_all_known_is_not_cached() -> None:
    with pytest.raises(CannotCacheError, match="of 2 tensors with 1 types"):
        group_of(shapes=((4, 3), (8,)), dtypes=(torch.float16,))


def test_states_that_may_still_change_are_left_out_and_kv_never() -> None:
    table = [[1, 2, 3, None], [None, 22, 23, 24]]
    assert settled([FULL, STATE], table) == [[1, 2, 3, None], [None] * 4]
    assert settled([FULL, STATE], table, (32, 50)) == [[1, 2, 3, None], [None, 22, None, None]]
    handed = {(1, 24, 64), (1, 23, 32), (0, 23, 48)}  # the second is elsewhere, the third another group's
    assert settled([FULL, STATE], table, (), handed) == [[1, 2, 3, None], [None, None, None, 24]]


def test_the_block_budget_counts_a_few_blocks_for_a_state() -> None:
    request = SimpleNamespace(request_id="r", num_prompt_tokens=1600, max_tokens=0)
    for blocks, fits in ((101 + STATE_BLOCKS - 1, False), (101 + STATE_BLOCKS, True)):
        budget = BlockBudget([FULL, STATE], blocks=blocks, longest_tokens=4096, step_tokens=2048)
        budget.add(request)
        assert budget.fits(request) == fits


def config(drafts: Any = None, **cache: Any) -> SimpleNamespace:
    made = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    return SimpleNamespace(cache_config=SimpleNamespace(**{**made, **cache}), speculative_config=drafts)


@pytest.mark.parametrize(("set_up", "groups", "load_async", "said"), [
    (config(enable_prefix_caching=False, mamba_cache_mode="none"), [FULL, STATE], True, "prefix caching is off"),
    (config(mamba_cache_mode="all"), [FULL, STATE], True, "mamba_cache_mode is 'all', and --mamba-cache-mode align"),
    (config(SimpleNamespace(method="mtp")), [FULL, STATE], True, "the speculative method is 'mtp', and none is wanted"),
    (config(use_replayssm=True), [FULL, STATE], True, "use_replayssm is on"),
    (config(use_kda_recoverssm=True), [FULL, STATE], True, "use_kda_recoverssm is on"),
    (config(), [FULL, STATE], False, "load_async is false, and true is wanted"),
    (config(), [STATE], True, "full attention is in no KV cache group"),
    (config(), [KVGroup(None, 32, {"a": 128}, False), STATE], True, "is 16 tokens, and 32 are wanted"),
])
def test_beside_states_that_are_not_known_to_come_back_right_it_stands_aside(
    set_up: Any, groups: list[KVGroup], load_async: bool, said: str
) -> None:
    with pytest.raises(CannotCacheError, match=said):
        refuse_states(set_up, groups, load_async=load_async)
    refuse_states(set_up, [FULL], load_async=load_async)
    refuse_states(config(), [FULL, STATE], load_async=True)


def test_a_vllm_that_reads_states_which_are_not_there_is_refused() -> None:
    hybrid = SimpleNamespace(has_mamba_layers=True, kv_cache_groups=[1, 2])
    with pytest.raises(NotSupportedError, match="--no-enable-prefix-caching is wanted"):
        refuse_unreconciled_hits(config(), hybrid, reconciles=False)
    refuse_unreconciled_hits(config(), hybrid, reconciles=True)
    refuse_unreconciled_hits(config(enable_prefix_caching=False), hybrid, reconciles=False)
    for other in ({"has_mamba_layers": False}, {"kv_cache_groups": [1]}):
        refuse_unreconciled_hits(config(), SimpleNamespace(**{**vars(hybrid), **other}), reconciles=False)
