"""The connector's figures for vLLM's statistics: plain numbers by name, which processes send each other and add up.

Counters and durations hold what was added since the last take(); a gauge holds its latest value and is reported when it
changes. Workers' figures are summed, so figures that are the same on all ranks (tokens, failed loads) are counted on
one rank only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvdock.connectors.hints import OWN, Asked
from kvdock.connectors.outcomes import SHARED, Metric, RequestOutcomes
from kvdock.connectors.plans import LoadPlan, StorePlan
from kvdock.connectors.vllm.hints import asked_by
from kvdock.connectors.vllm.request_tag import WHY
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Manifest

Value = int | float | list[float]
Data = dict[str, Value]

MB, GB = 1e6, 1e9


METRICS: Mapping[str, Metric] = {
    **SHARED,
    "load_bytes": Metric("counter", "Bytes of KV loaded from the kvdock server, over all ranks."),
    "load_seconds": Metric("seconds", "Duration of a request's load, each rank's."),
    "load_failures": Metric("counter", "Loads of which some tokens had to be computed after all."),
    "store_tokens": Metric("counter", "Tokens published to the kvdock server."),
    "store_bytes": Metric("counter", "Bytes of KV published to the kvdock server, over all ranks."),
    "store_seconds": Metric("seconds", "Duration of a store, each rank's."),
    "stores_dropped": Metric("counter", "Stores dropped before they were copied."),
    "fence_seconds": Metric("counter", "Seconds that steps waited for stores to leave blocks, over all ranks."),
    **{
        f"bypassed_{why}": Metric("counter", f"Requests that were not looked up: {reason}.")
        for why, reason in WHY.items()
    },
    "weight_changes": Metric("counter", "Times that the weights changed, or may have changed, while the engine ran."),
    "withheld": Metric("gauge", "1 while nothing is shared because a change of weights could go unnoticed."),
    "load_wait_seconds": Metric("seconds", "Time that a request waited for tokens that another one was loading."),
    "load_waits_fulfilled": Metric("counter", "Loads that a request waited for and took from vLLM's own cache."),
    "load_waits_failed": Metric("counter", "Loads that a request waited for and that failed, or whose request ended."),
    "load_waits_expired": Metric("counter", "Loads that a request waited for as long as it may."),
    "load_waits_missed": Metric("counter", "Loads that a request waited for and did not find in vLLM's own cache."),
}
"""By name without the prefix: `load_bytes` is exported as vllm:kvdock_load_bytes_total."""


class Figures:
    """The counts of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: Data = {}
        self._reported: dict[str, float] = {}

    def add(self, name: str, amount: int | float) -> None:
        """Adds to a counter, or adds one observation to durations."""
        kind = METRICS[name].kind
        assert kind != "gauge", name
        if amount or kind == "seconds":
            with self._lock:
                merge(self._data, {name: [amount] if kind == "seconds" else amount})

    def waited(self, prefix: str, how: str, seconds: float) -> None:
        """Counts a wait that has ended. `prefix`: the kind of wait."""
        self.add(f"{prefix}waits_{how}", 1)
        self.add(f"{prefix}wait_seconds", seconds)

    def state(self, name: str, value: int) -> None:
        assert METRICS[name].kind == "gauge", name
        with self._lock:
            if self._reported.get(name) != value:
                self._reported[name] = self._data[name] = value

    def take(self) -> Data:
        """The figures since the last call; empty when there are none."""
        with self._lock:
            taken, self._data = self._data, {}
            return taken


