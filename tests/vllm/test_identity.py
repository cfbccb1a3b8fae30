"""What names a model's KV, in the environment of whole vLLM engines and for the vLLMs of the Schedulers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from engines import ENGINE_PYTHON
from schedulers import Schedulers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_what_vllm_has_downloaded_is_found_without_asking_the_hub(tmp_path: Path) -> None:
    """In the environment of the engines: the real huggingface_hub over a cache of the form that it keeps."""
    commit, model = "a" * 40, tmp_path / "models--org--model"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    program = (
        "import json; from kvdock.connectors.weights import hub_snapshot as of;"
        f"print(json.dumps([str(of(*asked)) for asked in (('org/model', None, None), ('org/model', {commit!r}, None),"
        f" ('org/model', None, {str(tmp_path)!r}), ('org/other', None, None), ('s3://no/name/of/it', None, None))]))"
    )
    ran = subprocess.run(
        [ENGINE_PYTHON, "-c", program], check=True, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
    )
    assert json.loads(ran.stdout) == [str(snapshot)] * 3 + ["None", "None"]


UNKNOWN = {
    "0.24.0": {
        "model_class_overrides", "kernel_config.linear_backend_per_quant", "VLLM_B12X_MOE_FP4_FORCE_A16",
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
        "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    },
    "0.33.0": {
        "override_attention_dtype", "attention_config.use_fp4_indexer_cache", "VLLM_TEST_FORCE_FP8_MARLIN",
    },
}
"""Rows that a version has no setting for: the other version has one."""


@pytest.mark.parametrize("version", UNKNOWN)
def test_each_row_is_a_setting_of_some_vllm_and_says_nothing_where_nothing_is_set(
    version: str, schedulers: Schedulers
) -> None:
    tables = schedulers.run(version, "tables", module="identity_scenarios")
    assert set(tables["unknown"]) == UNKNOWN[version]
    assert not UNKNOWN["0.24.0"] & UNKNOWN["0.33.0"]
    spelled_out = "attention_config.indexer_kv_dtype"  # in 0.24 the usual one has a name
    assert [row for row in tables["said"] if row != spelled_out] == ["architecture", "dtype"]
    assert "longrope" in tables["named"], "the control: kinds are found"
    assert tables["kinds"] == []
    assert tables["readers"] == ["phi3_long_rope_scaled_rope"]
