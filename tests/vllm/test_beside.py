"""Other connectors beside kvdock's, under vLLM's MultiConnector."""

from __future__ import annotations

import pytest
from schedulers import Run, every_mode, every_version

pytestmark = pytest.mark.vllm
SCENARIOS = "beside_scenarios"


@every_version
@every_mode
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_what_was_computed_from_a_load_of_another_connector_that_failed_is_not_stored(
    load_async: bool, policy: str, overlap: bool, run: Run
) -> None:
    for runner in (1, 2):
        found = run("sibling_fails", policy, load_async, overlap, runner)
        assert found["wrong"] == 0 and found["held"] == 0
        assert found["loaded"] == 256 if policy == "recompute" else 128  # what was computed again is there


@pytest.mark.every_minor
@every_version
def test_beside_another_connector_stores_are_read_before_their_blocks_are_written(run: Run) -> None:
    found = run("blocks_go_at_once")
    assert found == {"loaded": 192, "wrong": 0}


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_a_connector_with_a_handshake_of_its_own_may_stand_before_it_or_behind(
    comes_first: bool, overlap: bool, run: Run
) -> None:
    for runner in (1, 2):
        found = run("handshakes", comes_first, overlap, runner)
        assert found["introduced"] and found["loaded"] == 128
        assert not found["bad_reads"] and not found["wrong_tokens"] and not found["held"]


@pytest.mark.every_minor
@every_version
def test_alone_it_has_what_it_could_not_load_computed(run: Run) -> None:
    found = run("policies", False, "fail")
    assert found == {"recomputes": True, "warned": []}
    kept = run("policies", False, "fail", recompute_failed_loads=False)
    assert not kept["recomputes"] and len(kept["warned"]) == 1


@every_version
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_beside_others_it_warns_by_the_policy_that_counts(policy: str, run: Run) -> None:
    """Its own entry among the connectors says "fail", which counts for nothing."""
    found = run("policies", True, policy)
    assert found["recomputes"] == (policy == "recompute")
    assert [line.split(",")[0] for line in found["warned"]] == (
        [] if policy == "recompute" else ['kv_load_failure_policy is "fail"']
    )


@pytest.mark.every_minor
@every_version
def test_vllm_knows_it_by_its_name_and_multiconnector_reads_its_statistics(run: Run) -> None:
    found = run("by_name")
    assert found == {"read": ["KvdockConnector"], "kinds": ["KvdockStats"]}
