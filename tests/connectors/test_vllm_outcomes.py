"""What vLLM's part tells of a request that was admitted more than once, or whose load fell short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvdock.connectors.vllm.figures import Outcomes
from kvdock.protocol.outcomes import Outcome


def request_of(tokens: int) -> Any:
    return SimpleNamespace(request_id="r", num_prompt_tokens=tokens)


def test_what_a_preempted_request_had_computed_itself_is_not_local() -> None:
    told, request = list[Outcome](), request_of(200)
    outcomes = Outcomes(told.append)
    for local_tokens in (16, 32, 160):  # waits, is admitted, and comes back after preemption
        outcomes.looked_up("r", local_tokens)
        if local_tokens > 16:
            outcomes.admitted("r", 0)
    assert outcomes.answer(request) is None
    assert told == [Outcome(request="r", prompt_tokens=200, local_tokens=32)]


def test_the_last_load_counts_behind_the_local_tokens_of_its_own_admission() -> None:
    told, request = list[Outcome](), request_of(200)
    outcomes = Outcomes(told.append)
    for local_tokens, loaded in ((0, 64), (32, 96), (128, 0)):
        outcomes.looked_up("r", local_tokens)
        outcomes.found("r", local_tokens + loaded)
        outcomes.admitted("r", loaded)
    outcomes.failed("r", 64)
    outcomes.answer(request)
    assert told == [Outcome(
        request="r", prompt_tokens=200, local_tokens=32, found_tokens=128, loaded_tokens=32, why="load_failed"
    )]


def test_an_ended_request_is_told_once() -> None:
    told, request = list[Outcome](), request_of(20)
    outcomes = Outcomes(told.append)
    outcomes.held_back("r", "late")
    for _ in range(2):
        outcomes.answer(request)
    assert [one.why for one in told] == ["late"]
