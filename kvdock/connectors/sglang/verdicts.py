"""When SGLang asks whether loads are complete: where it processes the result of their batch.

SGLang 0.5.23 asks at the end of run_batch. With its overlapped schedule, the next step would then be launched only once
the loads have ended. kvdock's hooks (hooks.py) defer the question:

    run_batch(1) ──► result 0 ──► run_batch(2) ──► verdict on the loads of batch 1 ──► result 1
                     └──────── the copies run ────────┘

A bad verdict marks the requests as SGLang's own question does: the output of their batch is not read, none of their
pages comes into the tree, and they end. A request that SGLang has retracted meanwhile has no output, so it is computed
from its start instead.

Invariants: before a verdict, no page of the load is freed or comes into the tree, and the next chunk of the request's
prompt is not computed. So the verdict is asked for before SGLang releases a request, frees a request's pages, inserts
them, or goes on with a chunked prompt. (SGLang may free pages that a sliding window has left behind sooner. Its forward
pass has waited for their copies on the GPU by then, and what uses the pages next runs after this forward pass.) All
ranks ask in the same order, because it follows from SGLang's calls alone.

If a hook is not in force, SGLang asks where it does by itself. Threads: SGLang's scheduler thread calls everything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.sglang.updates import is_heard

log = logging.getLogger("kvdock.sglang")

RESULTS, CHUNKS = "process_batch_result", "process_pending_chunked_abort"
"""Methods of SGLang's Scheduler. The latter comes before each step is planned, and ends a chunked request that failed.
"""
ASKS, RELEASES, FREES, INSERTS = "finish_external_linker_loads", "claim_kv_row", "free_kv_row", "checkpoint_into_tree"
"""Methods of SGLang's tree: the question; the release of a request; the other two are about its pages."""


@dataclass(frozen=True)
class _Launched:
    """A batch whose loads have no verdict yet. `reqs`: the requests that load, with their values of
    skip_radix_cache_insert; `rids` and `index`: what SGLang has noted for its question; `ask`: SGLang's question."""

    ask: Callable[[Any, Sequence[Any]], list[Any]]
    cache: Any
    reqs: Sequence[tuple[Any, bool]]
    rids: list[str]
    index: int

    def loads_into(self, req: Any = None, kv: Any = None) -> bool:
        return any(one is req or (kv is not None and one.kv is kv) for one, _ in self.reqs)


class Verdicts:
    """The verdicts that are still to be asked for. `ranks`: they agree on whether verdicts are deferred."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._scheduler: Any = None
        self._proven: list[tuple[type, str, Any]] = []
        self._launched: list[_Launched] = []
        self._failed: list[tuple[Any, bool]] = []
        """The requests with a bad verdict whose batch's result was not processed yet, as in _Launched."""

    def meet(self, scheduler: Any, may_share: bool = True) -> None:
        """The engine's scheduler plans a batch. Proves that the hooks are in force when it plans its first one.
        `may_share`: whether this rank may load at all. The stages of a pipeline load only with deferred verdicts: the
        first stage would otherwise wait for a load that a later one has not begun."""
        if self._scheduler is scheduler:
            return
        self._scheduler, self._proven = scheduler, []
        methods = [(scheduler, name) for name in (RESULTS, CHUNKS)]
        methods += [(scheduler.tree_cache, name) for name in (ASKS, RELEASES, FREES, INSERTS)]
        missing = [f"{type(of).__name__}.{name}" for of, name in methods if not _is_hooked(of, name)]
        if self._ranks.all_agree_at_start(not missing and (may_share or self._ranks.stages == 1)):
            self._proven = [(type(of), name, getattr(type(of), name)) for of, name in methods]
        else:
            _warn(", ".join(missing) or "a method on another rank")

    def launched(self, ask: Callable[[Any, Sequence[Any]], list[Any]], cache: Any, reqs: Sequence[Any]) -> list[Any]:
        """SGLang has launched a batch of `reqs`, and asks by `ask(cache, reqs)` which of them have failed. Returns
        those that have failed as far as is known: none if the verdict is deferred."""
        wrapper = cache.linker
        loading = [(req, req.skip_radix_cache_insert) for req in reqs if req.rid in wrapper.inflight_load_rids]
        if not loading or not self.are_in_force():
            return ask(cache, reqs)
        self._launched.append(
            _Launched(ask, cache, loading, wrapper.inflight_load_rids, wrapper.inflight_load_index)
        )
        wrapper.inflight_load_rids, wrapper.inflight_load_index = [], -1
        return []

    def before_result(self, reqs: Sequence[Any]) -> None:
        """SGLang is about to process the result of a batch of `reqs`."""
        self._judge([one for one in self._launched if any(one.loads_into(req) for req in reqs)])
        of_batch = {id(req) for req in reqs}
        for req, skipped in self._failed:
            if id(req) in of_batch and req.is_retracted:
                req.discard_output_reason, req.skip_radix_cache_insert = None, skipped
        self._failed = [(req, skipped) for req, skipped in self._failed if id(req) not in of_batch]

    def before_use(self, req: Any = None, kv: Any = None) -> None:
        """SGLang is about to free, insert or go on with what `req` has, or the request whose record of KV is `kv`."""
        if self._launched:
            self._judge([one for one in self._launched if one.loads_into(req, kv)])

    def forget(self) -> None:
        """SGLang has dropped all its requests."""
        self._launched.clear()
        self._failed.clear()

    def _judge(self, batches: Collection[_Launched]) -> None:
        for one in batches:
            self._launched.remove(one)
            wrapper = one.cache.linker
            later = wrapper.inflight_load_rids, wrapper.inflight_load_index
            wrapper.inflight_load_rids, wrapper.inflight_load_index = one.rids, one.index
            try:
                failed = one.ask(one.cache, [req for req, _ in one.reqs])
            finally:
                wrapper.inflight_load_rids, wrapper.inflight_load_index = later
            self._failed += [(req, skipped) for req, skipped in one.reqs if any(req is other for other in failed)]
            if any(req is self._scheduler.chunked_req for req in failed):
                self._scheduler._pending_chunked_abort_req = self._scheduler.chunked_req  # as run_batch does

    def are_in_force(self) -> bool:
        """Whether the hooks are in force still. Ranks run the same code, so they find the same."""
        replaced = [name for owner, name, method in self._proven if getattr(owner, name, None) is not method]
        if replaced:
            self._proven = []
            _warn(", ".join(replaced))
        return bool(self._proven)


def _is_hooked(of: Any, name: str) -> bool:
    return name not in getattr(of, "__dict__", ()) and is_heard(getattr(type(of), name, None))


def _warn(missing: str) -> None:
    log.warning("loads delay the launch of the step that follows them: kvdock's hooks do not reach %s", missing)
