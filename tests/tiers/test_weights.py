"""Lower tiers beneath engines whose weights change: chunks of each are kept apart, and dead ones are not written."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from api_helpers import ServerProcess, eventually
from mover_steps import SteppedServer
from server_fixtures import server_of_few, tiered_engine
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import PART, SETTINGS, flood, is_written, written
from tier_stores import DiskStore, opened

from kvdock.protocol.schemas import ReportMismatch

pytestmark = [pytest.mark.weights, pytest.mark.tiers, pytest.mark.timeout(120)]

server = server_of_few
engine = tiered_engine


def runs(engine: TierEngine, weights: str) -> None:
    engine.session.runs(weights)
    eventually(lambda: engine.attachment.weights == weights)


BATCH_CHUNKS = 2
"""How many a mover of these settings writes at once."""


def queued_bytes(engine: TierEngine) -> int:
    return sum(tier.queued_bytes for tier in engine.client.status().tiers)


def is_served_as(engine: TierEngine, weights: str) -> None:
    """The mover has a session in the namespace of those weights."""
    eventually(lambda: any(
        one.label == "lower tiers" and one.weights == weights for one in engine.client.sessions().sessions
    ), 30.0)


def test_a_tier_has_the_chunks_of_each_weights_apart(server: ServerProcess, engine: TierEngine) -> None:
    keys = engine.chain(4)
    runs(engine, "step-1")
    is_served_as(engine, "step-1")
    engine.store(keys)
    is_written(engine, keys)
    flood(engine)
    runs(engine, "step-2")
    is_served_as(engine, "step-2")
    assert engine.awaited(keys, "other weights").hit_tokens == 0
    runs(engine, "")
    assert engine.awaited(keys, "start").hit_tokens == 0
    runs(engine, "step-1")
    is_served_as(engine, "step-1")
    found = engine.awaited(keys, "same weights")
    assert found.hit_tokens == 4 * CHUNK_TOKENS
    engine.read(keys, found)
    engine.release(found)


def test_what_waits_to_be_written_is_dropped_once_nobody_runs_its_weights(tmp_path: Path) -> None:
    with (
        opened(DiskStore, tmp_path) as store,
        SteppedServer(tmp_path / "armed", store.environment, **{**SETTINGS, **store.settings}) as server,
        closing(TierEngine(server.unix, manifest(PART))) as engine,
    ):
        runs(engine, "step-1")
        is_served_as(engine, "step-1")
        store.stop("write")
        engine.store(engine.chain(16))
        eventually(lambda: queued_bytes(engine) > 0, 30.0)
        runs(engine, "step-2")
        eventually(lambda: queued_bytes(engine) == 0, 30.0)  # while nothing can be written
        store.resume()
        is_served_as(engine, "step-2")
        engine.store(engine.chain(4))
        eventually(lambda: written(engine) > BATCH_CHUNKS, 30.0)  # what was stored last is written
        eventually(lambda: queued_bytes(engine) == 0, 30.0)
        assert written(engine) <= BATCH_CHUNKS + 4, "all that waited behind the first batch is dropped"


def test_damage_that_is_found_after_the_weights_have_changed_goes_from_the_tier_of_before(
    server: ServerProcess, engine: TierEngine
) -> None:
    keys = engine.chain(4)
    runs(engine, "step-1")
    is_served_as(engine, "step-1")
    engine.store(keys)
    is_written(engine, keys)
    found = engine.awaited(keys, "reads")
    assert found.lease is not None and found.hit_tokens == 4 * CHUNK_TOKENS
    runs(engine, "step-2")
    engine.damage(found.chunks[1][0])
    engine.client.mismatch(ReportMismatch(session=engine.attachment.session, lease=found.lease, chunks=[1]))
    engine.release(found)
    eventually(lambda: all(tier.pending_orders == 0 for tier in engine.client.status().tiers), 30.0)
    flood(engine)
    runs(engine, "step-1")
    is_served_as(engine, "step-1")
    assert engine.awaited(keys, "again").hit_tokens == CHUNK_TOKENS


def test_chunks_of_other_weights_are_written_to_a_tier_that_has_those_of_the_first(
    server: ServerProcess, engine: TierEngine
) -> None:
    """Their keys are the same."""
    with closing(TierEngine(server.unix, manifest(PART), "other")) as other:
        keys = engine.chain(4)
        runs(other, "step-1")
        is_served_as(engine, "step-1")
        engine.store(keys)
        is_written(engine, keys)
        other.store(keys)
        eventually(lambda: written(engine) == 2 * len(keys), 30.0)
