"""KV cache events: what a router believes is what can be loaded."""

from __future__ import annotations

import pytest
from api_helpers import ServerProcess
from schedulers import VERSIONS, Schedulers

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("windows", "sizes"), [([None], [16]), ([None, 48], [16, 16]), ([None, 48], [32, 16]), ([48, None], [32, 16])],
    ids=["1group", "2groups", "2sizes", "2sizes-other"],
)
def test_a_router_believes_what_can_be_loaded(
    version: str, windows: list[int | None], sizes: list[int], schedulers: Schedulers
) -> None:
    with ServerProcess(pool_bytes=64 << 20, segment_bytes=64 << 20, heartbeat_s=0.1) as server:
        found = schedulers.run(version, "believed", server.unix, windows, sizes, module="event_scenarios")
    assert found == {
        "stored": 128, "reset": 0, "again": 128, "loaded": 128, "there already": 128, "loaded_tokens": [128, 0],
        "groups": [windows.index(None)], "kinds": ["full_attention"], "wrong": [],
    }
