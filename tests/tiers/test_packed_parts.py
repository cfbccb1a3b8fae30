"""Packed and raw parts in each tier: chunks that have one of each, and engines that begin or cease to pack."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_helpers import MIB, ServerProcess, comes_true, unique
from connector_helpers import CHUNK, engine_over, kvdock_of
from engine_helpers import prompt, run_one, sampling
from mover_steps import SteppedServer
from msgspec import UnsetType
from same_tokens_helpers import LENGTH, STORED, TOKENS, Served, assert_same, bf16_config, served
from tier_stores import STORES, Store, clear_once_written, has_state, opened

from kvdock.client.client import Client
from kvdock.connectors import packing
from kvdock.datapath.layout import PagedLayout
from kvdock.engine.config import EngineConfig
from kvdock.engine.engine import Engine
from kvdock.protocol.schemas import Group, Packed

pytestmark = [pytest.mark.tiers, pytest.mark.same_tokens, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=STORES, ids=lambda kind: kind.name)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as name, opened(request.param, Path(name)) as one:
        yield one


@contextmanager
def next_server(store: Store, folder: Path) -> Iterator[SteppedServer]:
    """A server with a pool of its own over the store. One at a time: a disk is not shared."""
    with SteppedServer(
        folder / "armed", store.environment, pool_bytes=64 * MIB, segment_bytes=64 * MIB, tier_asks=1, heartbeat_s=0.1,
        **store.settings,
    ) as server:
        has_state(server.unix, "open")
        yield server


def engine(server: ServerProcess, config: EngineConfig, salt: str, pack: str = "on") -> Engine:
    return engine_over(server.unix, config, salt=salt, pack=pack, tier_wait_s=20.0)


def ended(engine: Engine, tokens: list[int]) -> Served:
    found = served(run_one(engine, tokens, sampling(TOKENS)))
    assert engine.drain(20.0)
    engine.close()
    return found


def raw_parts(server: ServerProcess) -> int:
    with Client(server.unix) as client:
        return client.status().pool.raw_parts


def test_chunks_with_a_packed_and_a_raw_part_come_back_at_another_server(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = packing._packed

    def second_group_never_fits(group: Group, layout: PagedLayout, blocks: int) -> Packed | UnsetType:
        made = usual(group, layout, blocks)
        monkeypatch.setattr(packing, "MARKS", None if packing.MARKS else 16)
        monkeypatch.setattr(packing, "UNITS", None if packing.UNITS == 0 else 0)
        return made

    monkeypatch.setattr(packing, "_packed", second_group_never_fits)
    config, salt, tokens = bf16_config("hybrid of 2 groups"), unique("mixed"), prompt(31, LENGTH)
    with next_server(store, tmp_path) as first:
        first_engine = engine(first, config, salt)
        groups = kvdock_of(first_engine).session.manifest.groups
        assert [group.packed.units > 0 for group in groups if group.packed] == [True, False]
        ended(first_engine, tokens)
        assert raw_parts(first) == STORED // CHUNK
        of_pool = ended(engine(first, config, salt), tokens)
        assert of_pool.at_hand == STORED
        clear_once_written(first.unix)
        assert raw_parts(first) == 0
    with next_server(store, tmp_path) as second:
        found = ended(engine(second, config, salt), tokens)
        assert found.at_hand == STORED
        assert_same(found, of_pool)
        with Client(second.unix) as client:
            # The mover reports now and then.
            assert comes_true(lambda: client.status().tiers[0].counters["load_done"] >= 2 * STORED // CHUNK)
            status = client.status()
        assert status.tiers[0].counters["damaged"] == status.counters["mismatches"] == 0


@pytest.mark.sweep("store")  # whether records are found is decided by their names, in each store alike
def test_engines_that_begin_or_cease_to_pack_miss_old_records_and_find_them_later(store: Store, tmp_path: Path) -> None:
    config, salt, tokens = bf16_config("gqa"), unique("switched"), prompt(32, LENGTH)
    wanted: dict[str, Served] = {}
    for pack in ("off", "on"):  # each finds the tier with records of the other alone
        with next_server(store, tmp_path) as server:
            assert ended(engine(server, config, salt, pack), tokens).at_hand == 0
            wanted[pack] = ended(engine(server, config, salt, pack), tokens)
            assert wanted[pack].at_hand == STORED
            clear_once_written(server.unix)
    assert_same(wanted["on"], wanted["off"])
    with next_server(store, tmp_path) as server:
        for pack in ("on", "off"):
            found = ended(engine(server, config, salt, pack), tokens)
            assert found.at_hand == STORED
            assert_same(found, wanted[pack])
