"""Tiny models with random weights, written to a folder: large weights, so that wrong KV shows in every logit."""

from __future__ import annotations

from pathlib import Path


def write(kind: str, folder: Path) -> None:
    """`kind`: llama (one group), gemma (full attention beside windows, three groups), mla (latent)."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    common = {
        "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": 2048, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        config = t.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, head_dim=32, **common)
    elif kind == "gemma":
        config = t.Gemma3TextConfig(
            num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=64, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, **common,
        )
    else:
        config = t.DeepseekV2Config(
            num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=2,
            moe_intermediate_size=64, **common,
        )
    t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
