"""Devices by name, what needs no GPU of the GPU copies, and the calibration's file."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bytes_helpers import Paged, Shape

from kvdock import _core
from kvdock.connectors.engine_connector import ConnectorSettings
from kvdock.datapath import tuning as tunings
from kvdock.datapath.copy import CpuCopier, PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier, require_cuda
from kvdock.datapath.devices import CPU, Device
from kvdock.datapath.errors import CopyError, DeviceUnknown, NoCuda
from kvdock.datapath.tuning import Calibration, Geometry, cache_directory, cached_tunings

WITHOUT_GPU = bool(_core.cuda_unavailable())


SHAPE = Shape()


def layout_of(shape: Shape = SHAPE) -> Paged:
    return Paged("NL_X_NB_TWO_NH_BS_HS", torch.bfloat16, shape)


def test_the_cpu_needs_no_registration_and_copies_with_the_cpu() -> None:
    assert Device.named("cpu") == CPU and CPU.register is None
    for copier in CPU.open_copiers([layout_of().layout] * 2, chunk_tokens=16, threads=1):
        assert isinstance(copier, CpuCopier)
        copier.close()


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "cuda:1000", "cuda:0\n", " cpu"])
def test_a_device_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(DeviceUnknown, match="wanted \"cpu\", \"cuda\" or \"cuda:N\"") as caught:
        Device.named(name)
    assert repr(name) in str(caught.value)


@pytest.mark.skipif(not WITHOUT_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_without_a_gpu_one_clear_sentence_says_so(name: str) -> None:
    for ask in (
        lambda: Device.named(name),
        lambda: require_cuda(0),
        lambda: CudaCopier(layout_of().layout, device=0),
        lambda: tunings.tuned(layout_of().layout, 0, part_blocks=4),
    ):
        with pytest.raises(NoCuda) as caught:
            ask()
        sentence = str(caught.value)
        assert sentence == _core.cuda_unavailable() and 'use device="cpu"' in sentence and "\n" not in sentence


def test_the_connectors_default_is_the_cpu() -> None:
    assert ConnectorSettings("unix:/nowhere").device == "cpu"


def test_the_core_takes_exactly_the_values_of_a_tuning() -> None:
    taken = re.findall(r"(\w+): typing", _core.CudaCopier.__init__.__doc__ or "")
    assert taken == ["device", *CopyTuning().for_core()]


def test_copies_with_the_cpu_refuse_a_stream() -> None:
    copier = CpuCopier(layout_of().layout, threads=1)
    for call in (copier.gather, copier.scatter):
        with pytest.raises(CopyError, match="after: found 0, wanted None"):
            call([PartCopy(4096, [1], 0, 1)], after=0)
    copier.close()


# ------------------------------------------------------------------ calibrations


def calibration() -> Calibration:
    tuning = CopyTuning(piece_bytes=8 << 20, load_ctas=4)
    return Calibration("NVIDIA H200", "ab" * 16, 13000, Geometry(64, 256, 16, 16), tuning, 0.4, 0.99, 0.98, 55e9)


def test_a_geometry_is_what_of_a_layout_decides_speed() -> None:
    geometry = Geometry.of(layout_of(Shape(layers=3, blocks=9, tokens=4, heads=2, head_size=64)).layout, 4)
    assert geometry == Geometry(planes=6, run_bytes=1024, run_count=1, part_blocks=4)
    assert geometry.block_bytes == 6 * 1024


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "copy-1.json"
    tunings.save_calibration(path, calibration())
    assert tunings._read(path) == calibration() and cached_tunings(tmp_path) == [calibration()]
    assert list(tmp_path.iterdir()) == [path], "written beside, then renamed"
    text = calibration().describe()
    assert "NVIDIA H200" in text and "2 x 8 MiB" in text and "64 planes of 16 x 256 bytes" in text and "99.0 %" in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: "[]",
        lambda data: json.dumps({**json.loads(data), "surplus": 1}),
        lambda data: json.dumps({**json.loads(data), "tuning": {"piece_bytes": 1, "other": 2}}),
        lambda data: json.dumps({key: value for key, value in json.loads(data).items() if key != "uuid"}),
    ],
)
def test_a_file_that_is_not_understood_is_made_again(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "copy-1.json"
    tunings.save_calibration(path, calibration())
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert tunings._read(path) is None and cached_tunings(tmp_path) == []
    assert "copy-1.json" in caplog.text and "will be made again" in caplog.text


def test_a_file_of_another_format_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "copy-1.json"
    monkeypatch.setattr(tunings, "FORMAT", tunings.FORMAT + 1)
    tunings.save_calibration(path, calibration())
    monkeypatch.undo()
    assert tunings._read(path) is None


def test_another_gpu_driver_or_geometry_has_another_file() -> None:
    geometry = calibration().geometry
    digest = tunings._digest
    here = digest("ab" * 16, 13000, geometry)
    assert here == digest("ab" * 16, 13000, replace(geometry))
    others = {
        digest("cd" * 16, 13000, geometry), digest("ab" * 16, 12080, geometry),
        digest("ab" * 16, 13000, replace(geometry, run_bytes=512)),
    }
    assert len(others | {here}) == 4


def test_another_choice_than_the_usual_one_must_be_clearly_better() -> None:
    assert tunings.best({4: 1.2, 8: 0.995, 16: 1.0, 32: 1.001}, 16) == 16
    assert tunings.best({4: 1.2, 8: 0.98, 16: 1.0, 32: 0.985}, 16) == 8


def test_stores_take_the_fewest_thread_blocks_that_are_nearly_as_fast_as_any() -> None:
    assert tunings.fewest({1: 40.4, 2: 20.7, 4: 20.9, 8: 20.6}) == 2
    assert tunings.fewest({1: 41.0, 2: 40.5, 4: 40.2, 8: 40.0}) == 1
    assert tunings.fewest({1: 80.0, 2: 40.0, 4: 20.0, 8: 18.0}) == 8


def test_a_store_beside_steps_is_the_kernels_alone() -> None:
    tuning = CopyTuning(background_store_ctas=3, direct_ctas=16, direct_store_bytes=0, load_ctas=7)
    storing = tuning.for_stores()
    assert storing.direct_ctas == 3 and storing.direct_store_bytes > 1 << 50
    assert storing.piece_bytes < CopyTuning().piece_bytes, "it needs no staging"
    rest = {name: getattr(tuning, name) for name in ("direct_ctas", "direct_store_bytes", "piece_bytes")}
    assert replace(storing, **rest) == tuning, "nothing else is changed"


def test_a_packed_store_beside_steps_leaves_the_copy_engine_idle_between_two_pieces() -> None:
    tuning = CopyTuning(background_store_ctas=2, direct_store_bytes=0, store_ctas=4, buffers=3)
    storing = tuning.for_stores(packs=True)
    assert storing.buffers == 1, "a second buffer could be filled while the first one is copied"
    assert storing.piece_bytes == storing.direct_store_bytes == 4 << 20, "smaller stores are direct copies"
    assert (storing.store_ctas, storing.direct_ctas) == (16, 4)


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "kvdock" and cached_tunings() == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache/kvdock"
