"""Engines that pack their KV: the bits are those of a local hit, wherever the parts were meanwhile, and whatever part
of them could not be packed."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from adoption_helpers import next_at
from api_helpers import MIB, ServerProcess, unique
from connector_helpers import CHUNK, Spectator, engine_over, kvdock_of
from engine_helpers import make_engine, prompt, run_one, sampling
from same_tokens_helpers import LENGTH, MODELS, STORED, TOKENS, Served, assert_same, bf16_config, served
from tier_stores import clear_once_written, clear_pool
from tp_helpers import engine_of_ranks

from kvdock.client.client import Client
from kvdock.connectors import packing
from kvdock.connectors.errors import NotSupportedError
from kvdock.connectors.packing import with_packing
from kvdock.datapath.devices import CPU, Device
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.datapath.pack_rates import ON_GPU, PackRates
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of
from kvdock.engine.ranks import ProcessGroup
from kvdock.protocol.schemas import Manifest

pytestmark = [pytest.mark.same_tokens, pytest.mark.timeout(120)]

Room: TypeAlias = tuple[int | None, int | None]
USUAL, FEW, NONE = (None, None), (48, 4), (16, 0)
"""Reserves of marks, and units of spill: with few some parts of the model with latent attention fit and some do not,
with none no part of any model does."""


def give(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MARKS", room[0])
    monkeypatch.setattr(packing, "UNITS", room[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("disk")
    with ServerProcess(
        pool_bytes=64 * MIB, segment_bytes=64 * MIB, disk_path=str(folder), disk_bytes=256 * MIB, tier_asks=1,
        heartbeat_s=0.1,
    ) as process:
        yield process


def engine(server: ServerProcess, config: EngineConfig, salt: str, pack: str = "on") -> Engine:
    return engine_over(server.unix, config, salt=salt, pack=pack)


def ended(engine: Engine, tokens: list[int], new: int = TOKENS) -> Served:
    found = served(run_one(engine, tokens, sampling(new)))
    assert engine.drain(20.0)
    engine.close()
    return found


def alone(config: EngineConfig, tokens: list[int], at_hand: int) -> Served:
    """An engine whose own prefix cache has so many tokens."""
    one = make_engine(dataclasses.replace(config, max_local_hit_tokens=at_hand))
    run_one(one, tokens, sampling(1))
    return served(run_one(one, tokens, sampling(TOKENS)))


@pytest.mark.sweep("room")
@pytest.mark.parametrize("room", [USUAL, NONE, FEW], ids=["usual", "none", "few"])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_and_logits_are_those_of_a_local_hit_from_the_pool_and_from_a_tier(
    server: ServerProcess, model: str, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(room, monkeypatch)
    config, salt, tokens = bf16_config(model), unique("packed"), prompt(9, LENGTH)
    clear_pool(server.unix)
    ended(engine(server, config, salt), tokens, 1)
    with Client(server.unix) as client:
        pool = client.status().pool
    if room == USUAL:
        assert pool.raw_parts == 0 and pool.ready_bytes < 0.9 * pool.kv_bytes
    elif room == NONE:
        assert pool.raw_parts > 0 and pool.ready_bytes == pool.kv_bytes
    elif model == "mla":
        assert 0 < pool.raw_parts < STORED // CHUNK
    of_pool = ended(engine(server, config, salt), tokens)
    assert of_pool.at_hand == STORED
    assert_same(of_pool, alone(config, tokens, STORED))
    clear_once_written(server.unix)
    of_tier = ended(engine(server, config, salt), tokens)
    assert of_tier.at_hand == STORED
    assert_same(of_tier, of_pool)


@pytest.mark.parametrize("model", ["mha", "mla"])
def test_two_ranks_pack_their_parts(server: ServerProcess, model: str) -> None:
    config = dataclasses.replace(bf16_config(model), tensor_parallel=2)
    salt, tokens = unique("ranks"), prompt(10, LENGTH)
    process_group = ProcessGroup(2)
    try:

        def made() -> Engine:
            return engine_of_ranks(process_group, config, server.unix, salt=salt, pack="on")

        clear_pool(server.unix)
        first = made()
        assert all(group.packed for group in kvdock_of(first).session.manifest.groups)
        ended(first, tokens, 1)
        found = ended(made(), tokens)
        assert found.at_hand == STORED
        of_own_cache = engine_of_ranks(process_group, dataclasses.replace(config, max_local_hit_tokens=STORED), None)
        run_one(of_own_cache, tokens, sampling(1))
        assert_same(found, served(run_one(of_own_cache, tokens, sampling(TOKENS))))
    finally:
        process_group.close()


def test_engines_that_pack_and_engines_that_do_not_share_nothing(server: ServerProcess) -> None:
    config, salt, tokens = bf16_config("gqa"), unique("apart"), prompt(10, LENGTH)
    for pack in ("on", "off"):
        first = engine(server, config, salt, pack)
        manifest = kvdock_of(first).session.manifest
        assert ended(first, tokens, 1).at_hand == 0
        assert all(bool(group.packed) == (pack == "on") for group in manifest.groups)
        assert ended(engine(server, config, salt, pack), tokens, 1).at_hand == STORED


def test_a_server_that_adopts_the_pool_finds_packed_parts_and_raw_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = bf16_config("gqa"), prompt(11, LENGTH)
    with ServerProcess(pool_bytes=16 * MIB, segment_bytes=16 * MIB) as first:
        for room in (USUAL, NONE):
            give(room, monkeypatch)
            ended(engine(first, config, "s"), tokens, 1)
        with Client(first.unix) as client:
            before = client.status().pool
        assert before.raw_parts == STORED // CHUNK
        first.process.kill()
        first.process.wait()
        with next_at(first) as second:
            with Client(second.unix) as client:
                now = client.status().pool
            assert (now.raw_parts, now.kv_bytes, now.ready_bytes) == (
                before.raw_parts, before.kv_bytes, before.ready_bytes
            )
            found = ended(engine(second, config, "s"), tokens)
            assert found.at_hand == STORED
            assert_same(found, alone(config, tokens, STORED))


FILLINGS = {"raw": ("off", USUAL), "packed": ("on", USUAL), "unfit": ("on", NONE)}


@pytest.mark.parametrize(("pack", "room"), FILLINGS.values(), ids=FILLINGS)
def test_a_full_pool_holds_as_many_tokens_as_its_bytes_say(
    pack: str, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvdock size` divides the pool by the bytes of a chunk; a chunk whose parts do not fit takes its raw bytes."""
    give(room, monkeypatch)
    config = bf16_config("gqa")
    with ServerProcess(pool_bytes=2 * MIB, segment_bytes=2 * MIB) as server, Client(server.unix) as client:
        filling = engine(server, config, "s", pack)
        group = kvdock_of(filling).session.manifest.groups[0]
        for seed in range(2 * MIB // group.part_bytes):
            run_one(filling, prompt(seed, LENGTH), sampling(1))
        assert filling.drain(20.0)
        status, (space,) = client.status(), client.curve().namespaces
        filling.close()
    assert status.counters["evicted_chunks"] > 0, "the pool is full"
    taken = group.part_bytes if room == NONE else space.chunk_bytes
    fits = status.pool.limit_bytes // taken
    assert space.chunk_bytes == group.slot_bytes
    assert 0.9 * fits <= status.chunks.ready <= fits


def test_damaged_packed_bytes_are_a_miss_and_are_not_unpacked(server: ServerProcess) -> None:
    config, salt, tokens = bf16_config("gqa"), unique("damaged"), prompt(12, LENGTH)
    first = engine(server, config, salt)
    manifest = kvdock_of(first).session.manifest
    ended(first, tokens, 1)
    with Client(server.unix) as client, Spectator(client, manifest) as spectator:
        part = spectator.slots(tokens)[1]
        assert part.length < manifest.groups[0].part_bytes
        spectator.flip(part, part.length // 2)
        before = client.status().counters["mismatches"]
        found = ended(engine(server, config, salt), tokens)
        assert client.status().counters["mismatches"] == before + 1
    assert found.at_hand == CHUNK
    assert_same(found, alone(config, tokens, CHUNK))


def described(config: EngineConfig) -> tuple[Manifest, list[PagedLayout]]:
    kv = KVCache(config)
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    manifest = manifest_of(config, layout, CHUNK)
    return manifest, [layout] * len(manifest.groups)


def test_what_does_not_become_smaller_stays_raw() -> None:
    tiny, wide = preset("tiny"), bf16_config("gqa")
    less_than_a_tile = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, dtype="bfloat16", head_size=8))
    for config, pack in ((tiny, "on"), (less_than_a_tile, "on"), (wide, "off")):
        manifest, layouts = described(config)
        assert with_packing(manifest, layouts, pack, CPU) == manifest
    manifest, layouts = described(wide)
    assert with_packing(manifest, layouts, "on", CPU) != manifest
    with pytest.raises(NotSupportedError, match="pack is 'yes', and one of auto, on, off is wanted"):
        with_packing(manifest, layouts, "yes", CPU)
    assert with_packing(manifest, layouts, "on", Device(0)) == with_packing(manifest, layouts, "on", CPU)


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has loads of packed parts run at a share of the rate of raw ones here, and on a GPU at three times that."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda share: monkeypatch.setattr(
        packing, "pack_rates",
        lambda gpu: PackRates("a loop", share, 0.3)
        if gpu is None else PackRates(f"GPU {gpu}", 3 * share, 0.6, ON_GPU),
    )


