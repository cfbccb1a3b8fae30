"""Hooks around SGLang's methods (sglang.srt.plugins), for the facts that SGLang does not report to a linker.

- The parent of a node. SGLang offers a linker the pages of a node of its tree, but not the page before them, which the
  server needs to know the order of chunks. A hook around the offer reads that page's hash from the tree. If it cannot,
  the parent is unknown, which the protocol allows: chunks are found all the same, and are evicted in a worse order.
- The admission of a request, and its end (outcomes.py).
- The requests that arrive, that for which SGLang looks up or inserts pages (texts.py), and the tokens of these pages
  (page_names.py).
- What all ranks can load. SGLang finds it with tensors, also for a rank that is alone: .1 ms a lookup, and each call of
  PyTorch passes the interpreter lock to other threads.
- The KV cache events that SGLang is about to publish (page_names.py).
- Changes of weights, and the requests and pages of the tree that these concern (updates.py).
- The results of batches that load, and what becomes of their pages before that (verdicts.py), also of KV that another
  engine waits for (apart.py).
- Requests that arrive, and requests that wait (holding.py).

SGLang expects hooks to be registered while it loads its plugins, before other modules import the methods: plugin.py
then calls install(). If SGLANG_PLUGINS leaves kvdock's plug-in out, the linker calls install(). updates.py proves that
the hooks for changes of weights are in force.
"""

from __future__ import annotations

import logging
import pkgutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvdock.connectors.sglang.apart import tell_of_failed_loads
from kvdock.connectors.sglang.branches import offer_state
from kvdock.connectors.sglang.updates import (
    BEGINS,
    CHANGES,
    CHECKS,
    ENDS,
    NAMES_VERSION,
    RELEASES,
    RESUMES,
    SCHEDULER,
    WORKER,
    Changes,
    Fresh,
    Guard,
    Probe,
    changes_of,
    is_of_weights,
    only_reads,
)
from kvdock.connectors.sglang.verdicts import (
    ASKS,
    CHUNKS,
    FREES,
    INSERTS,
    RELEASES as RELEASES_REQUEST,
    RESULTS,
    Verdicts,
)

if TYPE_CHECKING:  # this module is loaded in processes that have no linker
    from kvdock.connectors.sglang.afterwards import Afterwards
    from kvdock.connectors.sglang.holding import Holding
    from kvdock.connectors.sglang.page_names import Naming
    from kvdock.connectors.sglang.texts import Texts

log = logging.getLogger("kvdock.sglang")

WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
ADMITS = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
PLANS = "_get_new_batch_prefill_raw"
QUEUES = "_add_request_to_queue"
SHARED = "_sync_restorable_prefix"


class Hooked(Protocol):
    """The attributes of a linker that the hooks use."""

    holding: Holding
    fresh: Fresh
    texts: Texts
    changes: Changes
    guard: Guard
    naming: Naming
    verdicts: Verdicts
    afterwards: Afterwards

    def why_not(self, req: Any) -> str:
        """Why `req` is not looked up, as in Outcome; empty: it is."""

    def planned(self) -> None:
        """A forward pass that computes a prompt is planned."""

    def admitted(self, req: Any, device_tokens: int) -> None:
        """SGLang has admitted `req`, of which the device had `device_tokens` before."""

    def released(self, req: Any) -> None:
        """SGLang gives back the KV of `req`."""

    def aborted(self, rid: str) -> None:
        """A request has ended before its first token, or in the queue."""

    def published(self, events: Sequence[Any]) -> Sequence[Any]:
        """SGLang publishes `events`. Returns those to publish in their place."""


_linkers: weakref.WeakSet[Any] = weakref.WeakSet()
_hooked: set[str] = set()


def install() -> None:
    """Registers the hooks in this process, once. They do nothing where there is no linker of kvdock's."""
    if _hooked:
        return
    for target, around in (
        (f"{WRAPPER}._offload_node", _offload_node), (f"{WRAPPER}.match", _match), (f"{WRAPPER}.{SHARED}", _shared),
        (f"{SCHEDULER}.{QUEUES}", _queue), (ADMITS, _admit), (f"{SCHEDULER}.{PLANS}", _plan),
        (f"{TREE}.{INSERTS}", _checkpoint), (f"{TREE}.insert", _insert), (NAMES_VERSION, _named),
        (f"{TREE}.on_release", _release_kv), (f"{TREE}.release_aborted_request", _abort),
        (f"{TREE}.take_events", _take_events),
        (f"{TREE}.{ASKS}", _ask), (f"{TREE}.{RELEASES_REQUEST}", _claim), (f"{TREE}.{FREES}", _free),
        (f"{SCHEDULER}.{RESULTS}", _result), (f"{SCHEDULER}.{CHUNKS}", _next_chunk),
    ):
        _register(target, around)
    for path, names in CHANGES.items():
        for name in names:
            _register(f"{path}.{name}", _HEARS.get(name, _change))


