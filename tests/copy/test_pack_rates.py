"""What packing costs is measured once on a machine, and kept in a file. tests/cuda/test_packed_copier.py measures it on
a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdock import _core
from kvdock.datapath import pack_rates as module
from kvdock.datapath.pack_rates import ON_CPU, ON_GPU, Least, PackRates, kept_pack_rates, pack_rates

KNOWN = PackRates("avx2", 0.4, 0.3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[PackRates]:
    """What is measured from now on; the first is taken each time."""
    left = [KNOWN, replace(KNOWN, load_share=0.1)]
    monkeypatch.setattr(module, "measured", lambda gpu: left.pop(0))
    return left


def test_it_is_measured_once_for_all_processes(tmp_path: Path, measured: list[PackRates]) -> None:
    assert kept_pack_rates(tmp_path) == []
    assert [pack_rates(cache_dir=tmp_path) for _ in range(3)] == [KNOWN] * 3 and len(measured) == 1
    assert kept_pack_rates(tmp_path) == [KNOWN]


@pytest.mark.parametrize("damage", ["", "[]", '{"format": 0}', '{"format": 2, "by": "x", "surplus": 1}'])
def test_a_file_that_is_not_understood_is_made_again(tmp_path: Path, measured: list[PackRates], damage: str) -> None:
    pack_rates(cache_dir=tmp_path)
    (path,) = tmp_path.glob("pack-*.json")
    path.write_text(damage)
    assert pack_rates(cache_dir=tmp_path) == pack_rates(cache_dir=tmp_path) == replace(KNOWN, load_share=0.1)


def test_another_loop_has_another_file(
    tmp_path: Path, measured: list[PackRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_rates(cache_dir=tmp_path)
    monkeypatch.setattr(_core, "tile_paths", lambda: ["scalar"])
    assert pack_rates(cache_dir=tmp_path) != KNOWN


def test_without_a_place_for_the_file_nothing_is_known(
    tmp_path: Path, measured: list[PackRates], caplog: pytest.LogCaptureFixture
) -> None:
    """Each process would measure for itself, and the ranks of an engine might choose otherwise."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert pack_rates(cache_dir=blocked) is None
    assert f"what packing costs cannot be kept in {blocked}" in caplog.text


def test_a_gpu_has_a_file_of_its_own(
    tmp_path: Path, measured: list[PackRates], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One for its model and driver: another GPU of the kind reads the same."""
    h200 = SimpleNamespace(name="NVIDIA H200", driver=13000)
    gpus = [h200, h200, SimpleNamespace(name="NVIDIA H200", driver=13010)]
    monkeypatch.setattr(module, "require_cuda", lambda gpu: gpus[gpu])
    assert pack_rates(cache_dir=tmp_path) == KNOWN and pack_rates(0, tmp_path) == pack_rates(1, tmp_path) != KNOWN
    assert measured == [] and len(kept_pack_rates(tmp_path)) == 2

    def refused(gpu: int | None) -> PackRates:
        raise _core.CudaError("memory", "none", "24 MiB")

    monkeypatch.setattr(module, "measured", refused)
    assert pack_rates(2, tmp_path) is None and "what packing costs on GPU 2 cannot be measured" in caplog.text


@pytest.mark.parametrize("least", [ON_CPU, ON_GPU])
def test_it_pays_from_both_least_rates_on(least: Least) -> None:
    assert PackRates("x", least.load, least.store, least).pays
    assert not PackRates("x", least.load - 0.01, 2, least).pays
    assert not PackRates("x", 2, least.store - 0.01, least).pays


def test_what_is_measured_are_copies_of_kv_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTS", 2)
    with module._cpu_copies() as calls:
        assert list(calls) == ["store", "load", "packed store", "packed load"]
    part = module.plane_values() * module.PLANES
    shape = _core.PackedShape([module.BLOCKS * module.BLOCK_BYTES] * module.PLANES)
    assert _core.pack_part(shape, part, bytearray(shape.packed_bytes)) >= 0
    assert shape.raw_bytes > 1.38 * shape.packed_bytes
    found = module.measured()
    assert 0 < found.load_share < 10 and 0 < found.store_share < 10 and found.by == _core.tile_paths()[0]
