"""Makes a reset of vLLM's prefix cache work while loads are in progress, if the reset preempts running requests.

vLLM preempts running requests, so that no request holds a block when it resets. A request that loads, or has loaded and
not run since, keeps its blocks, and the reset raises. The same happens when vLLM pauses to change weights, because then
it resets at once. So before such a reset kvdock waits for the loads, in steps that compute nothing. Then the requests
that were loading give up their blocks, as if their loads had failed, and are looked up again. Steps in progress end
first as well, because until then vLLM keeps back the blocks of the requests that it preempts.

vLLM does not call connectors at that point, so `end_loads_first` wraps EngineCore.reset_prefix_cache. If loads do not
end within MOST_S, vLLM's reset raises.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from kvdock.connectors.session import EngineSession
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.schemas import listed_id

log = logging.getLogger("kvdock.vllm")

CORE = "vllm.v1.engine.core"
MOST_S = 10.0
"""How long a reset waits for loads, and for steps in progress. A load of a long prompt takes a second."""
_is_wrapped = False

Step = Callable[[], bool]
"""Makes one step that computes nothing. Returns whether there is more to wait for."""


def end_loads_first() -> None:
    """Wraps the reset of all cores of this process. The wrapper acts only if the scheduler has a connector of
    kvdock."""
    global _is_wrapped
    core = getattr(sys.modules.get(CORE), "EngineCore", None)  # not loaded: this process has no core
    real = getattr(core, "reset_prefix_cache", None)
    if core is None or real is None or _is_wrapped:
        return

    @wraps(real)
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, *args: Any, **more: Any) -> Any:
        if reset_running_requests and _is_ours(getattr(self.scheduler, "connector", None)):
            try:
                end_loads(self.scheduler, lambda: _step(self))
            except Exception:  # vLLM resets all the same, and raises if it cannot
                log.exception("loads could not be ended before vLLM resets its prefix cache")
        return real(self, reset_running_requests, *args, **more)

    core.reset_prefix_cache = reset_prefix_cache
    _is_wrapped = True


def _is_ours(connector: Any) -> bool:
    return any(hasattr(one, "kvdock_received") for one in (connector, *getattr(connector, "_connectors", ())))


def end_loads(scheduler: Any, step: Step, clock: Callable[[], float] = time.monotonic) -> None:
    """Waits for the loads in progress and frees the blocks of the requests that were loading, so that only running
    requests hold blocks. `step`: makes a step of `scheduler` and its workers."""
    end_s = clock() + MOST_S
    with _paused(scheduler):
        while (step() or _loads_in_progress(scheduler)) and clock() < end_s:
            time.sleep(0.001)  # copies end in other threads
    for request in list(scheduler.requests.values()):
        if request.status.name in ("WAITING_FOR_REMOTE_KVS", "WAITING", "PREEMPTED"):
            _give_up_blocks(scheduler, request)


def _step(core: Any) -> bool:
    """One step of a core whose scheduler is paused: its oldest step in progress ends, or the workers report what has
    ended. The outputs go where the core's own loop puts them."""
    scheduler, has_queue = core.scheduler, hasattr(core, "output_queue")  # else it runs in its caller's process
    if getattr(core, "batch_queue", None) and has_queue:
        core._process_engine_step()
        return bool(core.batch_queue)
    planned = scheduler.schedule()
    outputs = scheduler.update_from_output(planned, core.model_executor.execute_model(planned))
    for output in outputs.items() if has_queue and outputs else ():
        core.output_queue.put_nowait(output)
    return False


@contextmanager
def _paused(scheduler: Any) -> Iterator[None]:
    """Keeps the scheduler from scheduling requests in the meantime."""
    before = scheduler._pause_state
    scheduler._pause_state = type(before).PAUSED_ALL  # not by its method, which logs
    try:
        yield
    finally:
        scheduler._pause_state = before


def _loads_in_progress(scheduler: Any) -> bool:
    ended = scheduler.finished_recving_kv_req_ids
    return any(
        (request.status.name == "WAITING_FOR_REMOTE_KVS" and request.request_id not in ended) or request.is_finished()
        for request in scheduler.requests.values()
    )


def _give_up_blocks(scheduler: Any, request: Any) -> None:
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        if request.request_id not in scheduler.finished_recving_kv_req_ids:
            return  # the load may still write to its blocks
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
        promote = getattr(scheduler, "_handle_blocked_waiting_request", None)
        (promote or scheduler._try_promote_blocked_waiting_request)(request)  # the older name: until 0.25
        request.num_computed_tokens = 0
    elif request.num_computed_tokens > 0:  # it had loaded, and was not scheduled since
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
    else:
        return
    getattr(scheduler, "_inflight_prefills", set()).discard(request)
    holding = getattr(scheduler, "kv_holding_waiting", None)  # newer versions
    if holding is not None and request in holding:
        holding.remove_request(request)
        scheduler.waiting.prepend_request(request)


