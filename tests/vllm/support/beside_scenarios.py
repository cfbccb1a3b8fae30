"""Under vLLM's MultiConnector, beside connectors of siblings.py."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sched_engine import SchedEngine
from sched_scenarios import figures, prompt
from undone_scenarios import asked_again
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from warnings_heard import warnings_heard

from kvdock.connectors.vllm.plugin import register


def child(sibling: str, **settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": sibling, "kv_connector_module_path": "siblings", "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


class BesideEngine(SchedEngine):
    """`siblings`: come before kvdock's connector; `after`: behind it. `policy`: vLLM's when a load fails. `is_alone`:
    without MultiConnector after all. `is_named`: without the path of kvdock's module."""

    def __init__(
        self, address: str, *, siblings: Sequence[dict[str, Any]] = (), after: Sequence[dict[str, Any]] = (),
        policy: str = "recompute", is_alone: bool = False, is_named: bool = False,
        **how: Any,
    ) -> None:
        self._is_named = is_named
        self._before, self._after, self._policy, self._is_alone = siblings, after, policy, is_alone
        super().__init__(address, **how)

    def transfer(self, settings: dict[str, Any]) -> dict[str, Any]:
        if self._is_alone:
            return {**super().transfer(settings), "kv_load_failure_policy": self._policy}
        ours = {**super().transfer(settings), "kv_load_failure_policy": "fail"}  # of no effect: it is a child's
        if self._is_named:
            del ours["kv_connector_module_path"]
        return {
            "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": {"connectors": [*self._before, ours, *self._after]},
        }

    def orders(self, out: Any) -> Any:
        if self._is_alone:
            return super().orders(out)
        return out.kv_connector_metadata.metadata[len(self._before)].orders

    @property
    def half(self) -> Any:
        if self._is_alone:
            return super().half
        return self.scheduler.connector._connectors[len(self._before)]._scheduler


class SlowStores(BesideEngine):
    """A worker begins each store late, unless the step waits for it."""

    def connect(self, kv_config: Any) -> None:
        super().connect(kv_config)
        worker = self.worker._connectors[len(self._before)]._worker
        submit = worker._stores._submit

        def late(*arguments: Any) -> None:
            time.sleep(0.02)  # longer than a step
            submit(*arguments)

        worker._stores._submit = late


def sibling_fails(address: str, policy: str, load_async: bool, overlap: bool, runner: int) -> dict[str, Any]:
    """A sibling's load fails. Another engine, which has kvdock alone, asks for the same prompts then."""
    shared = {"weights_digest": os.urandom(8).hex(), "budget": 500}
    engine = BesideEngine(
        address, after=[child("FailingLoads", load_async=load_async)], policy=policy, overlap=overlap, runner=runner,
        **shared,
    )
    request = engine.add("fails", prompt(1, 150), 8)
    other = engine.complete("other", prompt(2, 150), 8)
    states = Counter(one.status.name for one in (request, other))
    engine.close()
    alone = SchedEngine(address, **shared)
    for seed in (1, 2):
        alone.add(f"again {seed}", prompt(seed, 150), 4)
    alone.run()
    alone.close()
    return {
        "ended": dict(states), "loaded": alone.loaded_tokens,
        "wrong": len(alone.bad_reads) + alone.wrong_tokens, "held": engine.held_blocks,
    }


def handshakes(address: str, comes_first: bool, overlap: bool, runner: int) -> dict[str, Any]:
    """Beside a connector with a handshake of its own: cold, then loaded when vLLM's own prefix cache was dropped."""
    beside = {"siblings" if comes_first else "after": [child("Handshakes")]}
    engine = BesideEngine(address, overlap=overlap, runner=runner, weights_digest=os.urandom(8).hex(), **beside)
    engine.complete("cold", prompt(1, 150))
    engine.forget_prefixes()
    engine.complete("warm", prompt(1, 150))
    engine.close()
    sibling = engine.scheduler.connector._connectors[0 if comes_first else 1]
    return figures(engine, introduced=sibling.is_introduced)


def policies(address: str, beside: bool, policy: str, **settings: Any) -> dict[str, Any]:
    """Whether vLLM computes what could not be loaded, and what the connector warns of. `policy`: the user's."""
    with warnings_heard() as lines:
        engine = BesideEngine(
            address, siblings=[child("Idle")] if beside else [], policy=policy, is_alone=not beside, **settings
        )
        engine.complete("r", prompt(1, 40))
        engine.close()
    warned = [line for line in lines if "kv_load_failure_policy" in line]
    return {"recomputes": engine.scheduler.recompute_kv_load_failures, "warned": warned}


def by_name(address: str) -> dict[str, Any]:
    """Without its module's path, as its entry point has registered it and, again, its import. What MultiConnector reads
    of its statistics in another process, where they come as plain data."""
    register()
    register()
    engine = BesideEngine(address, siblings=[child("Idle")], is_named=True, weights_digest=os.urandom(8).hex())
    engine.complete("r", prompt(1, 150))
    engine.close()
    told = {"store_tokens": 128}  # 0.24 sends it as it stands in the object
    read = MultiConnector.build_kv_connector_stats(
        {"KvdockConnector": told if "to_dict" in vars(MultiKVConnectorStats) else {"data": told}}
    )
    return {"read": sorted(read.data), "kinds": [type(one).__name__ for one in read.data.values()]}


def blocks_go_at_once(address: str) -> dict[str, int]:
    """What a request stores is in blocks that the step which stores it gives to another one. Beside a connector that
    does nothing."""
    engine = SlowStores(
        address, siblings=[child("Idle")], blocks=15, budget=256, weights_digest=os.urandom(8).hex()
    )
    engine.add("r", prompt(2, 193), 1)
    engine.add("next", prompt(3, 220), 2)  # waits for the blocks
    while not engine.requests["r"].is_finished():
        engine.step()
    time.sleep(0.1)  # the background reserves
    return asked_again(engine, prompt(2, 193))
