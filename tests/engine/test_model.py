"""The model and its paged attention against a plain reference, in every format, and with a wrong block."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
import torch
from engine_helpers import TINY, assert_same_bits, config, make_engine, prompt, run, run_one, sampling
from torch import Tensor

from kvdock.datapath.layout import FORMATS, paged_layout
from kvdock.engine import tokenizer
from kvdock.engine.config import ConfigError, EngineConfig, SlidingWindow, preset
from kvdock.engine.kv_cache import KVCache, Tensors
from kvdock.engine.model import Model

MODELS = ["tiny", "tiny-mha", "tiny-mla", "tiny-hybrid2", "tiny-hybrid3"]


def plain_attend(q: Tensor, k: Tensor, v: Tensor, reach: int | None) -> Tensor:
    """Attention of a whole sequence by the formula, without pages: q (n, heads, head) → (n, heads, value)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (back < 0) | (back >= (len(q) if reach is None else reach))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def plain_greedy(model: Model, tokens: list[int], count: int) -> tuple[list[int], list[Tensor]]:
    groups, latent = model.config.groups, model.config.latent_size

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        return plain_attend(q, k, k[..., :latent] if v is None else v, groups[layer % len(groups)].reach)

    tokens, logits = list(tokens), []
    for _ in range(count):
        logits.append(model.forward(torch.tensor(tokens), 0, attend))
        tokens.append(int(logits[-1].argmax()))
    return tokens[-count:], logits


@pytest.mark.sweep("length")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 300])
def test_paged_equals_plain_attention(length: int, name: str) -> None:
    settings = preset(name)
    found = run_one(make_engine(settings), prompt(length, length), sampling(8))
    tokens, logits = plain_greedy(Model(settings.model), prompt(length, length), 8)
    assert found.output_tokens == tokens
    for one, other in zip(found.logits, logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def fitting(name: str) -> EngineConfig:
    """The tiny preset whose model fits the format."""
    return preset("tiny-mla" if FORMATS[name].is_latent else "tiny")


def in_format(name: str, **changes: Any) -> EngineConfig:
    return dataclasses.replace(fitting(name), kv_format=name, **changes)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_gives_the_same_bits(name: str) -> None:
    found = run_one(make_engine(in_format(name), shuffle_seed=9), prompt(1, 200))
    assert_same_bits(found, run_one(make_engine(fitting(name)), prompt(1, 200)))


def leaves(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [leaf for item in tensors for leaf in leaves(item)]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_views_cover_every_byte_of_a_format_once(name: str) -> None:
    kv = KVCache(in_format(name, num_blocks=5))
    model = kv.config.model
    for value, paged in enumerate(kv.planes, start=1):
        assert paged.shape == (5, 16, model.kv_heads, model.head_size)
        assert not paged.any(), "written through another view"
        paged.fill_(value)
    assert all(tensor.all() for tensor in leaves(kv.tensors))
    assert kv.block_bytes * 5 == sum(tensor.nbytes for tensor in leaves(kv.tensors))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_data_path_sees_the_planes_that_attention_sees(name: str) -> None:
    """The base address and block stride of each plane, by layer, K before V, are those of the engine's views."""
    kv = KVCache(in_format(name, num_blocks=5))
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    sides = kv.planes if FORMATS[name].is_latent else [s for pair in zip(kv.k, kv.v, strict=True) for s in pair]
    assert [plane[:2] for plane in layout.planes] == [(s.data_ptr(), s.stride(0) * s.element_size()) for s in sides]
    assert (layout.block_bytes, layout.num_blocks) == (kv.block_bytes, 5)


def test_any_single_wrong_block_changes_the_logits() -> None:
    """Negative control of all tests that compare outputs: a block from elsewhere in the same prompt is noticed."""
    length, random, unnoticed = 1500, Random(5), 0
    tokens = prompt(2, length)
    wanted = run_one(make_engine(), tokens, sampling(16))
    for trial in range(16):
        engine = make_engine()
        request_id = engine.add_request(tokens, sampling(16))
        request = engine.requests[request_id]
        while request.computed < length // 64 * 64:
            engine.step()
        wrong, donor = random.sample(range(request.computed // 16), 2)
        [table] = request.table
        for paged in engine.kv.planes:
            paged[table[wrong]] = paged[table[donor]]
        found = run(engine)[request_id]
        change = (found.logits[0] - wanted.logits[0]).abs().max()
        assert change > 1e-2, f"trial {trial}: block {wrong} of {length // 16} moved the first logits by {change}"
        unnoticed += found.output_tokens == wanted.output_tokens
    assert unnoticed <= 4, f"{unnoticed} of 16 wrong blocks went unnoticed in 16 greedy tokens"


def test_weights_depend_on_the_config_alone() -> None:
    other = dataclasses.replace(TINY.model, seed=1)
    assert torch.equal(Model(TINY.model).head, Model(TINY.model).head)
    assert not torch.equal(Model(TINY.model).head, Model(other).head)
    assert TINY.model.revision == dataclasses.replace(TINY.model).revision != other.revision


def test_bfloat16_kv_is_half_as_large_and_runs() -> None:
    model = dataclasses.replace(TINY.model, dtype="bfloat16")
    engine = make_engine(config(model=model))
    assert engine.kv.block_bytes == 16 * model.kv_bytes_per_token == 16 * TINY.model.kv_bytes_per_token // 2
    assert engine.kv.k[0].dtype == torch.bfloat16
    assert not any(logits.isnan().any() for logits in run_one(engine, prompt(3, 100)).logits)


@pytest.mark.parametrize("text", ["", "plain", "naïve ☃ 漢字"])
def test_text_survives_the_tokenizer(text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[0] == tokenizer.BOS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "NL_X_NB_BS_HS"}, "kv_format: found 'NL_X_NB_BS_HS', wanted one of"),
        ({"model": preset("tiny-mla").model}, "kv_format: found 'NL_X_TWO_NB_BS_NH_HS', wanted one of"),
        ({"num_blocks": 0}, "num_blocks: found 0, wanted at least 1"),
        ({"max_step_tokens": 64}, "max_step_tokens: found 64, wanted at least 80"),
        ({"max_local_hit_tokens": -1}, "max_local_hit_tokens: found -1"),
    ],
)
def test_a_bad_setting_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_bad_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="heads: found 3, wanted a multiple of kv_heads=2"):
        dataclasses.replace(TINY.model, heads=3)
    with pytest.raises(ConfigError, match=r"preset: found 'huge', wanted one of \['small', 'tiny', 'tiny-hybrid2', .*"):
        preset("huge")
    with pytest.raises(ConfigError, match="layers: found 2, wanted a multiple of the groups"):
        dataclasses.replace(TINY.model, groups=preset("tiny-hybrid3").model.groups)
    with pytest.raises(ConfigError, match="groups: found"):
        dataclasses.replace(TINY.model, groups=(SlidingWindow(0),))
    assert isinstance(preset("small"), EngineConfig)
