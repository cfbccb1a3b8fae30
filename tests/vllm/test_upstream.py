"""vLLM's own tests of connectors, with kvdock as the connector at a real server.

They are those of vLLM's source archive in the version of the CPU engine (upstream_sources.py), run as they are against
kvdock as its own source archive installs it; upstream_plugin.py says what is put in place of some of their functions.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import pytest
from api_helpers import ServerProcess
from engines import ENGINE_PYTHON, HERE
from upstream_sources import UNIT
from whole_engines import python_path

from kvdock.client.client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

UPSTREAM = ENGINE_PYTHON.parent.parent / "upstream"
INSTALLED_PYTHON = ENGINE_PYTHON.parent.parent / "installed" / "bin" / "python"
"""It has kvdock as its source archive installs it."""
PASSED = {
    "test_cache_pollution_prevention": {"test_invalid_blocks_evicted_prevents_cache_pollution": 1},
    "test_error_propagation": {"test_error_propagation_sync_load": 1, "test_error_propagation_async_load": 1},
    "test_invalid_blocks_correctness": {
        "test_sync_recompute_blocks_not_freed_for_running_requests": 1,
        "test_sync_fail_invalid_blocks_evicted": 1,
        "test_async_recompute_blocks_not_cached_when_invalid": 1,
    },
    "test_kv_load_failure_recovery": {
        "test_failed_receive_completion_honors_failure_policy": 2,
        "test_async_load_failure": 3,
        "test_sync_load_failure": 3,
        "test_sync_load_failure_with_shared_blocks": 3,
        "test_async_progressive_load_failure": 2,
        "test_block_level_load_failure_fails_closed_with_multiple_groups": 1,
    },
    "test_remote_prefill_lifecycle": {
        "test_basic_lifecycle": 1,
        "test_interleaved_lifecycle": 1,
        "test_no_spurious_prefix_caching": 1,
        "test_full_block_prompt": 1,
        "test_cannot_schedule_after_recv": 1,
        "test_cannot_recv": 1,
        "test_kv_fetch_stages_cleared_on_abort": 1,
        "test_async_load_reserves_blocks_for_inflight": 1,
        "test_async_loads_both_admitted_when_pool_fits": 1,
        "test_async_load_reserves_blocks_for_promotion_margin": 3,
        "test_async_load_does_not_double_reserve_mamba_spec_blocks": 2,
        "test_deferred_lookup_does_not_block_parked_load": 1,
    },
}
"""By file, how often each of its tests runs."""

SKIPPED = {"test_p_side_chunked_prefill_mamba": "NIXL alone cuts the last token off a prompt, for who takes its state"}

OTHERS = "is about another connector, most by its insides"
PARTS = "is about a part of vLLM that asks no connector, or one that the test makes"
LEFT_OUT = {
    **dict.fromkeys(("test_nixl_*", "test_bidirectional_kv_transfer", "test_mooncake_*", "test_moriio_*"), OTHERS),
    **dict.fromkeys(("test_offloading_connector", "test_simple_cpu_offload_*", "test_hisparse_*"), OTHERS),
    **dict.fromkeys(("test_lmcache_*", "test_flexkv_connector", "test_hf3fs_*"), OTHERS),
    **dict.fromkeys(("test_example_connector", "test_hidden_states_connector", "test_decode_bench_connector"), OTHERS),
    **dict.fromkeys(("test_config", "test_hma_auto_config", "test_handshake_pp_aggregation"), PARTS),
    **dict.fromkeys(("test_output_aggregator", "test_tp_mapping", "test_transfer_topology_sharded"), PARTS),
    **dict.fromkeys(("test_kv_connector_lifecycle", "test_scheduler_kv_connector_override"), PARTS),
    "test_multi_connector": "has MultiConnector hold connectors that the test makes; ours has test_beside.py",
    "test_remote_decode_lifecycle": "wants blocks held for another engine that fetches them; kvdock holds none",
}
"""Why the other files of the folder do not apply."""

SETTINGS = {
    "KVDOCK_VLLM_CHUNK_TOKENS": "16",  # a block: what is asked for and stored is as much as can be
    "KVDOCK_VLLM_RECOMPUTE_FAILED_LOADS": "false",  # the tests choose the policy
    "KVDOCK_VLLM_LOAD_IF_CHEAPER": "false",  # nothing is computed
    "KVDOCK_VLLM_TIMEOUT_S": "20", "KVDOCK_VLLM_LOOKUP_WAIT_S": "1",  # a busy machine is no lost server
}


def test_every_file_of_vllms_tests_runs_or_is_left_out_for_a_reason() -> None:
    files = {path.stem for path in (UPSTREAM / UNIT).glob("test_*.py")}
    assert files, "no tests of vLLM: make test-vllm"
    left_out = {pattern: set(fnmatch.filter(files, pattern)) for pattern in LEFT_OUT}
    assert all(left_out.values())
    assert sorted([*PASSED, *chain(*left_out.values())]) == sorted(files), "each of them once"


def test_they_run_against_what_the_source_archive_installs() -> None:
    asks = "import kvdock.connectors.vllm.plugin as plugin, kvdock._core as core; print(plugin.__file__, core.__file__)"
    said = subprocess.run([INSTALLED_PYTHON, "-c", asks], cwd="/", capture_output=True, text=True, check=True).stdout
    files = [Path(one) for one in said.splitlines()[-1].split()]
    assert len(files) == 2 and all(file.is_relative_to(INSTALLED_PYTHON.parent.parent) for file in files), files


def test_vllms_own_tests_pass_with_kvdock_as_the_connector(server: ServerProcess, tmp_path: Path) -> None:
    assert UPSTREAM.is_dir() and INSTALLED_PYTHON.exists(), "not all that is needed is here: make test-vllm"
    report = tmp_path / "report.xml"
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    ran = subprocess.run(
        [INSTALLED_PYTHON, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "--tb=short",
         f"--junitxml={report}", *(f"{UNIT}/{file}.py" for file in PASSED)],
        cwd=UPSTREAM, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380,
        env={**ours, **SETTINGS, "KVDOCK_ADDRESS": server.unix, "PYTHONPATH": python_path(UPSTREAM, HERE)},
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
    with Client(server.unix) as client:
        assert client.status().counters["stored_chunks"] > 0, "else nothing wrong could have been stored"

    passed, skipped = defaultdict[str, Counter[str]](Counter), dict[str, str | None]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        why = case.find("skipped")
        if why is None:
            passed[case.attrib["classname"].rpartition(".")[2]][name] += 1
        else:
            skipped[name] = why.get("message")
    assert passed == PASSED
    assert skipped == SKIPPED