# --------------------------------------------------------------------------------
# reset_cache: the server clears the namespace of this engine, so that no lookup finds its chunks any more.
#
# The server clears published chunks, in lower tiers too, and closes reservations: stores that workers have started
# publish nothing any more. If the server does not answer, nothing is looked up until it has cleared. The call is
# repeated after a pause that doubles each time; with a lost server, once the session is attached again.
#
# Threads: the scheduler's thread calls everything but again() and warn_of_others(); `_lock` guards what they share.

BACKGROUND_TIMEOUT_S = 10.0
"""A clear may take this long in the background, because the server needs seconds to walk a large table."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""The first and the longest pause between two tries in the background."""


class Clearing:
    """The clears that the server still has to do. `clock`: a monotonic clock, in seconds."""

    def __init__(self, session: EngineSession, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock = session, clock
        self._lock = threading.Lock()
        self._asked = self._cleared = 0  # how often: nothing is looked up while they differ
        self._running = False
        self._pause_s, self._next_try_s = FIRST_PAUSE_S, 0.0  # the latter by `clock`; 0: at once
        self._is_failing = False  # and has been logged

    def ask(self) -> bool:
        """Clears now. False: the server did not clear."""
        with self._lock:
            self._asked += 1
            self._pause_s, self._next_try_s, self._is_failing = FIRST_PAUSE_S, 0.0, False
        cleared = self._clear(None)
        if not cleared:
            log.warning(
                "reset_cache: the kvdock server has not cleared what it holds; nothing is loaded until it has. "
                "`kvdock clear --namespace` does it by hand; `kvdock sessions` shows which"
            )
        return cleared

    @property
    def is_over(self) -> bool:
        """Whether the server has cleared since the last reset, so that it finds no chunk from before."""
        return self._cleared == self._asked

    def starts_again(self) -> bool:
        """Whether it is time to call again() in the background. After True it is False until again() has ended."""
        with self._lock:
            starts = (
                not self.is_over and not self._running
                and self._session.attachment is not None and self._clock() >= self._next_try_s
            )
            self._running |= starts
            return starts

    def again(self) -> None:
        """Background: tries to clear once more."""
        cleared = False
        try:
            cleared = self._clear(BACKGROUND_TIMEOUT_S)
        finally:
            with self._lock:
                self._running = False
                if cleared:
                    self._pause_s = FIRST_PAUSE_S
                else:
                    self._next_try_s = self._clock() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _clear(self, timeout_s: float | None) -> bool:
        asked, attachment = self._asked, self._session.attachment
        if attachment is None:
            return False
        namespace = attachment.filed_in.hex()
        try:
            self._session.report_weights(attachment)  # the namespace of the present weights is cleared
            namespace = attachment.filed_in.hex()
            answer = self._session.client.clear(ClearCache(namespace=namespace), timeout_s=timeout_s)
        except (ServerUnavailable, ApiError) as error:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "cannot clear namespace %s: %s", namespace[:12], error)
            self._is_failing = True
            self._session.lost(attachment, error)
            return False
        self._is_failing = False
        log.info("reset_cache: %d chunks of namespace %s are out of use", answer.chunks, namespace[:12])
        if answer.pending_tiers:
            tiers = ", ".join(answer.pending_tiers)
            log.info("reset_cache: the lower tiers %s are not used until they have carried it out", tiers)
        with self._lock:
            self._cleared = max(self._cleared, asked)
        return True

    def warn_of_others(self) -> None:
        """Background: warns when other instances share the namespace that was cleared, because they go on storing."""
        attachment = self._session.attachment
        if attachment is None:
            return
        try:
            known = self._session.client.sessions().sessions
        except (ServerUnavailable, ApiError) as error:
            self._session.lost(attachment, error)
            return
        namespace = attachment.filed_in.hex()
        own = listed_id(attachment.session)
        others = [one.instance for one in known if one.namespace == namespace and one.session != own]
        if others:
            log.warning(
                "reset_cache: cleared for %d other instances too, which go on storing in the same namespace: %s. If "
                "the weights have changed, reset them as well, or give each version a weights_digest of its own",
                len(others), ", ".join(others[:5]),
            )


class Resets:
    """The effect of a reset, which Settings.on_reset chooses."""

    def __init__(self, session: EngineSession, on_reset: str) -> None:
        self.clearing, self.on_reset = Clearing(session), on_reset
        self._epoch = 0  # of the weights, at the last reset
        self.files_together = on_reset == "apart"
        """Whether chunks of all weights are in one namespace. This is so, too, once a request has named its weights,
        because such requests look up chunks of other weights than the engine runs. Keys distinguish the weights."""

    def has_to_clear(self, epoch: int) -> bool:
        """Whether a reset now has to clear the engine's namespace at the server. `epoch`: that of the weights. If they
        have changed since the last reset, nothing that was stored before can be found."""
        has_changed, self._epoch = epoch != self._epoch, epoch
        return self.on_reset == "clear" and not has_changed
