"""A whole vLLM engine on the CPU with prompts that come from a lower tier: the bits are those of a local hit."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs here
import pytest
from api_helpers import MIB, ServerProcess, eventually
from engines import HITS, PROMPTS, Engine

from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        pool_bytes=64 * MIB, segment_bytes=64 * MIB, disk_path=str(tmp_path / "disk"), disk_bytes=256 * MIB,
        tier_asks=1, heartbeat_s=0.2,
    ) as process:
        yield process


def clear_once_written(server: ServerProcess, engine: Engine) -> None:
    """Leaves what was stored in the tier alone, and empties the engine's own prefix cache."""
    with Client(server.unix) as client:

        def is_written() -> bool:
            status = client.status()
            moved = [tier.counters.get(name, 0) for tier in status.tiers for name in ("stored_bytes", "loaded_bytes")]
            return sum(moved) >= status.counters["stored_bytes"] > 0

        eventually(is_written, 60.0)
        client.clear(ClearCache())
    assert engine.do("reset")["reset"]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_a_tier_brings_has_the_bits_of_local_hits(
    kind: str, models: dict[str, Path], server: ServerProcess
) -> None:
    with Engine(
        models[kind], server.unix, extra={"tier_wait_s": 5.0, "load_if_cheaper": False},
        engine={"disable_log_stats": False},
    ) as engine:
        assert engine.generate(PROMPTS)[1] == [0, 0, 0]
        engine.do("drain")
        local, at_hand = engine.generate(PROMPTS)
        assert at_hand == HITS
        clear_once_written(server, engine)
        assert engine.generate(PROMPTS) == (local, HITS)

        # With the tier frozen, requests are computed once their time is over.
        clear_once_written(server, engine)
        (mover,) = [
            child for child in psutil.Process(server.process.pid).children() if "kvdock.tiers.mover" in child.cmdline()
        ]
        mover.send_signal(signal.SIGSTOP)
        try:
            computed, at_hand = engine.generate(PROMPTS[:1])
            assert at_hand == [0] and computed
        finally:
            mover.send_signal(signal.SIGCONT)
        exported = engine.do("metrics")["text"]
        waits = dict(re.findall(r"^vllm:kvdock_tier_(waits?_\w+)\{.*\} (\S+)$", exported, re.MULTILINE))
        ends = ("waits_fulfilled_total", "waits_shortened_total", "waits_expired_total", "wait_seconds_count")
        assert [float(waits[name]) for name in ends] == [3, 0, 1, 4]
        assert float(waits["wait_seconds_sum"]) > 5.0
        assert engine.close() == 0, engine.log_text()
