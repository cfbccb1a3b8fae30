"""What vLLM declares unfit for the reuse of prefixes is not loaded, through its real Schedulers; what somebody has only
switched off is."""

from __future__ import annotations

import pytest
from api_helpers import ServerProcess
from schedulers import Run, every_version, run_where

pytestmark = pytest.mark.vllm
SCENARIOS = "unfit_scenarios"

ALL = 128
"""What a request of the scenarios' 150 tokens can load, in chunks of 32."""


run = run_where(lambda found: found.pop("wrong") == 0)


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize(("kind", "why"), [
    ("experts", "more of each block than tokens and KV"),
    ("mean", "its model does not support prefix caching .pooling MEAN"),
    ("rules", "turns its prefix cache off for LlamaForCausalLM"),
    ("rules that raise", "turns its prefix cache off for LlamaForCausalLM"),
])
def test_what_vllm_declares_unfit_is_stored_and_not_loaded(run: Run, kind: str, why: str) -> None:
    found = run("declared", kind)
    assert found["loaded"] == [0, 0, ALL], "others load what it has stored"
    (said,) = found["said"]
    assert why.replace(".", "(") in said, said


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize("kind", ["usual", "switched off", "switched off beside rules", "last"])
def test_what_somebody_has_only_switched_off_is_loaded(run: Run, kind: str) -> None:
    assert run("declared", kind) == {"loaded": [0, ALL, ALL], "said": []}


@every_version
def test_a_request_that_is_not_to_read_prefixes_stores_alone(run: Run) -> None:
    assert run("skipping") == {"loaded": [0, 0, ALL]}


@pytest.mark.every_minor
@every_version
def test_nothing_is_promised_while_a_worker_is_attached_to_another_server(run: Run) -> None:
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20) as other:
        found = run("elsewhere", other.unix)
        assert other.stop() == 0
    assert found["loaded"] == [0, ALL, 0, 0]
    (said,) = found["said"]
    assert said.startswith("nothing is loaded: the workers of ranks 0 are attached to another kvdock server")
