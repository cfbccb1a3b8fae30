"""What is heard of weights that change in vLLM, and the proof that it is heard. vLLM's classes are played by hand here;
tests/whole/test_weights.py has the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.connectors.vllm import weight_changes
from kvdock.connectors.vllm.weight_changes import Hook, kind_of_call

pytestmark = pytest.mark.weights


def executor_class() -> Any:
    class Executor:
        calls: list[Any]

        def __init__(self) -> None:
            self.calls = []

        def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append(method)
            if method == "fails":
                raise RuntimeError("a worker is gone")
            return [method]

    return Executor


def hooked(owner: Any) -> tuple[Hook, list[Any]]:
    heard: list[Any] = []
    hook = Hook(owner, "collective_rpc")
    hook.install()
    hook.listen(lambda this, args, more, made: heard.append((args[0], made)))
    return hook, heard


def test_a_hook_hears_each_call_with_what_it_returned_also_one_that_fails() -> None:
    owner = executor_class()
    hook, heard = hooked(owner)
    assert hook.why_not() == ""
    executor = owner()
    assert executor.collective_rpc("a") == ["a"]
    with pytest.raises(RuntimeError, match="a worker is gone"):
        executor.collective_rpc("fails")
    assert (executor.calls, heard) == (["a", "fails"], [("a", ["a"]), ("fails", None)]), "no probe came through"


def test_a_method_that_is_not_there_is_not_heard() -> None:
    hook = Hook(type("Executor", (), {}), "collective_rpc")
    hook.install()
    assert hook.why_not() == "this vLLM has no Executor.collective_rpc"


def test_a_hook_whose_place_was_taken_is_not_in_force() -> None:
    owner = executor_class()
    hook, heard = hooked(owner)
    assert hook.why_not() == ""
    owner.collective_rpc = lambda self, method, *args: self.calls.append(method)
    assert hook.why_not() == "something else has taken the place of Executor.collective_rpc"
    owner().collective_rpc("reload_weights")
    assert heard == []


def test_a_hook_that_somebody_wraps_is_in_force() -> None:
    owner = executor_class()
    hook, heard = hooked(owner)
    ours = owner.collective_rpc
    owner.collective_rpc = lambda self, *args: ours(self, *args)
    assert hook.why_not() == ""
    owner().collective_rpc("b")
    assert heard == [("b", ["b"])]


@pytest.mark.parametrize(("method", "args", "kwargs", "kind"), [
    ("execute_model", (), {}, ""), ("sample_tokens", (), {}, ""), ("add_lora", (), {}, ""), ("profile", (), {}, ""),
    ("reload_weights", (), {}, "changed"), ("update_weights", (), {}, "changed"), ("load_weights", (), {}, "changed"),
    ("load_model", (), {}, "changed"), ("reset_weights", (), {}, "changed"), ("apply_model", (), {}, "changed"),
    ("start_weight_update", (), {}, "begin"), ("start_draft_weight_update", (), {}, "begin"),
    ("finish_weight_update", (), {}, "end"), (lambda worker: None, (), {}, "changed"),
    ("refresh_policy", (), {}, "changed"), ("train_step", (), {}, "changed"),
    ("get_weights_from", (), {}, "changed"), ("report_device_id", (), {}, ""), ("check_health", (), {}, ""),
    ("sleep", (), {"level": 1}, ""), ("sleep", (), {}, ""), ("sleep", (2,), {}, "changed"),
    ("sleep", (), {"level": 2}, "changed"), ("wake_up", (), {}, ""), ("discard", (("kv_cache",),), {}, ""),
    ("discard", (("weights", "kv_cache"),), {}, "changed"),
])
def test_what_is_not_known_to_leave_weights_alone_counts_as_a_change(
    method: Any, args: Any, kwargs: Any, kind: str
) -> None:
    assert kind_of_call(method, args, kwargs) == kind


def test_calls_reach_each_side_in_whatever_form_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Side:
        def kvdock_weights(self, kind: str, version: str) -> None:
            told.append((kind, version))

    owner, side = executor_class(), Side()
    monkeypatch.setattr(weight_changes, "_executor_class", lambda config: owner)
    why_not = weight_changes.hear(side, SimpleNamespace())
    assert why_not() == ""
    executor = owner()
    executor.collective_rpc("sleep", None, (1,))
    executor.collective_rpc("sleep", None, (2,))
    executor.collective_rpc(method="start_weight_update")
    executor.collective_rpc("sleep", kwargs={"level": 2})
    executor.collective_rpc("execute_model", args=(object(),))
    assert told == [("changed", ""), ("begin", ""), ("changed", "")]
    owner.collective_rpc = lambda self, *args: None
    assert "taken the place" in why_not()


def test_an_executor_that_nobody_knows_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        def kvdock_weights(self, kind: str, version: str) -> None:
            raise AssertionError(kind)

    monkeypatch.setattr(weight_changes, "_executor_class", lambda config: None)
    assert weight_changes.hear(Side(), SimpleNamespace())() == (
        "this vLLM has no Executor whose calls to the workers can be heard"
    )
