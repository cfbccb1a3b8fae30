"""K (after RoPE) and V of real models over five kinds of text, as parts of 256 tokens: what bench/pack.py packs.

Computed once, and kept in a folder: minutes for each model. SmolLM2-135M is that of the demo, computed by the small
engine; Gemma 3 270M is computed by bench/gemma3.py, which downloads it. A part is in canonical order: layer by layer K
and V, each a plane with the elements of its tokens in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gemma3
from kvdock.engine import trained
from kvdock.engine.model import Model

ROOT = Path(__file__).parents[1]
CHUNK_TOKENS, MOST_TOKENS = 256, 1024
MOST_PERPLEXITY = 250.0
"""Wrong passes have thousands; those of texts that a small model does not know are below."""
Parts = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
"""(parts, planes, bytes)"""


def texts() -> dict[str, str]:
    calls = [
        {"role": "tool" if at % 2 else "user", "call_id": f"call_{at * 7919 % 99991}", "args": {"path": path.name,
         "lines": [at, 3 * at]}, "result": path.read_text()[:300]}
        for at, path in enumerate(sorted(ROOT.glob("kvdock/connectors/*.py")))
    ]
    return {
        "prose": (ROOT / "kvdock/cli/demo_document.txt").read_text(),
        "code": "".join(path.read_text() for path in sorted(ROOT.glob("kvdock/api/*/*.py"))[:4]),
        "tool calls": json.dumps(calls, indent=1),
        "manual": (ROOT / "docs/understand/vllm.md").read_text(),
        "licence": (ROOT / "LICENSE").read_text(),
    }


def smollm2(_folder: Path) -> Iterator[tuple[list[Tensor], float]]:
    file = trained.smollm2()
    model = Model(replace(file.model, dtype="bfloat16"))
    for text in texts().values():
        tokens, planes = file.tokenizer.encode(text)[:MOST_TOKENS], list[Tensor]()

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor | None, planes: list[Tensor] = planes
        ) -> Tensor:
            assert v is not None
            planes += [k, v]
            q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
            return read[0].transpose(0, 1)

        with torch.inference_mode():
            # The token that comes next, which the pass does not see.
            logits = model.forward(torch.tensor(tokens[:-1]), 0, attend)
        yield planes, float(torch.log_softmax(logits, -1)[tokens[-1]].neg().exp())


def gemma(folder: Path) -> Iterator[tuple[list[Tensor], float]]:
    model = gemma3.Gemma3(gemma3.fetch(folder))
    for text in texts().values():
        yield model.kv(model.encode(text)[:MOST_TOKENS])


MODELS: Final[dict[str, Callable[[Path], Iterator[tuple[list[Tensor], float]]]]] = {
    "smollm2": smollm2, "gemma3": gemma,
}


def parts_of(planes: list[Tensor]) -> Parts:
    """(parts, planes, bytes) of one text."""
    parts = len(planes[0]) // CHUNK_TOKENS
    rows = [
        plane[: parts * CHUNK_TOKENS].contiguous().view(torch.uint8).reshape(parts, 1, -1).numpy() for plane in planes
    ]
    return np.concatenate(rows, axis=1)


def real_kv(name: str, folder: Path) -> Parts:
    """The parts of all texts. Raises ValueError if the model does not know what it reads: then the pass is wrong."""
    kept = folder / f"{name}.npy"
    if not kept.exists():
        computed = list(MODELS[name](folder))
        middle = float(np.median([perplexity for _, perplexity in computed]))
        if middle > MOST_PERPLEXITY:
            raise ValueError(f"perplexity of {name}: found {middle:.0f}, wanted at most {MOST_PERPLEXITY:.0f}")
        folder.mkdir(parents=True, exist_ok=True)
        np.save(kept, np.concatenate([parts_of(planes) for planes, _ in computed]))
    loaded: Parts = np.load(kept, mmap_mode="r")
    return loaded
