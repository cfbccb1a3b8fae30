"""The demo's trained model: text, logits and tokens as transformers 5.17 has them for the same file, in float32."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_helpers import sampling

from kvdock.cli.demo import MODEL_PACKAGES
from kvdock.engine.engine import Engine
from kvdock.engine.trained import File, Words, smollm2

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in MODEL_PACKAGES),
    reason="the demo's model is not installed: make setup downloads it",
)

TEXT = "The KV cache holds 1,024 tokens.\n\nQuestion: What is the capital of France?\nAnswer: The capital of"
IDS = [
    504, 659, 70, 13842, 6650, 216, 33, 28, 32, 34, 36, 17837, 30, 198, 198, 17872, 42, 1812, 314, 260, 3575, 282, 4649,
    47, 198, 21350, 42, 378, 3575, 282,
]
TOP = {
    4649: 16.3071, 260: 12.2957, 4004: 10.7969, 7476: 10.3292, 4521: 10.2738, 23513: 10.0162, 3432: 9.9063, 7158: 9.8966
}
MEAN, DEVIATION = -4.55422, 3.20515
ANSWER = [4649, 314, 7042, 30, 198, 198, 504, 2988, 314, 42, 7042, 2]


@pytest.fixture(scope="module")
def file() -> File:
    return smollm2()


def test_text_is_split_and_joined(file: File) -> None:
    words: Words = file.tokenizer
    assert words.encode(TEXT) == IDS and words.decode(IDS) == TEXT
    assert words.encode("<|im_end|>") == [words.EOS] and words.decode([words.EOS]) == ""


def test_logits_and_tokens_are_those_of_transformers(file: File) -> None:
    engine = Engine(dataclasses.replace(file.engine(), num_blocks=16), tokenizer=file.tokenizer)
    found, = engine.generate([TEXT], dataclasses.replace(sampling(20), ignore_eos=False))
    logits = found.logits[0]
    torch.testing.assert_close(logits[list(TOP)], torch.tensor(list(TOP.values())), rtol=0, atol=2e-3)
    assert set(logits.topk(len(TOP)).indices.tolist()) == set(TOP)
    torch.testing.assert_close(torch.stack([logits.mean(), logits.std()]), torch.tensor([MEAN, DEVIATION]), rtol=1e-4,
                               atol=0)
    assert found.output_tokens == ANSWER and found.finish_reason == "stop"
    assert found.text.startswith(" France is Paris.")


def test_the_file_names_its_weights_wherever_it_lies(file: File, tmp_path: Path) -> None:
    other = tmp_path / file.path.name
    other.symlink_to(file.path)
    assert File(other).model == file.model and File(other).model.revision == file.model.revision
    assert dataclasses.replace(file.model, file_digest="0" * 32).revision != file.model.revision
