"""Reads the hints of requests about the worth of their KV: from `kv_hints`, an envelope of vLLM and SGLang, and from
kvdock's entry in the parameters that an engine passes on, which also has a request's options for kvdock.

Orchestrators write hints, in forms that still change, so nothing here makes a request fail: hints that are unknown or
cannot be read are counted, and the first one is logged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kvdock.connectors.scheduler import Preference
from kvdock.protocol.schemas import MAX_AFTER_S
from kvdock.protocol.wire_types import MAX_HINT_S, MAX_LABEL, MOST_PRIORITY, is_label

log = logging.getLogger("kvdock.connector")

MOST_ACTIONS = 16
"""The most actions of one envelope; the others are ignored."""
MOST_DIRECTIVES = 64
"""The most directives of one `kv.retain`."""
MOST_PREFERENCES = 64
"""The most preferences of one request. Each is a call to the server, which delays the stores of other requests."""
MOST_NAME = 128
"""The most characters of a name of weights."""
VERSION = "1"
"""The version that actions must have before its first dot. 0 counts as 1, because the forms are the same."""


OWN = "kvdock"
"""kvdock's key in the parameters of requests and of answers."""


@dataclass(frozen=True)
class Asked:
    """The options of a request in its parameters. `load`: it may be looked up; `store`: it may be stored;
    `report`: its answer has its outcome; `session_end`, `prefetch_after_s`: see docs/operate/vllm_requests.md; the name
    of the weights that the request runs with, if weights change in place, is `weights`; `label` names what it shares
    with other requests of that label."""

    load: bool = True
    store: bool = True
    report: bool = False
    session_end: bool = False
    prefetch_after_s: float | None = None
    weights: str = ""
    label: str = ""


OPTIONS = tuple(Asked.__dataclass_fields__)


def asked_in(params: object, options: Collection[str] = OPTIONS) -> Asked:
    """The options in a request's parameters. `options`: those that the engine's connector knows. Options that cannot be
    read count as not given; Hints.of counts them as ignored."""
    if not isinstance(params, Mapping) or OWN not in params:
        return Asked()
    try:
        return _asked(params[OWN], options)
    except Unreadable:
        return Asked()


class Unreadable(ValueError):
    """A hint has an unknown form. The message names the value found and the value wanted."""


class Hints:
    """Reads the hints of requests. `ignored`: called with the number of hints that were ignored. `options`: those that
    the engine's connector knows."""

    def __init__(self, ignored: Callable[[int], None], options: Collection[str] = OPTIONS) -> None:
        self._ignored, self._options, self._has_logged = ignored, options, False

    def of(self, params: object, envelope: object) -> list[Preference]:
        """The preferences for the request's chunks, for when it ends by itself. `params`: where kvdock's entry may be;
        `envelope`: the request's `kv_hints`. Does not raise."""
        preferences: list[Preference] = []
        for name, read in self._hints_of(params, envelope):
            try:
                preferences += read()
            except Exception as error:  # whatever an orchestrator sends, the request goes on
                self._ignore(name, error)
        if len(preferences) > MOST_PREFERENCES:
            found = f"found {len(preferences)} preferences, wanted at most {MOST_PREFERENCES}"
            self._ignore("kv_hints", Unreadable(found))
        return preferences[:MOST_PREFERENCES]

    def _ignore(self, name: str, error: Exception) -> None:
        self._ignored(1)
        if not self._has_logged:
            self._has_logged = True
            log.warning(
                "kvdock: ignores the KV hint %.80r: %s. Others are counted in hints_ignored, and not logged.", name,
                str(error)[:300],
            )

    def _hints_of(self, params: object, envelope: object) -> Iterator[tuple[str, Callable[[], list[Preference]]]]:
        """The name of each hint, and a function that reads it."""
        if isinstance(params, Mapping) and OWN in params:
            own = params[OWN]
            yield OWN, lambda: _of_params(own, self._options)
        if envelope is None:
            return
        actions = getattr(envelope, "actions", None)
        if not isinstance(actions, list | tuple):
            yield "kv_hints", lambda: _refuse("actions", actions, "a list")
            return
        for number, action in enumerate(actions):
            name = str(getattr(action, "action_type", action))
            if number == MOST_ACTIONS:
                yield name, lambda: _refuse("actions", len(actions), f"at most {MOST_ACTIONS}")
                return
            yield name, lambda action=action: _of_action(action)  # type: ignore[misc]  # a default binds it


def _of_params(own: object, options: Collection[str]) -> list[Preference]:
    asked = _asked(own, options)
    preferences = [Preference(conversation_ended=True)] if asked.session_end else []
    if asked.prefetch_after_s is not None:
        preferences.append(Preference(prefetch_after_s=min(asked.prefetch_after_s, MAX_AFTER_S)))
    if asked.label:
        preferences.append(Preference(label=asked.label))
    return preferences


