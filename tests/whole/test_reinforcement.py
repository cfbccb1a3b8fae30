"""examples/reinforce.py, run as it is: two engines on the CPU sample, are trained, and share one pool in each step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import MARK, Engine
from paths import ROOT
from stories import EXAMPLE_ENVIRON, EXAMPLE_PROGRAM, REQUESTS_MORE, TRAINER, TRAINING_ENVIRON
from whole_engines import run_instances, tokens_of

pytestmark = [MARK, pytest.mark.weights, pytest.mark.timeout(1800), pytest.mark.xdist_group("programs")]

STEPS, SAMPLES = 3, 16
RATE = 0.03
"""Large enough for each step to change what is answered to each prompt."""
SHARED_TOKENS, OWN_TOKENS, PROMPTS = 512, 137, 3
WHOLE_TOKENS = SHARED_TOKENS + PROMPTS * 128
"""In whole chunks, or pages: each that prompts have in common counts once."""
TAIL_TOKENS = 9
"""What each prompt has behind its last whole block or page."""


@dataclass(frozen=True)
class Training:
    """What the example has said of each step. `models`: the folder of the weights that sampled in each step."""

    steps: list[dict[str, Any]]
    models: list[Path]


@pytest.fixture(scope="module")
def training_story(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("training")
    client = (
        f"{TRAINER} {ROOT}/examples/reinforce.py --json --steps {STEPS} --samples {SAMPLES} --rate {RATE} "
        f"--folder {folder}"
    )
    environ = {"MODEL": str(models["llama"]), "KVDOCK_WEIGHTS_KEPT": "0", "CLIENT": client}
    done, _ = run_instances(MARK.name, EXAMPLE_PROGRAM, folder, 1500, **EXAMPLE_ENVIRON, **TRAINING_ENVIRON, **environ)
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield Training(steps, [models["llama"], *(folder / f"step-{step}" for step in range(1, STEPS))])


def test_in_each_step_both_engines_answer_as_one_without_kvdock_that_has_the_steps_weights(
    training_story: Training
) -> None:
    assert [said["step"] for said in training_story.steps] == list(range(STEPS))
    truths = []
    for said, model in zip(training_story.steps, training_story.models, strict=True):
        with Engine(model, None) as alone:
            runs, _ = alone.generate(said["prompts"], new=len(said["greedy"][0][0]))
        truths.append(tokens_of(runs))
        assert said["greedy"] == [truths[-1]] * 2
    for before, now in pairwise(truths):
        assert all(one != other for one, other in zip(before, now, strict=True)), "the control: each step changes all"


def test_in_each_step_one_engine_computes_a_prompt_once_for_all_samples_and_the_other_loads_it(
    training_story: Training
) -> None:
    """No token of an earlier step's KV is loaded: the first engine to ask finds nothing."""
    requests = PROMPTS * (SAMPLES + REQUESTS_MORE + 1)  # one more is greedy
    computed = SHARED_TOKENS + PROMPTS * OWN_TOKENS + (requests - PROMPTS) * TAIL_TOKENS
    own = requests * (SHARED_TOKENS + OWN_TOKENS) - computed
    for said in training_story.steps:
        first, second = said["prompt_tokens"]
        assert first == {"computed": computed, "loaded": 0, "own_cache": own}
        again = second["loaded"] - WHOLE_TOKENS  # by requests that came while what they share was being loaded
        assert second == {"computed": computed - WHOLE_TOKENS, "loaded": WHOLE_TOKENS + again, "own_cache": own - again}
        assert again >= 0 and again % 128 == 0


def test_after_each_step_the_pool_gives_back_what_the_old_weights_had(training_story: Training) -> None:
    for said in training_story.steps:
        assert (said["only_new"], said["left_bytes"]) == (True, 0)
        assert said["stored_bytes"] == training_story.steps[0]["stored_bytes"] > 0