def test_auto_packs_where_that_is_quick_enough_and_says_so(
    rates: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdock.connector")
    manifest, layouts = described(bf16_config("gqa"))
    rates(0.3)
    assert with_packing(manifest, layouts, "auto", CPU) == with_packing(manifest, layouts, "on", CPU)
    assert "KV is packed; packed loads by a loop at 0.30 of the rate of raw ones" in caplog.text
    assert with_packing(manifest, layouts, "auto", Device(0)) == manifest
    assert "it does not pay here; packed loads by GPU 0 at 0.90 of the rate of raw ones (at least 1.0" in caplog.text
    rates(0.4)
    assert with_packing(manifest, layouts, "auto", Device(0)) == with_packing(manifest, layouts, "on", CPU)
    rates(0.2)
    assert with_packing(manifest, layouts, "auto", CPU) == manifest
    assert "KV is not packed: it does not pay here; packed loads by a loop at 0.20" in caplog.text
    assert with_packing(manifest, layouts, "on", CPU) != manifest, "the setting stands above what is measured"


def test_auto_packs_nothing_for_a_model_whose_first_parts_did_not_become_smaller(
    server: ServerProcess, rates: Callable[[float], None], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rates(0.3)
    monkeypatch.setattr(packing, "FIRST_PARTS", STORED // CHUNK)
    config, salt = bf16_config("gqa"), unique("raw")

    def stores(room: Room, seed: int) -> bool:
        """Whether the engine's groups are packed."""
        give(room, monkeypatch)
        made = engine(server, config, salt, "auto")
        packed = all(group.packed for group in kvdock_of(made).session.manifest.groups)
        run_one(made, prompt(seed, LENGTH), sampling(1))
        ended(made, prompt(seed + 100, LENGTH), 1)
        return packed

    assert stores(USUAL, 20) and stores(NONE, 21), "parts that do become smaller change nothing"
    assert "does not pack" in caplog.text and "parts are stored raw. Set pack to off" in caplog.text
    assert not stores(USUAL, 22)
    (model,) = packing.models_that_do_not_pack()
    assert re.fullmatch(r"kvdock-tiny \((\d+) of \1 parts\)", model)