def _asked(own: object, options: Collection[str]) -> Asked:
    if not isinstance(own, Mapping) or not own or not set(own) <= set(options):
        _refuse(OWN, own, f"one or more of {', '.join(options)}")
    for name, value in own.items():
        if name == "weights":
            if not isinstance(value, str) or not 1 <= len(value) <= MOST_NAME:
                _refuse(name, value, f"a name of 1 to {MOST_NAME} characters")
        elif name == "label":
            if not is_label(value):
                _refuse(name, value, f"a label of 1 to {MAX_LABEL} characters that can be seen")
        elif name == "prefetch_after_s":
            _require_seconds(name, value)
        elif not isinstance(value, bool):
            _refuse(name, value, "true or false")
    return Asked(**own)


def _of_action(action: Any) -> list[Preference]:
    kind, version, payload = action.action_type, str(action.action_version), action.payload
    read = _ACTIONS.get(kind)
    if read is None:
        _refuse("action_type", kind, ", ".join(_ACTIONS))
    if version.partition(".")[0] not in ("0", VERSION):
        _refuse("action_version", version, f"{VERSION}.x")
    if not isinstance(payload, Mapping):
        _refuse("payload", payload, "an object")
    return read(payload)


def _retain(payload: Mapping[str, Any]) -> list[Preference]:
    """`directives` for ranges of tokens, or one priority for all of the request."""
    directives = payload.get("directives")
    if directives is None:
        return [_retained(payload)] if _is_of_this_request(payload) else []
    if not isinstance(directives, list) or len(directives) > MOST_DIRECTIVES:
        _refuse("directives", directives, f"a list of at most {MOST_DIRECTIVES}")
    return [_retained(one) for one in directives]


def _retained(directive: Any) -> Preference:
    """The preference of a directive. It covers the chunks before the range, too: without them, no lookup finds the
    range."""
    if not isinstance(directive, Mapping):
        _refuse("directives", directive, "objects")
    priority = _whole(directive, "priority", least=0)
    start, end = _whole(directive, "start", least=0, default=0), directive.get("end")
    if end is not None and _whole(directive, "end") <= start:
        _refuse("end", end, f"above start, {start}")
    duration_s = _seconds(directive, "duration" if "duration" in directive else "ttl_seconds")
    return _preference(priority, duration_s, end)


def _set_priority(payload: Mapping[str, Any]) -> list[Preference]:
    """`value` None cancels earlier preferences."""
    if payload.get("target", "request_cached") != "request_cached":
        _refuse("target", payload["target"], "request_cached")
    if "value" in payload and payload["value"] is None:
        return [Preference()]
    return [_preference(_whole(payload, "value"), _seconds(payload, "ttl_seconds"), None)]


def _evict(payload: Mapping[str, Any]) -> list[Preference]:
    return [Preference(conversation_ended=True)] if _is_of_this_request(payload) else []


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], list[Preference]]] = {
    "kv.retain": _retain, "kv.evict": _evict, "vllm.set_priority": _set_priority
}


def _preference(priority: int, duration_s: float, end: int | None) -> Preference:
    if duration_s == 0:  # over already
        priority = 0
    if priority == 0:
        return Preference(tokens=end)
    priority = max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
    return Preference(priority, min(duration_s, MAX_HINT_S), end)


def _is_of_this_request(payload: Mapping[str, Any]) -> bool:
    """Whether the payload is about the request that carries it. Blocks that are named by their hashes are ignored."""
    mine = payload.get("include_current_request", True)
    if not isinstance(mine, bool):
        _refuse("include_current_request", mine, "true or false")
    return mine


def _whole(payload: Mapping[str, Any], name: str, *, least: int | None = None, default: int | None = None) -> int:
    found = payload.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool) or (least is not None and found < least):
        _refuse(name, found, "a whole number" if least is None else f"a whole number from {least} on")
    return found


def _seconds(payload: Mapping[str, Any], name: str) -> float:
    """The seconds in `name`. Absent or null: the longest time that the server accepts."""
    found = payload.get(name)
    if found is None:
        return MAX_HINT_S
    return _require_seconds(name, found)


def _require_seconds(name: str, found: object) -> float:
    if not isinstance(found, int | float) or isinstance(found, bool) or not (math.isfinite(found) and found >= 0):
        _refuse(name, found, "seconds, 0 or more")
    return float(found)


def _refuse(name: str, found: object, wanted: str) -> NoReturn:
    raise Unreadable(f"{name} is {str(found)[:80]!r}, and {wanted} is wanted")
