"""Makes the tests' models, each in a folder of its own: `python models.py KIND FOLDER [KIND FOLDER …]`.

They are tiny ("wide…": as wide as kernels for GPUs want it) and their weights random, but for what keeps tokens from
being all alike: a wide spread of weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cpu_only import prepare

VOCABULARY = 600
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}
WIDE = COMMON | {"hidden_size": 512, "num_attention_heads": 8, "dtype": "bfloat16"}


def make(kind: str, folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed({"llama-b": 1, "llama-c": 2}.get(kind, 0))
    if kind.startswith("adapter"):
        write_adapter(folder, seed=ord(kind[-1]))
        return
    if kind in ("llama", "llama-b", "llama-c"):
        config = transformers.LlamaConfig(**COMMON)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "wide":
        config = transformers.LlamaConfig(**WIDE)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "window":
        layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
        config = transformers.MellumConfig(
            **{**COMMON, "num_hidden_layers": 4}, head_dim=16, sliding_window=128, layer_types=layers,
            mlp_layer_types=["dense"] * 4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        )
        model = transformers.MellumForCausalLM(config)
    elif kind in ("states", "wide-states"):
        layers = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
        common, width, state = (COMMON, 16, 16) if kind == "states" else (WIDE, 64, 128)
        config = transformers.Qwen3NextConfig(
            **{**common, "num_hidden_layers": 4}, head_dim=width, layer_types=layers, full_attention_interval=2,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=2 * width, shared_expert_intermediate_size=0,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=state, linear_value_head_dim=state,
        )
        model = transformers.Qwen3NextForCausalLM(config)
    elif kind in ("mla", "wide-mla"):
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
        common, rank, rope, width = (COMMON, 32, 16, 16) if kind == "mla" else (WIDE, 512, 64, 128)
        config = transformers.DeepseekV2Config(
            **common, rope_parameters=yarn, kv_lora_rank=rank, q_lora_rank=None, qk_rope_head_dim=rope,
            qk_nope_head_dim=width, v_head_dim=width, first_k_dense_replace=3, moe_layer_freq=1, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32,
        )
        model = transformers.DeepseekV2ForCausalLM(config)
    else:
        wanted = "llama, llama-b, llama-c, window, states, mla, wide, wide-states, wide-mla or adapter-…"
        raise ValueError(f"found {kind!r}, wanted {wanted}")
    model.to(config.dtype)
    # The states' model has experts that all tokens share, of no width; SGLang knows none.
    weights = {name: weight for name, weight in model.state_dict().items() if "shared_expert" not in name}
    model.save_pretrained(folder, state_dict=weights)
    write_tokenizer(folder)


def write_adapter(folder: str, seed: int, rank: int = 4) -> None:
    """A LoRA adapter of the llama's attention; other seeds give other ones."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        for name, width in (("q_proj", 64), ("v_proj", 32)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = 0.3 * torch.randn(rank, 64, generator=source)
            weights[f"{where}.lora_B.weight"] = 0.3 * torch.randn(width, rank, generator=source)
    save_file(weights, Path(folder) / "adapter_model.safetensors")
    (Path(folder) / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"], "bias": "none",
        "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
    }))


def write_tokenizer(folder: str) -> None:
    """A token for each byte, behind the three that models here know."""
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *letters])}
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    prepare()
    words = sys.argv[1:]
    for kind, folder in zip(words[::2], words[1::2], strict=True):
        make(kind, folder)
