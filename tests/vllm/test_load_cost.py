"""load_if_cheaper in vLLM's real Schedulers: a hit is computed where its load takes longer."""

from __future__ import annotations

from typing import Any

import pytest
from api_helpers import ServerProcess
from schedulers import Schedulers, every_mode, every_version

pytestmark = pytest.mark.vllm
ALL = 512


def run(schedulers: Schedulers, version: str, server: ServerProcess, **how: Any) -> dict[str, Any]:
    found: dict[str, Any] = schedulers.run(version, "chosen", server.unix, module="cost_scenarios", **how)
    assert found["wrong"] == 0 and found["leased"] == 0 and found["first"] == [ALL] * 3, "nothing was known yet"
    return found


@every_version
@every_mode
def test_what_takes_longer_to_load_is_computed(
    version: str, load_async: bool, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = run(schedulers, version, server, load_s=0.1, step_s=0.005, load_if_cheaper=True, load_async=load_async)
    assert found["last"] == [0] * 2 and found["declined"] == ["dear"] * 2


@every_version
def test_what_takes_longer_to_compute_is_loaded(version: str, server: ServerProcess, schedulers: Schedulers) -> None:
    found = run(schedulers, version, server, load_s=0.0, step_s=0.05, load_if_cheaper=True)
    assert found["last"] == [ALL] * 2 and not found["declined"]


@every_version
def test_all_is_loaded_where_it_is_so_wanted(version: str, server: ServerProcess, schedulers: Schedulers) -> None:
    found = run(schedulers, version, server, load_s=0.1, step_s=0.005, load_if_cheaper=False)
    assert found["last"] == [ALL] * 2 and not found["declined"]


@every_version
def test_now_and_then_a_load_is_made_to_see_what_it_takes(
    version: str, server: ServerProcess, schedulers: Schedulers
) -> None:
    found = run(schedulers, version, server, load_s=0.1, step_s=0.005, probe_s=0.0, load_if_cheaper=True)
    assert found["last"] == [ALL] * 2
