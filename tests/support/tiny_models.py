"""What the tiny models of vLLM's and SGLang's tests have in common, written by each engine's own Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, behind the three that models here know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_adapter(
    folder: Path, *, seed: int, width: int, rows: Mapping[str, int], scale: float, rank: int, layers: int = 3
) -> None:
    """A LoRA adapter of a llama's attention; another seed gives another one. `rows`: by projection, how many rows it
    has."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, out in rows.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = scale * torch.randn(rank, width, generator=source)
            weights[f"{where}.lora_B.weight"] = scale * torch.randn(out, rank, generator=source)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(rows), "bias": "none",
        "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
    }))