def register(linker: Hooked) -> None:
    """From now on the hooks call `linker`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _linkers.add(linker)
    install()
    for path in (*CHANGES, SCHEDULER, WORKER):
        try:
            owner = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:  # linker.guard decides whether that matters
            log.debug("SGLang has no %s: %s", path, error)
            continue
        for name in changes_of(owner):
            _register(f"{path}.{name}", _change)
    HookRegistry.apply_hooks()


def hook_change(path: str, name: str) -> None:
    """Puts a hook around a method that changes weights. `path`: of its class; see Guard."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register(f"{path}.{name}", _HEARS.get(name, _change))
    HookRegistry.apply_hooks()


def _register(target: str, around: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in _hooked:
        return
    _hooked.add(target)

    def hook(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if arguments and isinstance(arguments[0], Probe):
            arguments[0].heard.add(target)
            return None
        return around(original, *arguments, **named)

    HookRegistry.register(target, hook, HookType.AROUND)


# ---------------------------------------------------------------------- the tree


def _offload_node(original: Callable[..., None], wrapper: Any, node_id: Any, transfers: Any) -> None:
    linker = wrapper.cache_linker
    if linker not in _linkers:
        original(wrapper, node_id, transfers)
        return
    with linker.naming.offering(_above(wrapper.cache, node_id)):
        original(wrapper, node_id, transfers)


def _match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any, *more: Any, **how: Any) -> Any:
    linker = wrapper.cache_linker
    if linker not in _linkers:
        return original(wrapper, key, req, result, *more, **how)
    if linker.why_not(req):
        return result
    above = partial(wrapper.cache.get_last_hash_value, result.last_device_node)
    local, named = int(result.device_prefix_len), key if linker.texts.is_text(req) else None
    with linker.texts.matching(req, local // wrapper.cache.page_size), linker.naming.matching(named, local, above):
        return original(wrapper, key, req, result, *more, **how)


def _shared(original: Callable[..., int], wrapper: Any, loadable: Sequence[int], *more: Any, **how: Any) -> int:
    """The most pages that all ranks can load. `loadable`: the numbers of first pages that this rank can load."""
    if wrapper.cache_linker not in _linkers or wrapper.cache.tp_world_size > 1:
        return original(wrapper, loadable, *more, **how)
    return max(loadable, default=0)


def _checkpoint(original: Callable[..., Any], cache: Any, req: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is None:
        return original(cache, req, *more, **how)
    linker.verdicts.before_use(req)
    if req.skip_radix_cache_insert:
        return None  # by the verdict; SGLang has looked at this mark before
    with linker.fresh.inserting(req):
        return original(cache, req, *more, **how)


def _insert(original: Callable[..., Any], cache: Any, params: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is None:
        return original(cache, params, *more, **how)
    named = params.key if linker.texts.is_text(linker.fresh.inserts) else None
    with linker.fresh.adopting(params.value, params.prev_prefix_len), linker.naming.inserting(named):
        pending = len(cache.linker.pending_offloads)
        result = original(cache, params, *more, **how)
        offer_state(cache, params, result, pending, linker.naming.offering)
    return result


def _linker_of(cache: Any) -> Any:
    """The registered linker of a scheduler's cache; None: its linker is not kvdock's."""
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if linker in _linkers else None


def _queue(original: Callable[..., Any], scheduler: Any, req: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(scheduler.tree_cache)
    if linker is not None:
        linker.texts.meet(req)
    answer = original(scheduler, req, *more, **how)
    if linker is not None:
        from kvdock.connectors.sglang.holding import arrive

        arrive(linker.holding, scheduler, req)
    return answer


def _admit(original: Callable[..., Any], adder: Any, req: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(adder.tree_cache)
    if linker is None:
        return original(adder, req, *more, **how)
    from kvdock.connectors.sglang.holding import admit

    linker.fresh.admitted(req)
    device_tokens = int(req.prefix_len)
    answer = admit(linker.holding, original, adder, req, *more, **how)
    if any(one is req for one in adder.can_run_list[-1:]):
        linker.admitted(req, device_tokens)
    return answer


def _release_kv(original: Callable[..., Any], cache: Any, req: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is not None:
        linker.released(req)
    return original(cache, req, *more, **how)


def _abort(original: Callable[..., Any], cache: Any, request: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is not None:
        linker.aborted(request.rid)
    return original(cache, request, *more, **how)


def _plan(original: Callable[..., Any], scheduler: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, *more, **how)
    from kvdock.connectors.sglang.holding import next_batch

    linker.guard.meet(scheduler)
    linker.verdicts.meet(scheduler, linker.guard.in_force())
    batch, running = next_batch(linker.holding, original, scheduler, *more, **how)
    if batch is not None:
        linker.planned()
    return batch, running


def _take_events(original: Callable[..., Any], cache: Any, *more: Any, **how: Any) -> Any:
    events, linker = original(cache, *more, **how), _linker_of(cache)
    return events if linker is None else linker.published(events)


def _above(cache: Any, node_id: Any) -> Sequence[str] | None:
    """The hashes of all pages before a node; None: they are not known."""
    try:
        above: Sequence[str] = cache.get_prefix_hash_values(node_id)
    except Exception as error:  # whatever a tree of another version raises
        log.debug("the pages before a node are unknown: %s", error)
        return None
    return above


# ---------------------------------------------------------------------- verdicts


def _ask(original: Callable[..., list[Any]], cache: Any, reqs: Any, *more: Any, **how: Any) -> list[Any]:
    linker = _linker_of(cache)
    if linker is None:
        return original(cache, reqs, *more, **how)

    def ask(*which: Any) -> list[Any]:
        failed = original(*which)
        tell_of_failed_loads(failed)
        return failed

    failed: list[Any] = linker.verdicts.launched(ask, cache, reqs)
    return failed


def _result(original: Callable[..., Any], scheduler: Any, batch: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, batch, *more, **how)
    with linker.afterwards.held():
        linker.verdicts.before_result(batch.reqs)
        return original(scheduler, batch, *more, **how)


def _next_chunk(original: Callable[..., Any], scheduler: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(scheduler.tree_cache)
    if linker is not None and scheduler.chunked_req is not None:
        linker.verdicts.before_use(scheduler.chunked_req)
    return original(scheduler, *more, **how)


def _claim(original: Callable[..., Any], cache: Any, req: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is not None:
        linker.verdicts.before_use(req)
    return original(cache, req, *more, **how)


def _free(original: Callable[..., Any], cache: Any, kv: Any, *more: Any, **how: Any) -> Any:
    linker = _linker_of(cache)
    if linker is not None:
        linker.verdicts.before_use(kv=kv)
    return original(cache, kv, *more, **how)


# ---------------------------------------------------------------------- weights


def _all() -> list[Changes]:
    return [linker.changes for linker in list(_linkers)]


@contextmanager
def _call() -> Iterator[None]:
    with ExitStack() as ends:
        for changes in _all():
            ends.enter_context(changes.call())
        yield


def _change(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _call():
        return original(*arguments, **named)


def _begin(original: Callable[..., Any], updater: Any, *more: Any, **how: Any) -> Any:
    for changes in _all():
        changes.opens(f"{BEGINS} of {type(updater).__name__}")
    return original(updater, *more, **how)


def _end(original: Callable[..., Any], updater: Any, *more: Any, **how: Any) -> Any:
    try:
        return original(updater, *more, **how)
    finally:
        for changes in _all():
            changes.closes(f"{BEGINS} of {type(updater).__name__}")


def _release(original: Callable[..., Any], updater: Any, request: Any, *more: Any, **how: Any) -> Any:
    for changes in _all() if is_of_weights(request) else ():
        changes.opens(RELEASES)
    return original(updater, request, *more, **how)


def _resume(original: Callable[..., Any], updater: Any, request: Any, *more: Any, **how: Any) -> Any:
    try:
        return original(updater, request, *more, **how)
    finally:
        for changes in _all() if is_of_weights(request) else ():
            changes.closes(RELEASES)


def _check(original: Callable[..., Any], updater: Any, request: Any, *more: Any, **how: Any) -> Any:
    around = original if only_reads(request) else partial(_change, original)
    return around(updater, request, *more, **how)


def _named(original: Callable[..., Any], scheduler: Any, new_version: Any, *more: Any, **how: Any) -> Any:
    for changes in _all():
        changes.named(new_version)
    return original(scheduler, new_version, *more, **how)


_HEARS: dict[str, Callable[..., Any]] = {
    BEGINS: _begin, ENDS: _end, RELEASES: _release, RESUMES: _resume, CHECKS: _check,
}
"""By the name of the method, the hooks for methods of CHANGES that are not always a change of weights themselves."""
