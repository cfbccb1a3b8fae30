"""What vLLM's part tells of a request that was admitted more than once, whose load fell short, or that never ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvdock.connectors.vllm.figures import Outcomes
from kvdock.protocol.outcomes import Outcome


def request_of(tokens: int, outputs: int = 1) -> Any:
    return SimpleNamespace(request_id="r", num_prompt_tokens=tokens, num_output_tokens=outputs)


class Played:
    """The outcomes of a request, at times that the test sets."""

    def __init__(self) -> None:
        self.now_s, self.epoch, self.told = 5.0, 0, list[Outcome]()
        self.outcomes = Outcomes(self.told.append, None, lambda: self.now_s, epoch_of=lambda request_id: self.epoch)

    def admitted(self, epoch: int, local_tokens: int, loaded: int) -> None:
        self.epoch = epoch
        self.outcomes.looked_up("r", local_tokens)
        self.outcomes.found("r", local_tokens + loaded)
        self.outcomes.admitted("r", loaded)
        if loaded:
            self.outcomes.loading("r", 1 << 20)

    def answer(self, outputs: int = 1) -> None:
        assert self.outcomes.answer(request_of(200, outputs)) is None


def test_what_a_preempted_request_had_computed_itself_is_not_local() -> None:
    played = Played()
    played.outcomes.looked_up("r", 16)  # it waits
    played.admitted(2, 32, 0)
    played.admitted(3, 160, 0)  # it comes back after preemption
    played.answer()
    assert played.told == [Outcome(request="r", epoch=2, prompt_tokens=200, local_tokens=32, found_tokens=32)]


def test_only_the_first_admission_divides_the_prompt_and_later_loads_count_apart() -> None:
    played = Played()
    played.admitted(1, 0, 64)
    played.now_s += 0.02
    played.outcomes.loaded("r", 0.01)
    played.admitted(2, 32, 96)
    played.now_s += 0.03
    for valid in (64, 96):  # two ranks; the load ends with the first that fails
        played.outcomes.failed("r", valid)
    played.admitted(3, 128, 0)
    played.answer()
    assert played.told == [Outcome(
        request="r", epoch=1, prompt_tokens=200, found_tokens=64, loaded_tokens=64, reloaded_tokens=32,
        loaded_bytes=2 << 20, load_us=50_000,
    )]


def test_of_a_load_that_fell_short_counts_what_came_on_every_rank() -> None:
    played = Played()
    played.admitted(1, 32, 128)
    played.now_s += 0.02
    for valid in (128, 96, 112):
        played.outcomes.failed("r", valid)
    played.answer()
    assert played.told == [Outcome(
        request="r", epoch=1, prompt_tokens=200, local_tokens=32, found_tokens=160, loaded_tokens=64,
        why="load_failed", loaded_bytes=1 << 20, load_us=20_000,
    )]


def test_an_ended_request_is_told_once() -> None:
    played = Played()
    played.outcomes.held_back("r", "late")
    played.outcomes.admitted("r", 0)
    for _ in range(2):
        played.answer()
    assert [one.why for one in played.told] == ["late"]


def test_what_holds_a_request_back_after_it_was_admitted_is_not_the_prompts_reason() -> None:
    played = Played()
    played.outcomes.held_back("r", "late")
    played.admitted(1, 0, 0)
    played.outcomes.held_back("r", "opted_out")
    played.outcomes.declined("r", "short", 96)
    played.answer()
    assert [(one.why, one.found_tokens) for one in played.told] == [("late", 0)]


def test_a_request_that_never_ran_has_no_outcome() -> None:
    waits, loads, runs = Played(), Played(), Played()
    waits.outcomes.looked_up("r", 16)
    waits.answer(outputs=0)
    for played in (loads, runs):
        played.admitted(1, 0, 64)
    loads.answer(outputs=0)
    runs.answer(outputs=1)  # vLLM tells of a load in the step that it belongs to only after the step
    assert waits.told == loads.told == []
    assert [(one.loaded_tokens, one.load_us) for one in runs.told] == [(64, None)]
