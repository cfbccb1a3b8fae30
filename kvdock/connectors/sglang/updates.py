"""SGLang's ways to change weights: the meaning of each, and the proof that kvdock notices all of them.

    SchedulerWeightUpdaterManager   SGLang's control calls reach it in each rank
    Scheduler, TpModelWorker        other plugins and RPC call these
    WeightUpdater                   a model's updater: all of the above call it

A method of these classes whose name looks like a change of weights counts as one, whether it is known here or not
(looks_like_change). Around each of them is one of SGLang's own plugin hooks (hooks.py).

Between begin_weight_update and end_weight_update parameters may be written at any time without a call (P2P, RDMA).

SGLang's Scheduler names a version by record_weight_version_change: in an update once the parameters are loaded, and by
itself for /update_weight_version. An update that ends without that call has failed, and left weights without a name.

A hook may be missing without an error: SGLang's method was renamed, another plugin has replaced it, or SGLang's
dispatcher was made before the hook. So Guard calls each method with a Probe in place of its object: a hook recognises
it and goes no further, and any other code stops at the first attribute that it reads. Until all hooks have recognised a
Probe, and again when one of them is replaced by other code, nothing is shared.

Threads: SGLang's scheduler thread calls every method.
"""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvdock.connectors.running_weights import RunningWeights

log = logging.getLogger("kvdock.sglang")

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
MODEL_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

UPDATES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)
BEGINS, ENDS = "begin_weight_update", "end_weight_update"
RELEASES, RESUMES = "release_memory_occupation", "resume_memory_occupation"
CHECKS = "check_weights"
CHANGES: dict[str, tuple[str, ...]] = {
    UPDATER: (*UPDATES, BEGINS, ENDS, RELEASES, RESUMES, CHECKS),
    MODEL_UPDATER: (
        "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc",
        "load_weights_from_distributed", BEGINS, ENDS,
    ),
}
"""The methods of SGLang 0.5.23, by the path of their class. Those that other versions and plugins add are found by
name.
"""
NAMES_VERSION = f"{SCHEDULER}.record_weight_version_change"

_WRITES = re.compile(
    r"(^|_)(update|load|reload|set|swap|replace|sync|refit|apply|write|copy|import|restore|merge|patch|pull|push|fetch)"
    r"_(\w+_)?(param|parameters|params|checkpoint|state_dict|model)(_|$)"
)
_READS = re.compile(
    r"_*(get|check|is|has|list|save|send|export|record|count|num|observe|assert|describe|dump|log|report|validate"
    r"|init|destroy|preloaded|account|flush)_"
)
_HARMLESS = frozenset((
    "weight_update_runners", "weight_load_time", "start_startup_weight_load", "finalize_startup_weight_load",
    "receive_weights_from_distributed", "_receive_bucketed_weights_from_distributed", "handle_update_weight_version",
))
"""Methods of SGLang 0.5.23 that read, receive into memory of their own, run before an engine serves, or name a version.
"""


def looks_like_change(name: str) -> bool:
    """Whether a method of this name may change the weights of a model that runs. LoRA adapters do not count as
    weights."""
    if name in _HARMLESS or "lora" in name:
        return False
    return bool(_WRITES.search(name)) or ("weight" in name and not _READS.match(name))


def changes_of(owner: type) -> list[str]:
    """The names of a class's methods that look like a change."""
    return [name for name in dir(owner) if looks_like_change(name) and inspect.isroutine(getattr(owner, name))]


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def is_of_weights(request: Any) -> bool:
    """Whether a request to release or resume memory is about weights."""
    tags = getattr(request, "tags", None)
    return not tags or "weights" in tags


def only_reads(request: Any) -> bool:
    """Whether a request to check weights leaves the weights unchanged; some actions overwrite them."""
    return getattr(request, "action", None) in ("snapshot", "compare", "checksum")


