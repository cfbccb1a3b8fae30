"""`vllm serve MODEL $(kvdock vllm-args)`: vLLM's own parser reads what the shell makes of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ
from engines import ENGINE_PYTHON
from paths import ROOT

PARSE = Path(__file__).parent / "support" / "parse_args.py"


@pytest.mark.parametrize("version", ["0.24.0", "", "0.33.0"])
def test_vllm_reads_what_the_shell_splits(tmp_path: Path, version: str) -> None:
    """`version` "": that of the whole engines."""
    address = f"unix:{tmp_path}/a 'b' *?/kvdock.sock"
    line = f'exec "$PARSER" "$PARSE" --model m $({" ".join(KVDOCK)} vllm-args --server "$SERVER" chunk_tokens=256)'
    other = {"PYTHONPATH": str(ROOT / f".venv-vllm-{version}")} if version else {}
    environ = clean_environ(SERVER=address, PARSER=str(ENGINE_PYTHON), PARSE=str(PARSE), **other)
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=4 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "computes all prompts itself" in done.stderr, "no server is there"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "connector": "KvdockConnector", "role": "kv_both", "shutdown_timeout": 10,
        "extra": {"address": address, "chunk_tokens": 256},
    }
