"""Measures whether packing KV pays with this machine's processor, or with a GPU. The figures are kept in files beside
those of tuning.py, and the connectors' setting `pack: auto` follows them (kvdock/connectors/packing.py).

    pack_rates() ─► the file ─► else packed copies beside raw ones, under a lock ─► the file

All engines of a machine read one file: one for its processor, and one for each model of GPU. So the ranks of an engine
choose alike, and so do the engines that may share KV. Without a place for the file nothing is packed, because each
process would measure for itself. The values are Gaussian, with a scale for each channel: they have about as many marks
as real KV.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import platform
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from kvdock import _core
from kvdock.datapath.cuda import CopyTuning, require_cuda
from kvdock.datapath.tuning import cache_directory, calibrating
from kvdock.shm.checksum import ensure_keys

log = logging.getLogger("kvdock.datapath")

FORMAT: Final = 2  # of the file, and of what is measured: raised when either changes
PLANES, BLOCKS, BLOCK_BYTES, PARTS = 16, 16, 6144, 16
"""A part has 16 planes of 16 blocks: 24 tiles each. All parts have 24 MiB."""
GPU_PARTS: Final = 64
"""On a GPU, where the cost of a call would hide the cost of fewer bytes."""
ROUNDS: Final = 3


@dataclass(frozen=True)
class Least:
    """The least rates of packed copies with which packing pays, in bytes of KV, as shares of those of raw copies."""

    load: float
    store: float


ON_CPU: Final = Least(load=0.25, store=0.2)
"""An engine on a CPU copies gigabytes a second and computes a hundredth of that, so four times the time of a load is
little beside what is found more. Without vector loops packed loads have .13 of the rate, with AVX2 .33 and more
(bench/LOG.md). No request waits for a store."""
ON_GPU: Final = Least(load=1.0, store=0.5)
"""A GPU computes so fast that a load must not become slower. Over PCIe it becomes quicker, for fewer bytes pass."""


@dataclass(frozen=True)
class PackRates:
    """Rates of packed copies, in bytes of KV, relative to those of raw copies; both hash. `by`: what packs: a loop of
    the processor, or the name of a GPU. `least`: what is wanted of it."""

    by: str
    load_share: float
    store_share: float
    least: Least = ON_CPU

    @property
    def pays(self) -> bool:
        return self.load_share >= self.least.load and self.store_share >= self.least.store

    def describe(self) -> str:
        return (
            f"packed loads by {self.by} at {self.load_share:.2f} of the rate of raw ones (at least {self.least.load} "
            f"wanted), stores at {self.store_share:.2f} ({self.least.store})"
        )


def pack_rates(gpu: int | None = None, cache_dir: Path | None = None) -> PackRates | None:
    """From the file, or measured now, in some seconds at most. `gpu`: its index in this process; None: the processor.
    None: the figures cannot be had, or cannot be kept. Raises NoCuda if there is no such GPU."""
    directory = cache_dir if cache_dir is not None else cache_directory()
    path = _path(directory, gpu)
    try:
        if (known := _read(path)) is None:
            with calibrating(directory):
                if (known := _read(path)) is None:  # another process may have measured it meanwhile
                    known = measured(gpu)
                    fresh = path.with_suffix(f".{os.getpid()}")
                    fresh.write_text(json.dumps({"format": FORMAT, **asdict(known)}, indent=1) + "\n")
                    fresh.replace(path)
        return known
    except OSError as error:
        log.warning("what packing costs cannot be kept in %s: %s", directory, error)
    except _core.CudaError as error:
        log.warning("what packing costs on GPU %s cannot be measured: %s", gpu, error)
    return None


def kept_pack_rates(cache_dir: Path | None = None) -> list[PackRates]:
    """What engines of this user have measured."""
    directory = cache_dir if cache_dir is not None else cache_directory()
    found = [_read(path) for path in sorted(directory.glob("pack-*.json"))]
    return [one for one in found if one is not None]


def _path(directory: Path, gpu: int | None) -> Path:
    """Other loops, another processor, GPU or driver have another file: home directories may be on a network."""
    identity = [FORMAT, platform.machine(), _processor(), _core.tile_paths(), _core.cpu_paths()]
    if gpu is not None:
        device = require_cuda(gpu)
        identity += [device.name, device.driver, _core.cuda_kernels()]
    return directory / f"pack-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    """The name of its model, "" where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _read(path: Path) -> PackRates | None:
    """None if there is no such file, or it has another format or is damaged."""
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            return None
        return PackRates(
            str(data.pop("by")), least=Least(**data.pop("least")),
            **{name: float(value) for name, value in data.items()},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not readable and will be made again: %s", path.name, error)
        return None


# ------------------------------------------------------------------ measuring


def measured(gpu: int | None = None) -> PackRates:
    """Copies take turns, and the least of their times counts: a disturbance can only make a copy slower. Raises NoCuda
    and CudaError."""
    with _cpu_copies() if gpu is None else _gpu_copies(gpu) as calls:
        least: dict[str, float] = {}
        for _ in range(1 + ROUNDS):  # the first one touches memory that is new
            least = {name: min(call(), least.get(name, float("inf"))) for name, call in calls.items()}
    by, wanted = (_core.tile_paths()[0], ON_CPU) if gpu is None else (require_cuda(gpu).name, ON_GPU)
    return PackRates(
        by, round(least["load"] / least["packed load"], 3), round(least["store"] / least["packed store"], 3), wanted
    )


PART_BYTES: Final = PLANES * BLOCKS * BLOCK_BYTES
Calls = dict[str, Callable[[], float]]
"""Copies of all parts, by name. Each finds in the slots what the one before it left, and says how long it took."""


def plane_values() -> bytes:
    """A plane of a part."""
    source = random.Random(1)
    scales = [2.0 ** source.gauss(0, 1) for _ in range(128)]
    values = array("f", (source.gauss(0, scales[i % 128]) for i in range(BLOCKS * BLOCK_BYTES // 2)))
    return memoryview(values).cast("B").cast("H")[1::2].tobytes()


class _Parts:
    """All parts as the native core is told of them."""

    def __init__(self, paged: int, slots: int, parts: int) -> None:
        blocks = parts * BLOCKS
        size = blocks * BLOCK_BYTES
        planes = [(paged + plane * size, BLOCK_BYTES, BLOCK_BYTES, 1, BLOCK_BYTES) for plane in range(PLANES)]
        self.layout = _core.PagedLayout(planes, num_blocks=blocks, block_tokens=1)
        self.shape = _core.packed_shape(self.layout, blocks=BLOCKS, marks=None, units=None)
        ensure_keys(PART_BYTES)
        self.slots = array("Q", range(slots, slots + parts * PART_BYTES, PART_BYTES))
        self.ids = array("q", (at * _STRIDE % blocks for at in range(blocks)))
        self.starts = array("q", range(0, blocks + 1, BLOCKS))
        self.skips = array("q", bytes(8 * parts))

    @property
    def places(self) -> tuple[array[int], array[int], array[int]]:
        return self.slots, self.ids, self.starts

    def fill(self) -> None:
        """Slots in host memory get raw parts."""
        part = plane_values() * PLANES
        for slot in self.slots:
            ctypes.memmove(slot, part, PART_BYTES)


_STRIDE: Final = 79  # scattered like an engine's blocks


@contextmanager
def _cpu_copies() -> Iterator[Calls]:
    """By this thread's processor time: what else runs on the machine does not count."""
    with mmap.mmap(-1, PARTS * PART_BYTES) as paged, mmap.mmap(-1, PARTS * PART_BYTES) as slots:
        of = _Parts(_address_of(paged), _address_of(slots), PARTS)
        of.fill()
        _core.scatter(of.layout, *of.places, of.skips, threads=1)
        sums: Sequence[int | None] = []

        def timed(copy: Callable[[], Sequence[int | None]]) -> Callable[[], float]:
            def call() -> float:
                nonlocal sums
                began = time.thread_time()
                sums = copy()
                return time.thread_time() - began

            return call

        def unpack() -> Sequence[int | None]:
            expected = array("Q", [one or 0 for one in sums])
            return _core.scatter_packed(of.layout, of.shape, *of.places, of.skips, expected, threads=1)

        yield {
            "store": timed(lambda: _core.gather(of.layout, *of.places, threads=1)),
            "load": timed(lambda: _core.scatter(of.layout, *of.places, of.skips, threads=1)),
            "packed store": timed(lambda: _core.gather_packed(of.layout, of.shape, *of.places, threads=1)),
            "packed load": timed(unpack),
        }


@contextmanager
def _gpu_copies(gpu: int) -> Iterator[Calls]:
    """By the GPU's clock, with page-locked slots and the copies that connectors make."""
    paged, slots = (
        _core.CudaBuffer(device=gpu, bytes=GPU_PARTS * PART_BYTES, host=is_host) for is_host in (False, True)
    )
    of, watch = _Parts(paged.address, slots.address, GPU_PARTS), _core.CudaStopwatch(device=gpu)
    of.fill()
    staged = replace(CopyTuning(), direct_load_bytes=0)
    copiers = []

    def timed(tuning: CopyTuning, *, stores: bool, packs: bool) -> Callable[[], float]:
        copier = _core.CudaCopier(device=gpu, **tuning.for_core())
        copiers.append(copier)
        how = (of.shape.marks, of.shape.units) if packs else None
        layout = copier.add_layout(of.layout, part_blocks=BLOCKS, packed=how)

        def call() -> float:
            watch.start()
            if stores:
                copied = copier.gather(layout, *of.places, after=watch.stream)
            else:
                copied = copier.scatter(layout, *of.places, of.skips, after=watch.stream)
            copied.order(watch.stream)
            return watch.stop_ms()

        return call

    try:
        calls = {
            "store": timed(CopyTuning().for_stores(), stores=True, packs=False),
            "load": timed(staged, stores=False, packs=False),
            "packed store": timed(CopyTuning().for_stores(packs=True), stores=True, packs=True),
            "packed load": timed(staged.for_packed(), stores=False, packs=True),
        }
        calls["load"]()  # fills the blocks
        yield calls
    finally:
        for copier in copiers:
            copier.close()


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