class Changes:
    """Derives from SGLang's calls when weights change; the hooks call it. `started`: called when a change starts."""

    def __init__(self, weights: RunningWeights, started: Callable[[], None]) -> None:
        self._weights, self._started = weights, started
        self._open: set[str] = set()  # the reasons why weights may be written now without a call
        self._depth = 0
        self._version: str | None = None  # the version that SGLang has named for the change in progress
        self._was_loaded = False  # whether the call in progress has loaded weights
        self._has_failed = False

    def opens(self, why: str) -> None:
        """From now on weights may be written without a call. `why`: a reason, for closes()."""
        if not self._open:
            self._begin()
        self._open.add(why)

    def closes(self, why: str) -> None:
        """Ends what opens() began with the same `why`. Without such an opens(), this is a change by itself."""
        if not self._open:
            self._begin()
        self._open.discard(why)
        if not self._open:
            self._end()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call that changes weights. Nested calls are part of the outermost one."""
        if self._depth:
            yield
            return
        if not self._open:
            self._begin()
        self._depth, self._was_loaded = 1, False
        try:
            yield
        finally:
            self._depth = 0
            self._has_failed |= not self._was_loaded
            if not self._open:
                self._end()

    def named(self, version: str | None) -> None:
        """SGLang records the version of its weights; None: they have no version."""
        if self._depth or self._open:
            self._was_loaded = True
            self._version = version or self._version
        elif version:
            before = self._weights.epoch
            self._weights.named(version)
            if self._weights.epoch != before:
                self._started()

    def unheard(self, why: str) -> None:
        """Weights may change unnoticed, and may have changed."""
        self._weights.withhold(why)
        self._weights.changed()
        self._started()

    def _begin(self) -> None:
        self._version, self._has_failed = None, False
        self._weights.begin()
        self._started()

    def _end(self) -> None:
        self._weights.end("" if self._has_failed else self._version or "")


class Probe:
    """Takes the place of an object whose method is called, to see which hooks recognise it. It has no attributes."""

    def __init__(self) -> None:
        self.heard: set[str] = set()


class Guard:
    """Whether all of SGLang's ways to change weights are noticed. `hook`: puts a hook around a method, by the path of
    its class and its name, if it can. `plans`: the name of the Scheduler's method whose hook calls meet(). `unheard`:
    called with the reason why some may go unnoticed."""

    def __init__(self, hook: Callable[[str, str], None], plans: str, unheard: Callable[[str], None]) -> None:
        self._hook, self._plans, self._unheard = hook, plans, unheard
        self._scheduler: Any = None
        self._proven: list[tuple[Any, str, Any]] = []
        self._dispatched: list[tuple[Any, Any]] = []
        self._sizes: list[tuple[type, int]] = []  # the classes of the proven methods, and how many attributes each has
        self._answers = 0  # how many kinds of requests the dispatcher answers
        self.why = "SGLang has not planned a batch yet"
        """Why nothing may be shared; "" once all hooks are proven."""

    def meet(self, scheduler: Any) -> None:
        """The engine's scheduler plans a batch."""
        if self._scheduler is not scheduler:
            self._scheduler = scheduler
            self._prove()  # nothing was computed before

    @property
    def has_met(self) -> bool:
        """Whether the scheduler has planned a batch, so that the hooks were tested."""
        return self._scheduler is not None

    def in_force(self) -> bool:
        """Whether all hooks are in force. Proves them again if SGLang's methods have changed since the last proof. If a
        hook is not in force, the weights count as changed, because a change may have gone unnoticed."""
        if not self.why and not self._is_as_proven():
            self._prove()
        return not self.why

    def _is_as_proven(self) -> bool:
        """Whether nothing has changed since the last proof. This is cheap, because the scheduler's loop calls it in
        each iteration."""
        mapping = getattr(getattr(self._scheduler, "_request_dispatcher", None), "_mapping", {})
        return (
            all(getattr(owner, name, None) is method for owner, name, method in self._proven)
            and all(len(vars(owner)) == size for owner, size in self._sizes)
            and len(mapping) == self._answers
            and all(mapping.get(asked) is method for asked, method in self._dispatched)
        )

    def _prove(self) -> None:
        self.why = ""
        self._proven, self._dispatched, self._sizes = [], [], []
        try:
            self._prove_all()
        except _NotHeard as error:
            self.why = str(error)
        except Exception as error:  # SGLang's objects differ from those for which this was written
            self.why = f"SGLang is not as expected ({type(error).__name__}: {error})"
        if self.why:
            self._unheard(f"it would not hear of all changes of its weights, for {self.why}")

    def _prove_all(self) -> None:
        scheduler = self._scheduler
        updater, worker = scheduler.weight_updater, scheduler.tp_worker
        model_updater = worker.model_runner.weight_updater
        owners = ((type(scheduler), SCHEDULER), (type(updater), UPDATER), (type(worker), WORKER),
                  (type(model_updater), MODEL_UPDATER))
        for owner, path in owners:
            names = {*changes_of(owner), *CHANGES.get(path, ())}
            for name in sorted(names | ({self._plans} if owner is type(scheduler) else set())):
                self._prove_one(owner, name)
            self._sizes += [(base, len(vars(base))) for base in owner.__mro__ if base is not object]
        for one in (scheduler, updater, worker, model_updater):
            for name in getattr(one, "__dict__", ()):
                if looks_like_change(name) and callable(getattr(one, name)):
                    raise _NotHeard(f"{type(one).__name__}.{name} is an attribute of the object alone")
        self._prove_dispatcher(scheduler._request_dispatcher._mapping)

    def _prove_one(self, owner: type, name: str) -> None:
        found = inspect.getattr_static(owner, name, None)
        if found is None:
            raise _NotHeard(f"SGLang's {owner.__name__} has no {name}")
        if isinstance(found, (classmethod, staticmethod)) or _runs_later(inspect.unwrap(found)):
            raise _NotHeard(f"{owner.__name__}.{name} is no plain method, and kvdock does not know it")
        if not is_heard(getattr(owner, name)):
            self._hook(f"{owner.__module__}.{owner.__qualname__}", name)
        method = getattr(owner, name)
        if not is_heard(method):
            raise _NotHeard(f"{owner.__name__}.{name} was replaced, and a call of it does not reach kvdock's hook")
        self._proven.append((owner, name, method))

    def _prove_dispatcher(self, mapping: Any) -> None:
        """SGLang's dispatcher holds the methods that it found when it was made, maybe before a hook was installed."""
        self._answers = len(mapping)
        for asked, method in mapping.items():
            names = (_snake(asked.__name__), getattr(method, "__name__", ""))
            is_known = names[1] in CHANGES[UPDATER]
            if not is_known and ("version" in names[0] or not any(map(looks_like_change, names))):
                continue
            if not is_heard(getattr(method, "__func__", None)):
                raise _NotHeard(f"what answers {asked.__name__} does not reach kvdock's hook")
            self._dispatched.append((asked, method))


