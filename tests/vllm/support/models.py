"""Tiny models with random weights: large weights, so that wrong KV shows in every logit.

    python models.py KIND FOLDER [KIND FOLDER …]

With a tokenizer that makes a token of each byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA_LAYERS = {"llama": 3, "deep": 4, "eagle": 1, "eagle3": 1}


def write(kind: str, folder: Path) -> None:
    """`kind`: llama (one group), gemma (full attention beside windows, three groups), gemma4 (the same with blocks of
    two sizes), mla (latent), deep (a llama of four layers), mimo (drafts for itself, mtp), eagle and eagle3 (drafts for
    llama), phi3 (other rotary factors for a max_model_len above 1024)."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    common = {
        "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": 2048, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if kind in LLAMA_LAYERS:
        config = t.LlamaConfig(
            num_hidden_layers=LLAMA_LAYERS[kind], num_key_value_heads=2, head_dim=32, **common
        )
    elif kind == "mimo":
        config = t.Qwen2Config(num_hidden_layers=3, num_key_value_heads=2, num_nextn_predict_layers=1, **common)
    elif kind == "phi3":
        scaling = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
        config = t.Phi3Config(
            num_hidden_layers=2, num_key_value_heads=2, original_max_position_embeddings=1024, rope_scaling=scaling,
            pad_token_id=0, **common,
        )
    elif kind == "gemma":
        config = t.Gemma3TextConfig(
            num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=64, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, **common,
        )
    elif kind == "gemma4":
        config = t.Gemma4TextConfig(
            num_hidden_layers=6, num_key_value_heads=2, head_dim=32, global_head_dim=64, num_global_key_value_heads=2,
            sliding_window=64, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=600, num_kv_shared_layers=0,
            enable_moe_block=False, use_double_wide_mlp=False, **common,
        )
    else:
        config = t.DeepseekV2Config(
            num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=2,
            moe_intermediate_size=64, **common,
        )
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind in ("eagle", "eagle3"):
        write_drafter(kind, config, model.state_dict(), folder)
        return
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if kind == "mimo":
        add_mtp(model.state_dict(), folder)


def write_drafter(kind: str, config: Any, weights: Mapping[str, Any], folder: Path) -> None:
    """A layer of a llama's, which sees the hidden states of llama's last layer (eagle) or of all three (eagle3)."""
    import torch
    from safetensors.torch import save_file

    kept = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if kind == "eagle":
        for name in ("norm", "lm_head", "layers.0.input_layernorm"):
            del kept[f"{name}.weight"]
        kept["fc.weight"] = torch.randn(128, 2 * 128) * 0.25
    else:  # its attention reads the tokens' embeddings beside the hidden states
        for name in (f"layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"):
            kept[name] = torch.randn(len(kept[name]), 2 * 128) * 0.25
        kept["layers.0.hidden_norm.weight"] = torch.ones(128)
        kept["fc.weight"] = torch.randn(128, 3 * 128) * 0.25
    save_file(kept, folder / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def add_mtp(weights: Mapping[str, Any], folder: Path) -> None:
    """To a Qwen2 in `folder`, the layer that makes it a MiMo."""
    import torch
    from safetensors.torch import save_file

    first, layer = "model.layers.0.", "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    save_file({
        **{
            layer + name.removeprefix(first): torch.randn_like(weight) * 0.25 if weight.ndim > 1 else weight.clone()
            for name, weight in weights.items() if name.startswith(first)
        },
        **{f"{layer}{name}.weight": torch.ones(128) for name in norms},
        f"{layer}input_proj.weight": torch.randn(128, 2 * 128) * 0.25,
    }, folder / "mtp.safetensors")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MiMoForCausalLM"]}))


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, behind the three that models here know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    for kind, to in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        write(kind, Path(to))
