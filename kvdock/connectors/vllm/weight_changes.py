"""Notices every change of the weights in a running vLLM.

Every call of an engine to its workers, steps included, goes through one method, `Executor.collective_rpc`: HTTP calls,
LLM and AsyncLLM, sleep mode, weight transfer, the methods of a worker extension, functions that are sent to the
workers. A hook there sees the name of each call. Calls that are known to leave weights alone are ignored; every other
call counts as a change, so an unknown call costs hits, but does not cause wrong tokens. In a worker's process the
model's own `load_weights` has a hook as well, because programs that hold the engine's model call it directly.

    scheduler's process   Executor.collective_rpc ───────────► RunningWeights.begin, changed, end
                          the core's set_weight_version ─────► RunningWeights.named
                          the scheduler resets its cache ────► RunningWeights.flushed
    worker's process      the model's load_weights ──────────► the next report, unless an order has reported it first

If the first hook is not in force, changes may go unnoticed, so nothing is shared (Hook proves that it is). Without the
others an engine shares less, never more.
"""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

# --------------------------------------------------------------------------------
# Methods of vLLM that kvdock wraps, because vLLM does not notify connectors of their calls.
#
# Correct tokens may depend on such a wrapper, but vLLM's next release may rename the method, or another plug-in may
# replace it. So a hook proves that it is in force: it calls the method, as vLLM would, with a probe in place of the
# object. A wrapper that is called recognises the probe and does not call vLLM's method. A method that is not wrapped
# fails at the probe, which has no attributes. The proof is repeated if the method was replaced.

Heard = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""A callback that runs after the method, also if that raised. It gets the object, the arguments, and the result (None:
the method raised, or returned None)."""

Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""A callback that runs before the method. It gets the object and the arguments."""

_installed: dict[tuple[type, str], Hook] = {}


class _Probe:
    """Stands for the object whose method is called."""

    def __init__(self) -> None:
        self.heard: set[Hook] = set()


class Hook:
    """A wrapper around one method of a class, for all objects of the class in this process. Made by hook()."""

    def __init__(self, owner: type, method: str) -> None:
        self._owner, self._method = owner, method
        self._heard: list[Heard] = []
        self._before: list[Before] = []
        self._proved: Any = None
        """The method as it was when the last proof succeeded."""

    @property
    def _name(self) -> str:
        return f"{self._owner.__name__}.{self._method}"

    def listen(self, heard: Heard) -> None:
        """From now on, calls `heard` after each call of the method."""
        self._heard.append(heard)

    def listen_before(self, heard: Before) -> None:
        """From now on, calls `heard`, which must not raise, before each call of the method."""
        self._before.append(heard)

    def install(self) -> None:
        real = getattr(self._owner, self._method, None)
        if real is None:
            return

        @wraps(real)
        def around(this: Any, *args: Any, **more: Any) -> Any:
            if isinstance(this, _Probe):
                this.heard.add(self)
                return None
            made = None
            for before in self._before:
                before(this, args, more)
            try:
                made = real(this, *args, **more)
            finally:
                for heard in self._heard:
                    heard(this, args, more, made)
            return made

        setattr(self._owner, self._method, around)

    def why_not(self) -> str:
        """The reason why calls of the method go unnoticed; "": they are noticed, as a test call has proved."""
        now = getattr(self._owner, self._method, None)
        if now is None:
            return f"this vLLM has no {self._name}"
        if now is self._proved:
            return ""
        probe = _Probe()
        with suppress(Exception):  # a method that replaces the hook does not recognise the probe
            now(probe, "kvdock's probe")
        if self not in probe.heard:
            return f"something else has taken the place of {self._name}"
        self._proved = now
        return ""


def hook(owner: type, method: str) -> Hook:
    """The hook around `owner`'s method. The first call for a method installs it."""
    found = _installed.get((owner, method))
    if found is None:
        found = _installed[owner, method] = Hook(owner, method)
        found.install()
    return found


log = logging.getLogger("kvdock.vllm")

CORE = "vllm.v1.engine.core"
SCHEDULER = "vllm.v1.core.sched.scheduler"

_HARMLESS = """
    execute_model sample_tokens execute_dummy_batch take_draft_token_ids initialize_from_config init_worker init_device
    determine_available_memory compile_or_warm_up_model check_health profile annotate_profile shutdown
    get_kv_cache_spec get_supported_kv_cache_layouts set_kv_cache_layout get_kv_connector_handshake_metadata
    get_supported_tasks get_cache_block_size_bytes get_model_inspection get_compilation_match_table
    get_encoder_timing_stats get_simple_cpu_offload_num_cpu_blocks release_late_interaction_query_cache
    update_max_model_len update_environment_variables reset_mm_cache reset_encoder_cache
    synchronize_device randomize_dummy_inputs adjust_rank
    add_lora remove_lora list_loras pin_lora save_sharded_state save_tensorized_model compute_weight_checksums
    init_weight_transfer_engine shutdown_weight_transfer_engine supports_draft_weight_updates wake_up
    checkpoint_prepare checkpoint_restore reinitialize_distributed
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Methods of vLLM's own workers (0.24 to 0.33) that leave the weights as they are. Adapters are part of the keys of the
requests that use them; sleep of level 1 keeps the weights, and waking restores them."""
BEGINS = frozenset({"start_weight_update", "start_draft_weight_update"})
ENDS = frozenset({"finish_weight_update"})
ONLY_READS = re.compile(r"^(get|list|report|check|is|has|count|describe|print|compute|dump|save)_")
"""How the names of methods that only read begin, unless they match WRITES, too. A worker extension may have such
methods."""
WRITES = re.compile(r"weight|param|load|sync|update|recv|receive|broadcast|merge|model|state")