class _NotHeard(Exception):
    """A call does not reach kvdock's hook. The message names the method."""


def _runs_later(method: Any) -> bool:
    """Whether `method` runs on after its call has returned, as coroutines and generators do."""
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return any(is_of(method) for is_of in kinds)


def is_heard(method: Any) -> bool:
    """Whether a call of `method`, a plain function of a class, reaches a hook of kvdock's."""
    if method is None:
        return False
    for arguments in ((Probe(), Probe()), (Probe(),)):
        try:
            method(*arguments)
        except Exception as error:  # other code does not know the probe
            log.debug("a probe of %s ended with %r", method, error)
        if arguments[0].heard:
            return True
    return False


# --------------------------------------------------------------------------------
# Which pages of SGLang's tree may be stored after weights have changed, until the tree is flushed.
#
# A page's KV depends on all pages before it. So it belongs to the present weights if these have computed it and all
# pages before it. SGLang shows neither for a page that is offered: the tree keeps pages of older weights, and a request
# that ran across the change brings pages of both. So three facts are recorded about each page:
#
#     its request     the one that inserts it into the tree; it was admitted under the present weights, or before
#     its slots       they are the request's own, or the tree had the page already
#     its parent      the start of the prompt, or a page that is fresh
#
# A page is fresh if a request that was admitted under the present weights inserts its own slots behind a fresh page.
#
# Invariant: a page of the tree whose hash is in `_pages` is fresh. One that comes into the tree is offered at once, so
# its hash leaves `_pages` if it is not.
#
# Threads: SGLang's scheduler thread calls everything.

START, UNKNOWN = "", None
"""Values in place of the hash of a page's parent: there is no page before it; its parent is not known."""
MOST_PAGES = 1 << 18
"""How many fresh pages are remembered. The oldest ones are forgotten; they and pages behind them are not stored."""


class Fresh:
    """Decides which pages may be stored. `weights`: the weights that the engine runs."""

    def __init__(self, weights: RunningWeights, most: int = MOST_PAGES) -> None:
        self._weights, self._most = weights, most
        self._admitted: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By request, the epoch of the weights under which it was admitted last."""
        self._pages: OrderedDict[str, None] = OrderedDict()
        self._epoch = 0  # the epoch of the weights that computed `_pages`
        self.inserts: Any = None
        """The request that inserts its pages into the tree; None: none does, or it is not known."""
        self._own: Any = None

    def admitted(self, request: Any) -> None:
        """A request is about to be admitted: all but its prefix in the tree is computed from now on. A request of a
        session may continue KV that is in no tree."""
        if getattr(request, "session", None) is None:
            self._admitted[request] = self._weights.epoch

    @contextmanager
    def inserting(self, request: Any) -> Iterator[None]:
        """A request inserts its pages into the tree."""
        before, self.inserts = self.inserts, request
        try:
            yield
        finally:
            self.inserts = before

    @contextmanager
    def adopting(self, slots: Any, first_own: int) -> Iterator[None]:
        """The tree takes `slots` (an int64 tensor with one slot for each token). The tree has its own slots for the
        tokens before `first_own`."""
        before, self._own = self._own, None if slots is None else slots[first_own:]
        try:
            yield
        finally:
            self._own = before

    def may_store(self, pages: Sequence[str], parent: str | None, slots: Any, *, has_state: bool = False) -> bool:
        """Whether all offered pages belong to the present weights. `pages`: their hashes; `parent`: see Hooked;
        `slots`: those of the pages' tokens; `has_state`: the recurrent state behind the pages is offered, too."""
        if not self._weights.is_stale:
            return True
        if self._epoch != self._weights.epoch:
            self._pages.clear()
            self._epoch = self._weights.epoch
        if not self._is_fresh(pages, parent, slots, has_state):
            for page in pages:
                self._pages.pop(page, None)
            return False
        self._pages.update(dict.fromkeys(pages))
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)
        return True

    def _is_fresh(self, pages: Sequence[str], parent: str | None, slots: Any, has_state: bool) -> bool:
        if parent != START and parent not in self._pages:
            return False
        if self._own is None or self.inserts is None:
            return False
        is_own, is_new = _among(slots, self._own), self._admitted.get(self.inserts) == self._weights.epoch
        if not is_own.any():  # offered once more, and whoever inserts it has computed its state
            return all(page in self._pages for page in pages) and (is_new or not has_state)
        return bool(is_own.all()) and is_new


def _among(slots: Any, others: Any) -> Any:
    import torch

    return torch.isin(torch.as_tensor(slots).cpu(), torch.as_tensor(others).cpu())
