"""What connectors make of a request's hints. tests/vllm/test_hints.py has vLLM's own envelope, and
tests/sglang/test_hints.py SGLang's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.hints import MOST_ACTIONS, MOST_DIRECTIVES, MOST_PREFERENCES, Asked, Hints
from kvdock.connectors.scheduler import Preference
from kvdock.connectors.vllm.hints import asked_by, said_by
from kvdock.protocol.wire_types import MAX_HINT_S

ENDED = Preference(conversation_ended=True)


def action(kind: Any, payload: Any, version: Any = "1.0") -> Any:
    return SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)


def request(*actions: Any, **more: Any) -> Any:
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))
    return SimpleNamespace(**{"request_id": "r", "kv_transfer_params": None, "kv_hints": envelope, **more})


def read(asked: Any) -> tuple[list[Preference], int]:
    """The preferences, and how many hints were ignored."""
    ignored: list[int] = []
    return Hints(ignored.append).of(*said_by(asked)), sum(ignored)


def retain(*directives: Any) -> Any:
    return action("kv.retain", {"scope": None, "directives": list(directives)})


@pytest.mark.parametrize(("hinted", "preferences"), [
    (action("kv.retain", {"priority": 10, "duration": 60}), [Preference(10, 60.0)]),
    (action("kv.retain", {"priority": 3, "ttl_seconds": 2.5}), [Preference(3, 2.5)]),
    (action("kv.retain", {
        "priority": 3, "ttl_seconds": 2.5, "execute_at": "request_completion", "block_hashes": ["11"],
        "include_current_request": True,
    }), [Preference(3, 2.5)]),
    (action("kv.retain", {"priority": 3, "ttl_seconds": 2, "include_current_request": False}), []),
    (retain({"priority": 80, "end": 100, "duration": 60}, {"priority": 50, "start": 100, "end": 300, "duration": 30}),
     [Preference(80, 60.0, 100), Preference(50, 30.0, 300)]),
    (retain({"priority": 5, "covers_output": True, "duration": None}), [Preference(5, MAX_HINT_S)]),
    (retain({"priority": 5, "duration": 1e9}), [Preference(5, MAX_HINT_S)]),
    (retain({"priority": 1000, "duration": 1}), [Preference(100, 1.0)]),
    (retain({"priority": 0, "end": 64}), [Preference(tokens=64)]),
    (retain({"priority": 7, "duration": 0}), [Preference()]),
    (retain(), []),
    (action("vllm.set_priority", {
        "target": "request_cached", "location": "local_g1", "claim_id": "c", "revision": 1, "value": 10,
        "ttl_seconds": 60,
    }), [Preference(10, 60.0)]),
    (action("vllm.set_priority", {"value": -3, "ttl_seconds": 60}), [Preference(-3, 60.0)]),
    (action("vllm.set_priority", {"value": -1000, "ttl_seconds": 60}), [Preference(-100, 60.0)]),
    (action("vllm.set_priority", {"claim_id": "c", "revision": 2, "value": None}), [Preference()]),
    (action("kv.evict", {"include_current_request": True, "block_hashes": []}), [ENDED]),
    (action("kv.evict", {"include_current_request": False, "block_hashes": ["1"]}), []),
    (action("kv.evict", {}, "0.1"), [ENDED]),
])
def test_hints_are_read(hinted: Any, preferences: list[Preference]) -> None:
    assert read(request(hinted)) == (preferences, 0)


@pytest.mark.parametrize("hinted", [
    action("kv.fetch", {}),
    action(None, {}),
    action(["kv.retain"], {}),
    action("kv.retain", {"priority": 1, "duration": 1}, "2.0"),
    action("kv.retain", {"priority": 1, "duration": 1}, None),
    action("kv.retain", None),
    action("kv.retain", "priority"),
    action("kv.retain", {}),
    action("kv.retain", {"priority": True, "duration": 1}),
    action("kv.retain", {"priority": "10", "duration": 1}),
    action("kv.retain", {"priority": -1, "duration": 1}),
    action("kv.retain", {"priority": 1, "duration": -1}),
    action("kv.retain", {"priority": 1, "duration": "60"}),
    action("kv.retain", {"priority": 1, "duration": True}),
    action("kv.retain", {"priority": 1, "duration": float("nan")}),
    action("kv.retain", {"priority": 1, "duration": float("inf")}),
    action("kv.retain", {"priority": 1, "duration": 1, "include_current_request": 1}),
    action("kv.retain", {"directives": {}}),
    retain("all"),
    retain({"priority": 1, "start": -1}),
    retain({"priority": 1, "start": 8, "end": 8}),
    retain({"priority": 1, "end": 1.5}),
    retain(*[{"priority": 1}] * (MOST_DIRECTIVES + 1)),
    action("vllm.set_priority", {"ttl_seconds": 1}),
    action("vllm.set_priority", {"value": 1.0, "ttl_seconds": 1}),
    action("vllm.set_priority", {"value": 1, "ttl_seconds": 1, "target": "blocks"}),
    SimpleNamespace(),
    "retain",
    None,
])
def test_what_cannot_be_read_is_counted_and_leaves_the_others_as_they_are(hinted: Any) -> None:
    good = action("kv.retain", {"priority": 4, "duration": 5})
    assert read(request(good, hinted, good)) == ([Preference(4, 5.0)] * 2, 1)


@pytest.mark.parametrize("envelope", [SimpleNamespace(), SimpleNamespace(actions=None), "hints", 7, {"actions": []}])
def test_an_envelope_that_is_none_is_counted(envelope: Any) -> None:
    assert read(request(kv_hints=envelope)) == ([], 1)


def test_an_envelope_of_too_many_actions_is_read_as_far_as_it_may_be() -> None:
    one = action("kv.evict", {})
    assert read(request(*[one] * (MOST_ACTIONS + 5))) == ([ENDED] * MOST_ACTIONS, 1)


def test_of_too_many_wishes_the_first_are_told() -> None:
    full = retain(*[{"priority": 1}] * MOST_DIRECTIVES)
    preferences, ignored = read(request(full, full))
    assert len(preferences) == MOST_PREFERENCES and ignored == 1


def test_a_version_without_hints_has_none() -> None:
    assert read(SimpleNamespace(request_id="r")) == ([], 0)
    assert read(SimpleNamespace(request_id="r", kv_transfer_params={"remote": 1})) == ([], 0)


@pytest.mark.parametrize(("own", "preferences", "ignored"), [
    ({"session_end": True}, [ENDED], 0), ({"session_end": False}, [], 0), ({"session_end": 1}, [], 1),
    ({"session_end": True, "retain": 1}, [], 1), ({}, [], 1), (True, [], 1), (None, [], 1),
    ({"load": False, "session_end": True}, [ENDED], 0), ({"store": "false"}, [], 1),
    ({"prefetch_after_s": 0}, [Preference(prefetch_after_s=0)], 0), ({"prefetch_after_s": None}, [], 1),
    ({"prefetch_after_s": 1e9}, [Preference(prefetch_after_s=3600.0)], 0), ({"prefetch_after_s": -1}, [], 1),
    ({"label": "support bot"}, [Preference(label="support bot")], 0), ({"label": ""}, [], 1),
    ({"label": "a\u202eb"}, [], 1),
    ({"label": "n" * 64}, [Preference(label="n" * 64)], 0), ({"label": "n" * 65}, [], 1), ({"label": 7}, [], 1),
    ({"label": "bot", "session_end": True}, [ENDED, Preference(label="bot")], 0),
])
def test_what_comes_of_a_conversation_can_be_said_in_kv_transfer_params(
    own: Any, preferences: list[Preference], ignored: int
) -> None:
    assert read(request(kv_transfer_params={"kvdock": own})) == (preferences, ignored)


@pytest.mark.parametrize(("params", "asked"), [
    (None, Asked()), ({"remote": 1}, Asked()), ({"kvdock": {"load": False}}, Asked(load=False)),
    ({"kvdock": {"store": False, "report": True}, "remote": 1}, Asked(store=False, report=True)),
    ({"kvdock": {"store": False, "stored": False}}, Asked()), ({"kvdock": {"store": 0}}, Asked()),
    ({"kvdock": [1]}, Asked()),
])
def test_requests_ask_for_what_is_done_for_them(params: Any, asked: Asked) -> None:
    assert asked_by(request(kv_transfer_params=params)) == asked


def test_only_the_first_hint_that_is_ignored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []
    hints = Hints(counted.append)
    with caplog.at_level(logging.DEBUG, logger="kvdock.connector"):
        for _ in range(3):
            asked = request(action("kv.fetch", {}), action("kv.retain", {"priority": "x" * 500}))
            assert hints.of(*said_by(asked)) == []
    (told,) = caplog.messages
    assert "kv.fetch" in told and "kv.retain, kv.evict, vllm.set_priority is wanted" in told and len(told) < 600
    assert sum(counted) == 6
