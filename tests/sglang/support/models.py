"""Makes the tests' models, each in a folder of its own: `python models.py KIND FOLDER [KIND FOLDER …]`.

They are tiny and their weights random, but for what keeps tokens from being all alike: a wide spread of weights.
"""

from __future__ import annotations

import sys

from cpu_only import prepare

VOCABULARY = 600
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}


def make(kind: str, folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**COMMON)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "mla":
        config = transformers.DeepseekV2Config(
            **{**COMMON, "num_key_value_heads": 4}, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
            qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
            first_k_dense_replace=3, n_shared_experts=1, moe_intermediate_size=32, moe_layer_freq=1,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048,
                "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            },
        )
        model = transformers.DeepseekV2ForCausalLM(config)
    elif kind == "window":
        layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
        config = transformers.MellumConfig(
            **{**COMMON, "num_hidden_layers": 4}, head_dim=16, sliding_window=128, layer_types=layers,
            mlp_layer_types=["dense"] * 4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        )
        model = transformers.MellumForCausalLM(config)
    else:
        raise ValueError(f"found {kind!r}, wanted llama, mla or window")
    model.float().save_pretrained(folder)
    write_tokenizer(folder)


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
