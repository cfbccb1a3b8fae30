"""What vLLM's configuration declares unfit for the reuse of prefixes; tests/vllm/test_unfit.py runs it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.errors import CannotCacheError
from kvdock.connectors.session import ServerEpoch
from kvdock.connectors.vllm.setup import FIRST_STEPS, Attached
from kvdock.connectors.vllm.steps import NOWHERE
from kvdock.connectors.vllm.unfit import refuse_what_is_no_prefix, why_unfit


def engine(*, caching: bool = True, device: str = "cuda", aux: bool = False, **model: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"architecture": "M", "is_prefix_caching_supported": True, **model}),
        cache_config=SimpleNamespace(enable_prefix_caching=caching), aux_output_config=SimpleNamespace(enabled=aux),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(("made", "order", "environ", "why"), [
    (engine(aux=True), "", {}, "only the engine that computed a block has that"),
    (engine(enable_return_routed_experts=True), "", {}, "only the engine that computed a block has that"),
    (engine(is_prefix_caching_supported=False), "", {}, "does not support prefix caching (no pooling model)"),
    (engine(), "vllm 0.33 FLASHINFER x", {"VLLM_BATCH_INVARIANT": "1"}, "no prefix cache with VLLM_BATCH_INVARIANT"),
    (engine(), "vllm 0.33 FLASH_ATTN x", {"VLLM_BATCH_INVARIANT": "1"}, ""),
    (engine(), "vllm 0.33 FLASHINFER x", {"VLLM_BATCH_INVARIANT": "0"}, ""),
    (engine(caching=False, device="cpu", use_mla=True), "", {}, "for latent attention (MLA) on this CPU"),
    (engine(device="cpu", use_mla=True), "", {}, ""),
    (engine(), "", {}, ""),
])
def test_why_nothing_is_loaded(made: Any, order: str, environ: dict[str, str], why: str) -> None:
    found = why_unfit(made, order, environ)
    assert why in found and bool(found) == bool(why)
    assert found.count(". ") == 0, "it is one sentence"


def groups(*specs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{number}"]) for number, spec in enumerate(specs)
    ])


def test_kv_that_depends_on_later_tokens_is_not_cached_at_all() -> None:
    causal, other = SimpleNamespace(), SimpleNamespace(non_causal=True)
    refuse_what_is_no_prefix(engine(), groups(causal, SimpleNamespace(non_causal=False)))
    for cache in (groups(causal, other), groups(SimpleNamespace(kv_cache_specs={"a": causal, "b": other}))):
        with pytest.raises(CannotCacheError, match="attention that is not causal, where tokens see those behind them"):
            refuse_what_is_no_prefix(engine(), cache)
    with pytest.raises(CannotCacheError, match="vLLM says that this model is 'encoder_decoder'"):
        refuse_what_is_no_prefix(
            engine(attn_type="encoder_decoder", is_prefix_caching_supported=False), groups(causal)
        )
    refuse_what_is_no_prefix(engine(attn_type="decoder", is_prefix_caching_supported=False), groups(causal))


HERE, THERE, NEXT = ServerEpoch("here", "1"), ServerEpoch("there", "2"), ServerEpoch("next", "3")


def at(epoch: ServerEpoch) -> Any:
    return SimpleNamespace(epoch=epoch)


def test_all_workers_are_where_the_scheduler_is_before_a_load_is_promised(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvdock.vllm")
    attached = Attached(2)
    assert not attached.everywhere(at(HERE)), "nobody has said where it is"
    attached.reported({0: HERE})
    assert not attached.everywhere(at(HERE))
    attached.reported({1: NOWHERE})
    assert not attached.everywhere(at(HERE)) and not attached.everywhere(None)
    attached.reported({1: HERE})
    assert attached.everywhere(at(HERE))
    assert not attached.everywhere(at(NEXT)), "the server was replaced, and the workers have not heard yet"
    assert not caplog.records, "that is no other server"
    attached.reported({0: NEXT, 1: NEXT})
    assert attached.everywhere(at(NEXT)) and not caplog.records


def test_a_first_request_after_an_outage_waits_for_the_workers_to_tell_of_the_next_server() -> None:
    attached = Attached(1, steps_ahead=1)
    attached.reported({0: HERE})
    assert attached.everywhere(at(HERE))
    for _ in range(20):
        attached.planned()

    def is_early() -> bool:
        return attached.is_early

    assert not is_early()
    for epoch in (NEXT, ServerEpoch("next", "4")):
        assert not attached.everywhere(at(epoch))
        for _ in range(FIRST_STEPS + 2):
            assert is_early(), "a worker tells in the step after the next one"
            attached.planned()
            assert not attached.everywhere(at(epoch))
        assert not is_early(), "a worker that never comes holds nobody up"


def test_workers_at_another_server_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvdock.vllm")
    attached = Attached(3)
    attached.reported({0: HERE, 1: THERE, 2: THERE})
    assert [attached.everywhere(at(HERE)) for _ in range(3)] == [False] * 3
    (said,) = caplog.messages
    assert "the workers of ranks 1, 2 are attached to another kvdock server than the scheduler" in said
