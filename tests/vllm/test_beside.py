"""Other connectors beside kvdock's, under vLLM's MultiConnector."""

from __future__ import annotations

import pytest
from api_helpers import ServerProcess
from schedulers import Schedulers, every_mode, every_version

pytestmark = pytest.mark.vllm


@every_version
@every_mode
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_what_was_computed_from_a_load_of_another_connector_that_failed_is_not_stored(
    version: str, load_async: bool, policy: str, overlap: bool, server: ServerProcess, schedulers: Schedulers
) -> None:
    for runner in (1, 2):
        found = schedulers.run(
            version, "sibling_fails", server.unix, policy, load_async, overlap, runner, module="beside_scenarios"
        )
        assert found["wrong"] == 0 and found["held"] == 0
        assert found["loaded"] == 256 if policy == "recompute" else 128  # what was computed again is there


@pytest.mark.every_minor
@every_version
def test_beside_another_connector_stores_are_read_before_their_blocks_are_written(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "blocks_go_at_once", server.unix, module="beside_scenarios")
    assert found == {"loaded": 192, "wrong": 0}


@pytest.mark.every_minor
@every_version
@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
def test_a_connector_with_a_handshake_of_its_own_may_stand_before_it_or_behind(
    version: str, comes_first: bool, overlap: bool, server: ServerProcess, schedulers: Schedulers
) -> None:
    for runner in (1, 2):
        found = schedulers.run(
            version, "handshakes", server.unix, comes_first, overlap, runner, module="beside_scenarios"
        )
        assert found["introduced"] and found["loaded"] == 128
        assert not found["bad_reads"] and not found["wrong_tokens"] and not found["held"]


@pytest.mark.every_minor
@every_version
def test_alone_it_has_what_it_could_not_load_computed(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "policies", server.unix, False, "fail", module="beside_scenarios")
    assert found == {"recomputes": True, "warned": []}
    kept = schedulers.run(
        version, "policies", server.unix, False, "fail", module="beside_scenarios", recompute_failed_loads=False
    )
    assert not kept["recomputes"] and len(kept["warned"]) == 1


@every_version
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_beside_others_it_warns_by_the_policy_that_counts(
    version: str, policy: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    """Its own entry among the connectors says "fail", which counts for nothing."""
    found = schedulers.run(version, "policies", server.unix, True, policy, module="beside_scenarios")
    assert found["recomputes"] == (policy == "recompute")
    assert [line.split(",")[0] for line in found["warned"]] == (
        [] if policy == "recompute" else ['kv_load_failure_policy is "fail"']
    )


@pytest.mark.every_minor
@every_version
def test_vllm_knows_it_by_its_name_and_multiconnector_reads_its_statistics(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = schedulers.run(version, "by_name", server.unix, module="beside_scenarios")
    assert found == {"read": ["KvdockConnector"], "kinds": ["KvdockStats"]}
