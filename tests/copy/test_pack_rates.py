"""What packing costs is measured once on a machine, and kept in a file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvdock import _core
from kvdock.datapath import pack_rates as module
from kvdock.datapath.pack_rates import LEAST_LOAD, LEAST_STORE, PackRates, kept_pack_rates, pack_rates

KNOWN = PackRates("avx2", 0.4, 0.3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[PackRates]:
    """What is measured from now on; the first is taken each time."""
    left = [KNOWN, replace(KNOWN, load_share=0.1)]
    monkeypatch.setattr(module, "measured", lambda: left.pop(0))
    return left


def test_it_is_measured_once_for_all_processes(tmp_path: Path, measured: list[PackRates]) -> None:
    assert kept_pack_rates(tmp_path) is None
    assert [pack_rates(tmp_path) for _ in range(3)] == [KNOWN] * 3 and len(measured) == 1
    assert kept_pack_rates(tmp_path) == KNOWN


@pytest.mark.parametrize("damage", ["", "[]", '{"format": 0}', '{"format": 1, "loop": "x", "surplus": 1}'])
def test_a_file_that_is_not_understood_is_made_again(tmp_path: Path, measured: list[PackRates], damage: str) -> None:
    pack_rates(tmp_path)
    (path,) = tmp_path.glob("pack-*.json")
    path.write_text(damage)
    assert pack_rates(tmp_path) == pack_rates(tmp_path) == replace(KNOWN, load_share=0.1)


def test_another_loop_has_another_file(
    tmp_path: Path, measured: list[PackRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_rates(tmp_path)
    monkeypatch.setattr(_core, "tile_paths", lambda: ["scalar"])
    assert pack_rates(tmp_path) != KNOWN


def test_without_a_place_for_the_file_nothing_is_known(
    tmp_path: Path, measured: list[PackRates], caplog: pytest.LogCaptureFixture
) -> None:
    """Each process would measure for itself, and the ranks of an engine might choose otherwise."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert pack_rates(blocked) is None
    assert f"what packing costs cannot be kept in {blocked}" in caplog.text


def test_it_pays_from_both_least_rates_on() -> None:
    assert PackRates("x", LEAST_LOAD, LEAST_STORE).pays
    assert not PackRates("x", LEAST_LOAD - 0.01, 1).pays and not PackRates("x", 1, LEAST_STORE - 0.01).pays


def test_what_is_measured_are_copies_of_kv_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTS", 2)
    with module._copies() as calls:
        assert list(calls) == ["store", "load", "packed store", "packed load"]
    part = module.plane_values() * module.PLANES
    shape = _core.PackedShape([module.BLOCKS * module.BLOCK_BYTES] * module.PLANES)
    assert _core.pack_part(shape, part, bytearray(shape.packed_bytes)) >= 0
    assert shape.raw_bytes > 1.38 * shape.packed_bytes
    found = module.measured()
    assert 0 < found.load_share < 10 and 0 < found.store_share < 10 and found.loop == _core.tile_paths()[0]
