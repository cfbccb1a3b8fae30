"""What SGLang does not say to a linker, read where SGLang's own hooks (sglang.srt.plugins) let it be read.

The parent of a node: a linker is offered the pages of a node of SGLang's tree, and not the page before them, without
which a server does not know which chunks a chunk needs. A hook around the wrapper's offer reads it from the tree. Where
that fails, the parent is unknown, which the protocol allows: chunks are found all the same, and only which of them goes
first is known less well.

Weights that change while the engine runs: a hook before each of SGLang's ways to change them tells the linkers, whose
keys differ from then on.

Requests that wait: holding.py.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kvdock.connectors.sglang.holding import Holding, admit, next_batch
from kvdock.connectors.sglang.lookups import START, UNKNOWN

log = logging.getLogger("kvdock.sglang")

WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper._offload_node"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)
ADMITS = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
PLANS = "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw"


class Told(Protocol):
    """A linker."""

    holding: Holding
    parent: str | None
    """The hash of the page before the node that is offered next, as Chains.named has it."""

    def weights_change(self) -> None: ...


_linkers: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


def tell(linker: Told) -> None:
    """Installs the hooks in this process, once, and tells `linker` from now on."""
    global _installed
    _linkers.add(linker)
    if _installed:
        return
    _installed = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, around in ((WRAPPER, _offload_node), (ADMITS, _admit), (PLANS, _plan)):
        HookRegistry.register(target, around, HookType.AROUND)
    for update in UPDATES:
        HookRegistry.register(f"{UPDATER}.{update}", _weights_change, HookType.BEFORE)
    HookRegistry.apply_hooks()
    if missing := {ADMITS, PLANS} - getattr(HookRegistry, "_patched", {ADMITS, PLANS}):
        log.warning("requests do not wait for hashes and lower tiers: SGLang has no %s", " and no ".join(missing))


def _offload_node(original: Callable[..., None], wrapper: Any, node_id: Any, transfers: Any) -> None:
    linker = wrapper.cache_linker
    if linker in _linkers:
        linker.parent = _parent_of(wrapper.cache, node_id)
    try:
        original(wrapper, node_id, transfers)
    finally:
        if linker in _linkers:
            linker.parent = UNKNOWN


def _linker_of(cache: Any) -> Any:
    """The one that was told, of a scheduler's cache; None: it is another one's."""
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if linker in _linkers else None


def _admit(original: Callable[..., Any], adder: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(adder.tree_cache)
    return original(adder, *more, **how) if linker is None else admit(linker.holding, original, adder, *more, **how)


def _plan(original: Callable[..., Any], scheduler: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, *more, **how)
    return next_batch(linker.holding, original, scheduler, *more, **how)


def _parent_of(cache: Any, node_id: Any) -> str | None:
    try:
        above = cache.get_prefix_hash_values(node_id)
    except Exception as error:  # whatever a tree of another version raises, the parent is unknown
        log.debug("the parent of a node is unknown: %s", error)
        return UNKNOWN
    return str(above[-1]) if above else START


def _weights_change(*arguments: Any, **named: Any) -> None:
    for linker in list(_linkers):
        linker.weights_change()
