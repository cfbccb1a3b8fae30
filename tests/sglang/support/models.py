"""Makes the tests' models, each in a folder of its own: `python models.py KIND FOLDER [KIND FOLDER …]`.

They are tiny ("wide…": as wide as kernels for GPUs want it) and their weights random, but for what keeps tokens from
being all alike: a wide spread of weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cpu_only import prepare
from tiny_models import write_adapter, write_tokenizer

VOCABULARY = 600
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
}
WIDE = COMMON | {"hidden_size": 512, "num_attention_heads": 8, "dtype": "bfloat16"}


def make(kind: str, folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed({"llama-b": 1, "llama-c": 2}.get(kind, 0))
    if kind.startswith("adapter"):
        rows = {"q_proj": 64, "v_proj": 32}
        write_adapter(Path(folder), seed=ord(kind[-1]), width=64, rows=rows, scale=0.3, rank=4)
        return
    if kind in ("media", "grids"):
        (make_media if kind == "media" else make_grids)(Path(folder))
        return
    if kind in ("llama", "llama-b", "llama-c", "four-heads"):
        config = transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 4 if kind == "four-heads" else 2})
        model = transformers.LlamaForCausalLM(config)
    elif kind == "wide":
        config = transformers.LlamaConfig(**WIDE)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "window":
        layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
        config = transformers.MellumConfig(
            **COMMON, head_dim=16, sliding_window=128, layer_types=layers,
            mlp_layer_types=["dense"] * 4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        )
        model = transformers.MellumForCausalLM(config)
    elif kind in ("states", "wide-states"):
        layers = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
        common, width, state = (COMMON, 16, 16) if kind == "states" else (WIDE, 64, 128)
        config = transformers.Qwen3NextConfig(
            **common, head_dim=width, layer_types=layers, full_attention_interval=2,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=2 * width, shared_expert_intermediate_size=0,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=state, linear_value_head_dim=state,
        )
        model = transformers.Qwen3NextForCausalLM(config)
    elif kind in ("mla", "wide-mla"):
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}
        common, rank, rope, width = (COMMON, 32, 16, 16) if kind == "mla" else (WIDE, 512, 64, 128)
        config = transformers.DeepseekV2Config(
            **common, rope_parameters=yarn, kv_lora_rank=rank, q_lora_rank=None, qk_rope_head_dim=rope,
            qk_nope_head_dim=width, v_head_dim=width, first_k_dense_replace=4, moe_layer_freq=1, n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32,
        )
        model = transformers.DeepseekV2ForCausalLM(config)
    else:
        wanted = "llama, llama-b, llama-c, media, grids, window, states, mla, wide, wide-states, wide-mla or adapter-…"
        raise ValueError(f"found {kind!r}, wanted {wanted}")
    model.to(config.dtype)
    # The states' model has experts that all tokens share, of no width; SGLang knows none.
    weights = {name: weight for name, weight in model.state_dict().items() if "shared_expert" not in name}
    model.save_pretrained(folder, state_dict=weights)
    write_tokenizer(Path(folder))


def make_media(folder: Path) -> None:
    """A model that reads images, with what makes numbers of them."""
    import transformers
    from safetensors.torch import save_file

    write_tokenizer(folder)
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=marks, pad_token="<unk>")
    images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    text = {name: value for name, value in COMMON.items() if name not in ("dtype", "tie_word_embeddings")}
    config = transformers.Gemma3Config(
        text_config={
            **text, "head_dim": 16, "sliding_window": 128, "query_pre_attn_scalar": 16, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4, initializer_range=0.3, dtype="float32",
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(folder)
    weights = transformers.Gemma3ForConditionalGeneration(config).float().state_dict()
    weights["model.multi_modal_projector.mm_input_projection_weight"].normal_()  # it begins as nothing
    # By the names of earlier releases, which SGLang knows; it has no use for the vision tower's head.
    named = {
        name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        .replace("language_model.", "language_model.model."): weight.contiguous()
        for name, weight in weights.items() if ".head." not in name and name != "lm_head.weight"
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


def make_grids(folder: Path) -> None:
    """A model that reads images, whose tokens have positions in rows and columns."""
    import transformers
    from safetensors.torch import save_file

    write_tokenizer(folder)
    marks = {name: f"<|{name.removesuffix('_token')}|>" for name in (
        "vision_start_token", "vision_end_token", "image_pad_token", "video_pad_token",
    )}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=marks, pad_token="<unk>")
    images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
    transformers.Qwen2VLProcessor(images, tokenizer, videos).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    text = {name: value for name, value in COMMON.items() if name not in ("dtype", "tie_word_embeddings")}
    config = transformers.Qwen2VLConfig(
        text_config={
            **text, "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "embed_dim": 32, "hidden_size": COMMON["hidden_size"], "depth": 1, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3,
        },
        image_token_id=ids["image_pad_token"], video_token_id=ids["video_pad_token"],
        vision_start_token_id=ids["vision_start_token"], vision_end_token_id=ids["vision_end_token"],
        initializer_range=0.3, dtype="float32", tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    config.save_pretrained(folder)
    weights = transformers.Qwen2VLForConditionalGeneration(config).float().state_dict()
    named = {  # as above
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): weight.contiguous()
        for name, weight in weights.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    prepare()
    words = sys.argv[1:]
    for kind, folder in zip(words[::2], words[1::2], strict=True):
        make(kind, folder)