class Hears(Protocol):
    """A connector's side in the scheduler's process."""

    def kvdock_weights(self, kind: str, version: str) -> None:
        """`kind` and `version`: see RunningWeights.hear."""


_sides: weakref.WeakSet[Any] = weakref.WeakSet()
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def kind_of_call(method: Any, args: tuple[Any, ...], named: dict[str, Any]) -> str:
    """How a call to the workers changes their weights: "" (not at all), or a kind of Hears. `method`: a name, or a
    function that each worker runs."""
    if not isinstance(method, str):
        return "changed"
    if method in HARMLESS:
        return ""
    if method in BEGINS:
        return "begin"
    if method in ENDS:
        return "end"
    if method == "sleep":  # from level 2 on, the weights are dropped
        return "changed" if (args[0] if args else named.get("level", 1)) >= 2 else ""
    if method == "discard":
        tags = args[0] if args else named.get("tags", ("weights",))
        return "changed" if "weights" in tags else ""
    if ONLY_READS.match(method) and not WRITES.search(method):
        return ""
    return "changed"


def hear(side: Hears, vllm_config: Any) -> Callable[[], str]:
    """From now on, reports changes to `side`. Returns a function that returns the reason why changes may go unnoticed;
    "": they are noticed."""
    _sides.add(side)
    executor = _executor_class(vllm_config)
    if executor is None:
        return lambda: "this vLLM has no Executor whose calls to the workers can be heard"
    calls = _listening(executor, "collective_rpc", _called)
    core = getattr(sys.modules.get(CORE), "EngineCore", None)
    scheduler = getattr(sys.modules.get(SCHEDULER), "Scheduler", None)
    if core is not None and hasattr(core, "set_weight_version"):
        _listening(core, "set_weight_version", _named)
    if scheduler is not None:
        _listening(scheduler, "reset_prefix_cache", _flushed)
    return calls.why_not


def hear_model(worker: Any, vllm_config: Any) -> None:
    """From now on, calls `worker.kvdock_weights_written()` whenever weights are loaded into the model or the draft
    model."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    _models.add(worker)
    drafts = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for model in (vllm_config.model_config, drafts):
        if model is not None:
            _listening(get_model_cls(model), "load_weights", _written)


def sides_of(connector: Any) -> list[Any]:
    """kvdock's connectors of an engine: `connector` itself, or those among a MultiConnector's."""
    return [one for one in (connector, *getattr(connector, "_connectors", ())) if one in _sides]


_heard_already: set[Hook] = set()


def _listening(owner: type, method: str, heard: Any) -> Hook:
    found = hook(owner, method)
    if found not in _heard_already:
        _heard_already.add(found)
        found.listen(heard)
    return found


def _executor_class(vllm_config: Any) -> type | None:
    try:
        from vllm.v1.executor.abstract import Executor

        found: type = Executor.get_class(vllm_config)
    except Exception as error:  # of any kind, in another vLLM: nothing is shared then, and the log has the reason
        log.warning("kvdock does not know vLLM's executor: %s", error)
        return None
    return found


def _called(executor: Any, args: tuple[Any, ...], more: dict[str, Any], made: Any) -> None:
    """Called after collective_rpc(method, timeout, args, kwargs, …)."""
    method = args[0] if args else more.get("method")
    of_call = more.get("args", args[2] if len(args) > 2 else ()) or ()
    named = more.get("kwargs", args[3] if len(args) > 3 else None) or {}
    kind = kind_of_call(method, tuple(of_call), dict(named))
    if not kind:
        return
    log.info("weights: vLLM's workers run %s", method if isinstance(method, str) else "a function")
    for side in list(_sides):  # all in this process: it is not always known which engine's workers these are
        side.kvdock_weights(kind, "")


def _named(core: Any, args: tuple[Any, ...], more: dict[str, Any], made: Any) -> None:
    version = args[0] if args else more.get("weight_version", "")
    for side in sides_of(getattr(getattr(core, "scheduler", None), "connector", None)):
        side.kvdock_weights("named", str(version))


def _flushed(scheduler: Any, args: tuple[Any, ...], more: dict[str, Any], made: Any) -> None:
    if made is True:
        for side in sides_of(getattr(scheduler, "connector", None)):
            side.kvdock_weights("flushed", "")


def _written(model: Any, args: tuple[Any, ...], more: dict[str, Any], made: Any) -> None:
    for worker in list(_models):
        worker.kvdock_weights_written()
    for side in list(_sides):  # a side in the same process does not wait for the next report
        side.kvdock_weights("changed", "")
