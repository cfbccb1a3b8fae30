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

from tiny_models import write_adapter, write_tokenizer

IMAGE = 259
"""The token behind the bytes' and the three before them."""
SIDE, IMAGE_TOKENS = 56, 16
"""Pixels along the side of an image, and the tokens that it becomes."""
LLAMA_LAYERS = {"llama": 3, "llama-b": 3, "llama-c": 3, "deep": 4, "eagle": 1, "eagle3": 1}


def write(kind: str, folder: Path) -> None:
    """`kind`: llama (one group; "-b" and "-c" have other embeddings, which is enough for other KV of every token),
    gemma (full attention beside windows, three groups), gemma4 (the same with blocks of two sizes), mla (latent), deep
    (a llama of four layers), mimo (drafts for itself, mtp), eagle and eagle3 (drafts for llama), phi3 (other rotary
    factors for a max_model_len above 1024), qwen3, gptoss (sinks, experts and windows, two groups), blip2 (begins with
    an image), lfm2 (a recurrent state beside attention), lora (no model: three adapters of llama, of which "copy" has
    the files of "one")."""
    import torch
    import transformers as t

    torch.manual_seed(0)
    if kind == "lora":
        write_adapters(folder)
        return
    config = config_of(kind)
    if kind == "blip2":
        model = t.Blip2ForConditionalGeneration._from_config(config, dtype=torch.float32)
    else:
        model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind in ("eagle", "eagle3"):
        write_drafter(kind, config, model.state_dict(), folder)
        return
    if kind.startswith("llama-"):
        torch.manual_seed(ord(kind[-1]))
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=config.initializer_range)
    model.save_pretrained(folder)
    (write_processor if kind == "blip2" else write_tokenizer)(folder)
    if kind == "mimo":
        add_mtp(model.state_dict(), folder)


def config_of(kind: str) -> Any:
    """A model's configuration. odd_config has the kinds that are more than full attention over tokens."""
    import transformers as t

    common = {
        "vocab_size": 600, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "max_position_embeddings": 2048, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if kind in LLAMA_LAYERS:
        return t.LlamaConfig(
            num_hidden_layers=LLAMA_LAYERS[kind], num_key_value_heads=2, head_dim=32, **common
        )
    if kind == "mimo":
        return t.Qwen2Config(num_hidden_layers=3, num_key_value_heads=2, num_nextn_predict_layers=1, **common)
    if kind == "phi3":
        scaling = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
        return t.Phi3Config(
            num_hidden_layers=2, num_key_value_heads=2, original_max_position_embeddings=1024, rope_scaling=scaling,
            pad_token_id=0, **common,
        )
    if kind == "qwen3":
        return t.Qwen3Config(num_hidden_layers=2, num_key_value_heads=2, head_dim=32, **common)
    return odd_config(kind, common)


def odd_config(kind: str, common: Mapping[str, Any]) -> Any:
    """`common`: what these models have in common with the others."""
    import transformers as t

    if kind == "gptoss":
        return t.GptOssConfig(
            num_hidden_layers=2, num_key_value_heads=2, head_dim=32, sliding_window=96, num_local_experts=4,
            num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"], **common,
        )
    if kind == "gemma":
        return t.Gemma3TextConfig(
            num_hidden_layers=6, num_key_value_heads=2, head_dim=32, sliding_window=64, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, **common,
        )
    if kind == "gemma4":
        return t.Gemma4TextConfig(
            num_hidden_layers=6, num_key_value_heads=2, head_dim=32, global_head_dim=64, num_global_key_value_heads=2,
            sliding_window=64, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=600, num_kv_shared_layers=0,
            enable_moe_block=False, use_double_wide_mlp=False, **common,
        )
    if kind == "blip2":
        narrow = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        return t.Blip2Config(
            text_config=t.OPTConfig(
                num_hidden_layers=2, ffn_dim=256, word_embed_proj_dim=128, pad_token_id=0, **common
            ),
            vision_config=t.Blip2VisionConfig(image_size=SIDE, patch_size=14, initializer_range=0.25, **narrow),
            qformer_config=t.Blip2QFormerConfig(encoder_hidden_size=64, initializer_range=0.25, **narrow),
            num_query_tokens=IMAGE_TOKENS, image_token_index=IMAGE, image_text_hidden_size=64,
        )
    if kind == "lfm2":
        return t.Lfm2Config(
            num_hidden_layers=2, num_key_value_heads=2, layer_types=["conv", "full_attention"], conv_dim=128,
            block_dim=128, block_ff_dim=256, block_multiple_of=32, block_auto_adjust_ff_dim=False,
            block_ffn_dim_multiplier=1.0, **common,
        )
    return t.DeepseekV2Config(
        num_hidden_layers=2, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=2,
        moe_intermediate_size=64, **common,
    )


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


def write_processor(folder: Path) -> None:
    """A tokenizer that knows `IMAGE`, and what makes a blip2's pixels."""
    import transformers as t

    write_tokenizer(folder)
    words = t.AutoTokenizer.from_pretrained(folder)
    t.Blip2Processor(
        t.BlipImageProcessor(size={"height": SIDE, "width": SIDE}), words, num_query_tokens=IMAGE_TOKENS
    ).save_pretrained(folder)
    assert words.convert_tokens_to_ids("<image>") == IMAGE


def write_adapters(folder: Path) -> None:
    """Each in a folder of its own inside `folder`, for the llama of three layers."""
    for name, seed in (("one", 0), ("copy", 0), ("other", 1)):
        write_adapter(
            folder / name, seed=seed, width=128, rows={"k_proj": 64, "v_proj": 64}, scale=0.25, rank=8,
            layers=LLAMA_LAYERS["llama"],
        )


if __name__ == "__main__":
    for kind, to in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        write(kind, Path(to))
