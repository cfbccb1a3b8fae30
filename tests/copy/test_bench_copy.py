"""`python -m bench.copy --device cuda` where no GPU is to be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT


def run_without_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """No GPU is visible to it, whatever the machine has."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=60, check=False,
    )


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_without_a_gpu_it_says_one_sentence_and_shows_no_figures(more: list[str]) -> None:
    why = run_without_gpu("-c", "from kvdock import _core; print(_core.cuda_unavailable())").stdout.strip()
    done = run_without_gpu("-m", "bench.copy", "--device", "cuda", *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert why and done.stderr == f"bench.copy: {why}\n"
