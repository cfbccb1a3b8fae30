"""The conformance kit of connectors/, run against the linker over SGLang's own pools: attention, latent, windows. And
what SGLang's own linkers promise, as far as it can be read from them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE, ROOT

from kvdock.connectors.conformance import CHECKS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def test_the_linker_conforms_over_pools_of_each_kind(models: dict[str, Path], server: ServerProcess) -> None:
    done = subprocess.run(
        [ENGINE_PYTHON, HERE / "contract.py", models["llama"], server.unix], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{HERE}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {(kind, name): why for kind, checks in found.items() for name, why in checks.items() if why}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    assert list(found) == ["mha", "mla", "window", "linker"] and len(found.pop("linker")) == 7
    assert all(set(checks) == {check.__name__ for check in CHECKS} for checks in found.values())
