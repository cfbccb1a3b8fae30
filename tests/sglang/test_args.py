"""SGLang's own reading of settings: of what the shell makes of `sglang serve … $(kvdock sglang-args)`, and of those
beside which it refuses any linker."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ
from engines import ENGINE_PYTHON
from paths import ROOT

SUPPORT = Path(__file__).parent / "support"
LINKER = {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "mooncake"}
"""One of SGLang's own."""


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


@pytest.mark.parametrize(("settings", "variable", "refused", "logged"), [
    ({}, "1", "", ""),
    ({"enable_unified_memory": True} | LINKER, "", "direct L3 transfers do not preserve unified page-envelope", ""),
    ({"enable_unified_memory": True}, "1", "", "does not serve --enable-unified-memory under SGLang, because SGLang"),
], ids=["without it", "beside a linker", "beside the variable"])
def test_sglang_refuses_any_linker_beside_unified_pools(
    settings: dict[str, object], variable: str, refused: str, logged: str, models: dict[str, Path]
) -> None:
    """Once it does not, kvdock may serve them."""
    told = {"model_path": str(models["llama"]), "page_size": 64, **settings}
    environ = clean_environ(PYTHONPATH=str(SUPPORT / "on_cpu"), SGLANG_USE_CPU_ENGINE="1", SGLANG_KVDOCK=variable)
    done = subprocess.run(
        [ENGINE_PYTHON, SUPPORT / "resolve_args.py", json.dumps(told)], env=environ, capture_output=True, text=True,
        timeout=4 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert refused in found["refused"] and bool(refused) == bool(found["refused"])
    assert found["linker"] == (variable == "1" and not logged)
    assert logged in done.stderr
