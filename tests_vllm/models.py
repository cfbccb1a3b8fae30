"""Tiny models with random weights: large weights, so that wrong KV shows in every logit.

    python models.py KIND FOLDER [KIND FOLDER …]

With a tokenizer that makes a token of each byte.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write(kind: str, folder: Path) -> None:
    """`kind`: llama (one group), gemma (full attention beside windows, three groups), gemma4 (the same with blocks of
    two sizes), mla (latent), eagle (drafts for llama)."""
    import torch
    import transformers as t
    from safetensors.torch import save_file

    torch.manual_seed(0)
    common = {
        "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": 2048, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if kind in ("llama", "eagle"):
        layers = 3 if kind == "llama" else 1
        config = t.LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, head_dim=32, **common)
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
    if kind != "eagle":
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return
    weights = {name.removeprefix("model."): weight for name, weight in model.state_dict().items()}
    kept = {name: weight for name, weight in weights.items() if name not in ("norm.weight", "lm_head.weight")}
    del kept["layers.0.input_layernorm.weight"]
    kept["fc.weight"] = torch.randn(128, 256) * 0.25
    save_file(kept, folder / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


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
