"""What SGLang does not say to a linker, read where SGLang's own hooks (sglang.srt.plugins) let it be read.

The parent of a node: a linker is offered the pages of a node of SGLang's tree, and not the page before them, without
which a server does not know which chunks a chunk needs. A hook around the wrapper's offer reads it from the tree. Where
that fails, the parent is unknown, which the protocol allows: chunks are found all the same, and only which of them goes
first is known less well.

Weights that change while the engine runs: a hook before each of SGLang's ways to change them tells the linkers, whose
keys differ from then on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("kvdock.sglang")

WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper._offload_node"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)
START, UNKNOWN = "", None


class Told(Protocol):
    """A linker."""

    parent: str | None
    """The hash of the page before the node that is offered next; START: the node begins its sequence."""

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

    HookRegistry.register(WRAPPER, _offload_node, HookType.AROUND)
    for update in UPDATES:
        HookRegistry.register(f"{UPDATER}.{update}", _weights_change, HookType.BEFORE)
    HookRegistry.apply_hooks()


def _offload_node(original: Callable[..., None], wrapper: Any, node_id: Any, transfers: Any) -> None:
    linker = wrapper.cache_linker
    if linker in _linkers:
        linker.parent = _parent_of(wrapper.cache, node_id)
    try:
        original(wrapper, node_id, transfers)
    finally:
        if linker in _linkers:
            linker.parent = UNKNOWN


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
