"""What SGLang's own linkers promise (MooncakeDirectLinker, UMBPDirectLinker of 0.5.23), as checks of ours.

Its wheel brings no tests, so these are read from the two linkers and from what the wrapper around them relies on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

PAGE = 64


def scheduler() -> Any:
    """One of SGLang's that runs nothing: a linker proves at its methods, and at those of what it has, that hooks are in
    force."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.utils import TypeBasedDispatcher

    made: Any = object.__new__(Scheduler)
    made.weight_updater, made.tp_worker = object.__new__(SchedulerWeightUpdaterManager), object.__new__(TpModelWorker)
    made.tp_worker._model_runner = object.__new__(ModelRunner)
    made.tp_worker.model_runner.weight_updater = object.__new__(WeightUpdater)
    made._request_dispatcher = TypeBasedDispatcher(
        [(BeginWeightUpdateReqInput, made.weight_updater.begin_weight_update)]
    )
    return made


def transfer(keys: list[str], pages: list[int] | None = None, device: str = "cpu") -> PoolTransfer:
    indices = None
    if pages is not None:
        indices = torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)], device=device)
    return PoolTransfer(name=PoolName.KV, keys=keys, device_indices=indices)


def ended(linker: Any, count: int) -> list[bool]:
    end_s = time.monotonic() + 10
    while linker.num_completed_offloads() < count:
        assert time.monotonic() < end_s, "offers ended late"
        time.sleep(0.001)
    return [linker.pop_completed_offload() for _ in range(count)]


def found(linker: Any, rid: str, *transfers: PoolTransfer) -> list[int]:
    """What is promised, asked again while the request would be held back."""
    promised: list[int] = linker.lookup(rid, list(transfers))
    while linker.holding.starts(rid):
        linker.num_completed_offloads()
        time.sleep(0.001)  # as SGLang's loop turns
        promised = linker.lookup(rid, list(transfers))
    return promised


def keys_of(name: str, count: int) -> list[str]:
    return [f"{hash((name, at)) & (1 << 64) - 1:064x}" for at in range(count)]


def no_keys_are_no_prefix_and_no_offer(linker: Any) -> None:
    assert found(linker, "none", transfer([])) == []
    assert linker.offload([transfer([], [])]) is False
    assert linker.num_completed_offloads() == 0


def nothing_queued_is_no_batch(linker: Any) -> None:
    assert linker.start_layer_wise_loading() == -1
    assert linker.finish_layer_wise_loading(-1) is True
    linker.layer_done_counter.set_consumer(-1)
    linker.layer_done_counter.wait_until(0)
    assert linker.cancel_queued_load("nobody") is False


def offers_end_in_their_order_and_what_was_offered_is_found(linker: Any) -> None:
    names = [keys_of(f"order {at}", 2) for at in range(3)]
    for at, keys in enumerate(names):
        assert linker.offload([transfer(keys, [2 * at, 2 * at + 1])], session_id="a session") is True
    assert ended(linker, 3) == [True] * 3
    for at, keys in enumerate(names):
        assert found(linker, f"order {at}", transfer(keys))[-1] == 2
        assert found(linker, f"part {at}", transfer([keys[0], *keys_of("other", 1)]))[-1] == 1


def a_load_that_was_not_started_is_cancelled_once(linker: Any) -> None:
    keys = keys_of("cancelled", 2)
    assert linker.offload([transfer(keys, [0, 1])])
    assert ended(linker, 1) == [True]
    assert found(linker, "cancelled", transfer(keys)) == [2]
    assert linker.load("cancelled", [transfer(keys, [4, 5])]) is True
    assert linker.cancel_queued_load("cancelled") is True
    assert linker.cancel_queued_load("cancelled") is False
    assert linker.start_layer_wise_loading() == -1


def a_load_without_its_lookup_is_refused(linker: Any) -> None:
    """SGLang computes then."""
    keys = keys_of("order 0", 2)
    assert linker.load("unasked", [transfer(keys, [4, 5])]) is False


def requests_of_one_batch_land_together(linker: Any) -> None:
    counter = linker.layer_done_counter
    rids = ["order 0", "order 1"]
    for at, rid in enumerate(rids):
        assert found(linker, rid, transfer(keys_of(rid, 2))) == [2]
        assert linker.load(rid, [transfer(keys_of(rid, 2), [10 + 2 * at, 11 + 2 * at])])
    index = linker.start_layer_wise_loading()
    assert index >= 0
    counter.set_consumer(index)
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
    assert linker.finish_layer_wise_loading(index) is True
    assert linker.finish_layer_wise_loading(index) is True, "once more is nothing"


def a_reset_leaves_nothing_under_way(linker: Any) -> None:
    keys = keys_of("reset", 2)
    assert linker.offload([transfer(keys, [6, 7])])
    assert found(linker, "order 2", transfer(keys_of("order 2", 2))) == [2]
    assert linker.load("order 2", [transfer(keys_of("order 2", 2), [12, 13])])
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1
    assert found(linker, "after", transfer(keys)) == [2], "what was being stored is stored"


LINKER_CHECKS: tuple[Callable[[Any], None], ...] = (
    no_keys_are_no_prefix_and_no_offer,
    nothing_queued_is_no_batch,
    offers_end_in_their_order_and_what_was_offered_is_found,
    a_load_that_was_not_started_is_cancelled_once,
    a_load_without_its_lookup_is_refused,
    requests_of_one_batch_land_together,
    a_reset_leaves_nothing_under_way,
)
"""In this order, on one linker."""
