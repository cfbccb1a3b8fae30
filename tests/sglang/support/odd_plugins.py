"""What other plugins may do to SGLang before it loads its plugins: to its ways to change weights, most of all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvdock.connectors.sglang.updates import MODEL_UPDATER, SCHEDULER, UPDATER

UPDATE = f"{UPDATER}.update_weights_from_disk"


def take_a_methods_place() -> None:
    """Its hooks are applied, so SGLang applies no other one to the same method."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(UPDATE, lambda updater, request: None, HookType.REPLACE)
    HookRegistry.apply_hooks()


def hook_the_same_method() -> None:
    """As SGLang wants it: all hooks are in force."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Any, updater: Any, request: Any) -> Any:
        return original(updater, request)

    HookRegistry.register(UPDATE, around, HookType.AROUND)


def rename_a_method() -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater.load_named_tensors = WeightUpdater.load_weights_from_distributed
    del WeightUpdater.load_weights_from_distributed
    assert MODEL_UPDATER.endswith(WeightUpdater.__name__)


def answer_without_the_method() -> None:
    """SGLang's dispatcher calls something else than the method."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.managers.scheduler import Scheduler

    before = Scheduler.init_request_dispatcher

    def init_request_dispatcher(scheduler: Any) -> None:
        before(scheduler)
        scheduler._request_dispatcher._mapping[UpdateWeightFromDiskReqInput] = lambda request: None

    Scheduler.init_request_dispatcher = init_request_dispatcher


def bring_what_no_hook_goes_around() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    async def reload_weights(self: Any, folder: str) -> None:
        """Runs when somebody awaits it."""

    SchedulerWeightUpdaterManager.reload_weights = reload_weights


def process_results_without_kvdock() -> None:
    """The hook of another plugin is applied, so SGLang applies no other one to the same method."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Any, *arguments: Any) -> Any:
        return original(*arguments)

    HookRegistry.register(f"{SCHEDULER}.process_batch_result", around, HookType.AROUND)
    HookRegistry.apply_hooks()


def retract_now_and_then(steps: int = 9) -> None:
    """SGLang's own way to test it, whose variable is read when its scheduler is imported."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, steps


def retract_in_each_step() -> None:
    """All requests but one, in each step that computes no prompt."""
    retract_now_and_then(1)


def tell_what_is_sent() -> None:
    """Each call that sends KV to an engine that decodes is written down: the request's room, and how many pages."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    send = MooncakeKVSender.send

    def telling(sender: Any, kv_indices: Any, *more: Any, **how: Any) -> None:
        with (Path(os.environ["KVDOCK_ODD"]) / "sent").open("a") as file:
            file.write(json.dumps([sender.bootstrap_room, len(kv_indices)]) + "\n")
        send(sender, kv_indices, *more, **how)

    MooncakeKVSender.send = telling
