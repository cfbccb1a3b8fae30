"""`sglang serve … $(kvdock sglang-args)`: SGLang's own parser reads what the shell makes of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ
from engines import ENGINE_PYTHON
from paths import ROOT

SUPPORT = Path(__file__).parent / "support"


def test_sglang_reads_what_the_shell_splits(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/a 'b' *?/kvdock.sock"
    line = (
        f'exec env PYTHONPATH="$ON_CPU" "$PARSER" "$PARSE" --model-path m '
        f'$({" ".join(KVDOCK)} sglang-args --server "$SERVER" --page-size 128 trust_s=3)'
    )
    environ = clean_environ(
        SERVER=address, PARSER=str(ENGINE_PYTHON), PARSE=str(SUPPORT / "parse_args.py"), ON_CPU=str(SUPPORT / "on_cpu")
    )
    done = subprocess.run(
        ["sh", "-c", line], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=4 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "page_size": 128, "linker": True, "backend": "dynamic",
        "config": {
            "linker": "KvdockLinker", "linker_module_path": "kvdock.connectors.sglang",
            "linker_extra_config": {"address": address, "trust_s": 3},
        },
    }