class CopyFigures(Figures):
    """The counts of the worker of `ranks`."""

    def __init__(self, manifest: Manifest, ranks: Sequence[int]) -> None:
        super().__init__()
        self._manifest, self._ranks = manifest, ranks

    def loaded(self, plan: LoadPlan, valid_tokens: int, seconds: float) -> None:
        """Counts a load that has ended. `valid_tokens`: how many tokens of the request are valid now."""
        groups = [piece.group for piece in plan.pieces if piece.chunk * plan.chunk_tokens < valid_tokens]
        self.add("load_tokens", valid_tokens - plan.local_tokens if 0 in self._ranks else 0)
        self.add("load_bytes", len(self._ranks) * sum(self._manifest.groups[group].part_bytes for group in groups))
        self.add("load_seconds", seconds)

    def stored(self, plan: StorePlan, ready: int, seconds: float) -> None:
        """Counts a store that has ended. `ready`: how many chunks this worker's commit has published, as the
        last writer's."""
        manifest = self._manifest
        of_all = sum(manifest.groups[piece.group].part_bytes for piece in plan.pieces) * manifest.writers
        self.add("store_tokens", ready * manifest.chunk_tokens)
        self.add("store_bytes", of_all * ready * manifest.chunk_tokens // plan.tokens)
        self.add("store_seconds", seconds)


def merge(into: Data, other: Mapping[str, Value]) -> None:
    """Adds `other`, which is not changed, to `into`: counters are summed, durations are joined, a later gauge replaces
    an earlier one."""
    for name, value in other.items():
        have = into.get(name)
        if have is None or METRICS[name].kind == "gauge":
            into[name] = copy.copy(value)
        elif isinstance(have, list):
            assert isinstance(value, list), name
            have += value
        else:
            assert not isinstance(value, list), name
            into[name] = have + value


def summary(data: Mapping[str, Value]) -> dict[str, int | float]:
    """A short form of an interval, for vLLM's log line. Figures that are 0 are left out."""
    shown: dict[str, int | float] = {}
    for verb, name in (("Load", "load"), ("Store", "store")):
        seconds, size = durations(data, f"{name}_seconds"), number(data, f"{name}_bytes")
        if seconds:
            shown[f"{verb}s"] = len(seconds)
            shown[f"{verb} MB"] = round(size / MB, 3)
            shown[f"Avg {verb.lower()} GB/s"] = round(size / GB / max(sum(seconds), 1e-9), 3)
    for name, label in (
        ("load_failures", "Failed loads"), ("stores_dropped", "Dropped stores"), ("lookups_late", "Late lookups"),
        ("hints_ignored", "Ignored hints"),
    ):
        if number(data, name):
            shown[label] = number(data, name)
    bypassed = sum(number(data, f"bypassed_{why}") for why in WHY)
    if bypassed:
        shown["Bypassed requests"] = bypassed
    if number(data, "fence_seconds"):
        shown["Waited for stores ms"] = round(number(data, "fence_seconds") * 1e3, 1)
    lookups = durations(data, "lookup_seconds")
    if lookups:
        shown["Lookups"] = len(lookups)
        shown["Max lookup ms"] = round(max(lookups) * 1e3, 2)
    if "attached" in data:
        shown["Server attached"] = number(data, "attached")
    return shown


def number(data: Mapping[str, Value], name: str) -> int | float:
    """A counter or gauge; 0 when it is not there."""
    value = data.get(name, 0)
    assert not isinstance(value, list), name
    return value


def durations(data: Mapping[str, Value], name: str) -> list[float]:
    value = data.get(name, [])
    assert isinstance(value, list), name
    return value


# --------------------------------------------------------------------------------
# The outcome of each of vLLM's requests. A request that asks for its outcome gets it with its answer, and people read
# it at the server; docs/operate/vllm_requests.md lists the reasons.
#
# Not thread-safe: vLLM's threads call it one at a time (arrivals.py).

class Outcomes(RequestOutcomes):
    """As RequestOutcomes, with the options of each request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked: dict[str, Asked] = {}

    def asked(self, request: Any) -> Asked:
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = asked_by(request)
            self._of(request.request_id)  # every request whose options were read has an outcome
        return asked

    def forget(self, request_id: str) -> None:
        """vLLM did not take the request: it has no outcome."""
        self._asked.pop(request_id, None)
        super().forget(request_id)

    def answer(self, request: Any) -> dict[str, Any] | None:
        """The request has ended. Returns the `kv_transfer_params` of its answer. None: the request did not ask for its
        outcome, or it has parameters for another connector, which may answer: vLLM accepts only one answer."""
        asked = self._asked.pop(request.request_id, None)
        outcome = self.ended(
            request.request_id, request.num_prompt_tokens, has_run=request.num_output_tokens > 0
        )
        params = getattr(request, "kv_transfer_params", None)
        if outcome is None or asked is None or not asked.report:
            return None
        if not isinstance(params, Mapping) or set(params) != {OWN}:
            return None
        return {OWN: _params_of(outcome)}


def _params_of(outcome: Outcome) -> dict[str, Any]:
    params: dict[str, Any] = {"found_tokens": outcome.found_tokens, "loaded_tokens": outcome.loaded_tokens}
    return params | ({"why": outcome.why} if outcome.why else {})
