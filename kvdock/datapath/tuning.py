"""Finds the fastest way to copy on one GPU with one layout. It is measured once, in private scratch memory, and kept in
a file.

    tuned(layout, device) ─► the file ─► else calibrate() under a lock ─► the file

It chooses the size of a staging buffer, how many CTAs (thread blocks) a kernel gets, and up to which size a call is a
direct copy. Only one process calibrates at a time, because two would disturb each other.

No failure here stops an engine: without memory for scratch or a directory for the file, it uses the default values.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from kvdock import _core
from kvdock.datapath.cuda import CopyTuning, require_cuda
from kvdock.datapath.layout import PagedLayout
from kvdock.shm.checksum import ensure_keys

log = logging.getLogger("kvdock.datapath")

FORMAT: Final = 5  # of the file, and of what is measured: raised when either changes
SCRATCH_BYTES: Final = 64 << 20
PIECES_BYTES: Final = (4 << 20, 8 << 20, 16 << 20)
CTAS: Final = (4, 8, 16, 32)
BACKGROUND_STORE_CTAS: Final = (1, 2, 4, 8)
DIRECT_SIZES: Final = tuple(1 << shift for shift in range(18, 25))  # 256 KiB .. 16 MiB
PASSES: Final = 4
"""How often one call copies the scratch when the size of pieces is chosen, so that the cost of a call does not hide the
cost of its bytes. The CTAs of a load are chosen with shorter calls, in which the last piece's kernel counts. Those
of a staged store are not measured: four saturate PCIe."""
FILLS: Final = 1.1
"""A background store may take this many times as long as with more CTAs: no request waits for it, and fewer CTAs
disturb the engine less."""
MARGIN: Final = 0.01
"""Another choice than the usual one must save more than this share of the time. Differences of half of it are noise."""
ROUNDS: Final = 5


@dataclass(frozen=True)
class Geometry:
    """The properties of a layout that decide the speed of its copies."""

    planes: int
    run_bytes: int
    run_count: int
    part_blocks: int
    """Blocks of a part."""

    @classmethod
    def of(cls, layout: PagedLayout, part_blocks: int) -> Geometry:
        _, _, run_bytes, run_count, _ = layout.planes[0]
        return cls(len(layout.planes), run_bytes, run_count, part_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes, as if all planes were like the first."""
        return self.planes * self.run_bytes * self.run_count

    @property
    def part_bytes(self) -> int:
        return self.block_bytes * self.part_blocks


@dataclass(frozen=True)
class Calibration:
    device: str
    """The GPU's name."""
    uuid: str
    driver: int
    geometry: Geometry
    tuning: CopyTuning
    took_s: float
    load_share: float
    """Speed of the chosen load relative to plain copies of the same bytes; `store_share`: the same for a background
    store."""
    store_share: float
    plain_load_bytes_per_s: float
    """The rate of plain copies from page-locked memory to the GPU."""

    def describe(self) -> str:
        g, t = self.geometry, self.tuning
        return (
            f"{self.device} ({self.uuid[:8]}), {g.planes} planes of {g.run_count} x {g.run_bytes} bytes a block: "
            f"{t.buffers} x {t.piece_bytes >> 20} MiB staging, loads by {t.load_ctas} thread blocks, direct up to "
            f"{t.direct_load_bytes >> 10} KiB by {t.direct_ctas}, stores by {t.background_store_ctas}; "
            f"load {100 * self.load_share:.1f} %, store {100 * self.store_share:.1f} % of plain copies"
        )


def tuned(layout: PagedLayout, device: int, *, part_blocks: int, cache_dir: Path | None = None) -> CopyTuning:
    """The tuning for this GPU and layout: read from the file, or else measured now (well under a second) and written to
    it.

    Raises NoCuda when there is no such GPU.
    """
    geometry, info = Geometry.of(layout, part_blocks), require_cuda(device)
    directory = cache_dir if cache_dir is not None else cache_directory()
    path = directory / f"copy-{_digest(info.uuid, info.driver, geometry)}.json"
    known = _read(path)
    if known is not None:
        return known.tuning
    try:
        with calibrating(directory):
            known = _read(path)  # another process may have measured it meanwhile
            if known is None:
                known = calibrate(info, geometry)
                save_calibration(path, known)
    except OSError as error:
        log.warning("the calibration of copies on GPU %d is not kept: %s", device, error)
        return known.tuning if known is not None else CopyTuning()
    except _core.CudaError as error:
        log.warning("copies on GPU %d are not calibrated: %s", device, error)
        return CopyTuning()
    return known.tuning


def cached_tunings(cache_dir: Path | None = None) -> list[Calibration]:
    """Every readable calibration in `cache_dir`; None: in cache_directory()."""
    directory = cache_dir if cache_dir is not None else cache_directory()
    found = [_read(path) for path in sorted(directory.glob("copy-*.json"))]
    return [one for one in found if one is not None]


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/kvdock, or ~/.cache/kvdock."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvdock"


# ------------------------------------------------------------------ measuring


def calibrate(info: _core.CudaDevice, geometry: Geometry) -> Calibration:
    """Measures in private scratch memory: 64 MiB of page-locked memory, about as much on the GPU, and staging buffers
    there. Raises CudaError."""
    began = time.perf_counter()
    bench = _Bench(info.index, geometry)
    tuning = CopyTuning()
    tuning = _choose(tuning, "load_ctas", CTAS, lambda one: [bench.staged(one, store=False)])
    tuning = _choose(tuning, "piece_bytes", PIECES_BYTES, bench.long_both_ways)
    tuning = _choose(tuning, "direct_ctas", CTAS, bench.direct_both_ways)
    tuning = replace(
        tuning,
        background_store_ctas=fewest(
            _costs(tuning, "background_store_ctas", BACKGROUND_STORE_CTAS, lambda one: [bench.background_store(one)])
        ),
        direct_load_bytes=bench.crossover_bytes(tuning, store=False),
        direct_store_bytes=bench.crossover_bytes(tuning, store=True),
    )
    (load, plain), (store, _) = (bench.share(tuning, store=store) for store in (False, True))
    took_s = round(time.perf_counter() - began, 3)
    return Calibration(
        info.name, info.uuid, info.driver, geometry, tuning, took_s, round(load, 4), round(store, 4), round(plain)
    )


Name = TypeVar("Name")
Timer: TypeAlias = AbstractContextManager[Callable[[], float]]
"""A context that yields a function, which makes one copy and returns how many milliseconds it took."""


def _choose(
    tuning: CopyTuning, name: str, choices: Sequence[int], timers: Callable[[CopyTuning], list[Timer]]
) -> CopyTuning:
    """`tuning` with the best of `choices` for `name`."""
    return replace(tuning, **{name: best(_costs(tuning, name, choices, timers), getattr(tuning, name))})


def _costs(
    tuning: CopyTuning, name: str, choices: Sequence[int], timers: Callable[[CopyTuning], list[Timer]]
) -> dict[int, float]:
    """Milliseconds with each choice, measured in turns, so that a disturbance affects all of them."""
    with ExitStack() as stack:
        calls = {
            choice: [stack.enter_context(timer) for timer in timers(replace(tuning, **{name: choice}))]
            for choice in choices
        }
        least = _least_in_turns({(choice, i): call for choice in choices for i, call in enumerate(calls[choice])})
    return {choice: sum(least[choice, i] for i in range(len(calls[choice]))) for choice in choices}


def best(costs_ms: Mapping[int, float], usual: int) -> int:
    """The cheapest choice, or the usual one when the cheapest saves no more than MARGIN."""
    cheapest = min(costs_ms, key=lambda choice: costs_ms[choice])
    return cheapest if costs_ms[cheapest] < (1 - MARGIN) * costs_ms[usual] else usual


def fewest(costs_ms: Mapping[int, float]) -> int:
    """The smallest choice that costs no more than FILLS times the cheapest."""
    least = min(costs_ms.values())
    return min(choice for choice, cost in costs_ms.items() if cost <= FILLS * least)


def _least_in_turns(calls: Mapping[Name, Callable[[], float]]) -> dict[Name, float]:
    """The least of each call's times, since a disturbance can only make a copy slower. The first round warms up."""
    rounds = [{name: call() for name, call in calls.items()} for _ in range(1 + ROUNDS)][1:]
    return {name: min(found[name] for found in rounds) for name in calls}


class _Bench:
    """Scratch memory of one geometry, and timed copies in it."""

    def __init__(self, device: int, geometry: Geometry) -> None:
        self._device, self._geometry = device, geometry
        parts = max(1, SCRATCH_BYTES // geometry.part_bytes)
        self._blocks = min(parts * geometry.part_blocks, max(1, SCRATCH_BYTES // geometry.block_bytes))
        bytes_ = self._blocks * geometry.block_bytes
        slot_bytes = -(-geometry.part_bytes // _core.SLOT_ALIGN) * _core.SLOT_ALIGN
        ensure_keys(slot_bytes)
        self._slot_bytes = slot_bytes
        self._host = _core.CudaBuffer(device=device, bytes=parts * slot_bytes, host=True)
        # Runs have a gap between them, because adjacent runs would be copied as one.
        run_stride = geometry.run_bytes + (_GAP_BYTES if geometry.run_count > 1 else 0)
        block_stride = run_stride * geometry.run_count
        self._paged = _core.CudaBuffer(
            device=device, bytes=geometry.planes * self._blocks * block_stride, host=False
        )
        planes = [
            (
                self._paged.address + plane * self._blocks * block_stride,
                block_stride, geometry.run_bytes, geometry.run_count, run_stride,
            )
            for plane in range(geometry.planes)
        ]
        self._layout = _core.PagedLayout(planes, num_blocks=self._blocks, block_tokens=1)
        self._watch = _core.CudaStopwatch(device=device)
        self._bytes = bytes_

    def staged(self, tuning: CopyTuning, *, store: bool, passes: int = 1) -> Timer:
        """Times staged copies of the scratch, `passes` times in one call."""
        tuning = replace(tuning, direct_load_bytes=0, direct_store_bytes=0)
        return self._copies(tuning, store, self._bytes, passes=passes)

    def long_both_ways(self, tuning: CopyTuning) -> list[Timer]:
        return [self.staged(tuning, store=store, passes=PASSES) for store in (False, True)]

    def background_store(self, tuning: CopyTuning, *, passes: int = 1) -> Timer:
        """Times stores of the scratch as connectors make them, `passes` times in one call."""
        return self._copies(tuning.for_stores(), True, self._bytes, passes=passes)

    def direct(self, tuning: CopyTuning, size_bytes: int, *, store: bool) -> Timer:
        tuning = replace(tuning, direct_load_bytes=self._bytes, direct_store_bytes=self._bytes)
        return self._copies(tuning, store, size_bytes)

    def direct_both_ways(self, tuning: CopyTuning) -> list[Timer]:
        return [self.direct(tuning, DIRECT_SIZES[3], store=store) for store in (False, True)]

    def crossover_bytes(self, tuning: CopyTuning, *, store: bool) -> int:
        """The largest size for which a direct copy is no slower. Larger ones come first: small ones are noisy."""
        staged_tuning = replace(tuning, direct_load_bytes=0, direct_store_bytes=0)
        for size in reversed(DIRECT_SIZES):
            if size > self._bytes:
                continue
            with self.direct(tuning, size, store=store) as direct, self._copies(staged_tuning, store, size) as staged:
                least = _least_in_turns({"direct": direct, "staged": staged})
            if least["direct"] <= least["staged"]:
                return size
        return 0

    def share(self, tuning: CopyTuning, *, store: bool) -> tuple[float, float]:
        """(speed of copies of the whole scratch, relative to plain copies of the same bytes; bytes a second of plain
        copies)."""

        def plain() -> float:
            to, from_ = self._paged.address, self._host.address
            self._watch.start()
            for _ in range(PASSES):
                self._watch.copy(*((from_, to) if store else (to, from_)), self._bytes, to_device=not store)
            return self._watch.stop_ms()

        storing, passes = self.background_store, PASSES
        chosen = storing(tuning, passes=passes) if store else self.staged(tuning, store=False, passes=passes)
        with chosen as copies:
            least = _least_in_turns({"plain": plain, "copies": copies})
        return least["plain"] / least["copies"], PASSES * self._bytes / least["plain"] * 1e3

    @contextmanager
    def _copies(
        self, tuning: CopyTuning, store: bool, size_bytes: int, *, passes: int = 1
    ) -> Iterator[Callable[[], float]]:
        """Times a call that copies about `size_bytes`, in whole blocks, `passes` times."""
        copier = _core.CudaCopier(device=self._device, **tuning.for_core())
        layout = copier.add_layout(self._layout, part_blocks=self._geometry.part_blocks)
        blocks = min(self._blocks, max(1, size_bytes // self._geometry.block_bytes))
        slots, ids, starts = array("Q"), array("q"), array("q", [0])
        firsts = range(0, blocks, self._geometry.part_blocks)
        for first in list(firsts) * passes:
            slots.append(self._host.address + len(slots) % len(firsts) * self._slot_bytes)
            # Scattered like an engine's blocks: _STRIDE shares no factor with the number of blocks.
            last = min(first + self._geometry.part_blocks, blocks)
            ids.extend(block * _STRIDE % self._blocks for block in range(first, last))
            starts.append(len(ids))
        skips = array("q", bytes(8 * len(slots)))

        def copy_ms() -> float:
            stream = self._watch.stream
            self._watch.start()
            if store:
                copier.gather(layout, slots, ids, starts, after=stream).order(stream)
            else:
                copier.scatter(layout, slots, ids, starts, skips, after=stream).order(stream)
            return self._watch.stop_ms()

        try:
            yield copy_ms
        finally:
            copier.close()


_GAP_BYTES: Final = 128
_STRIDE: Final = 7919  # prime: no number of scratch blocks is a multiple of it in practice


# ------------------------------------------------------------------ the file


def _digest(uuid: str, driver: int, geometry: Geometry) -> str:
    """Part of the file's name: another GPU, driver, kernel, geometry or FORMAT has another file."""
    identity = [FORMAT, uuid, driver, _core.cuda_kernels(), list(asdict(geometry).values())]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _read(path: Path) -> Calibration | None:
    """The calibration in a file. None when there is no such file, or it has another format or is damaged."""
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            return None
        geometry = Geometry(**data.pop("geometry"))
        tuning = CopyTuning(**data.pop("tuning"))
        return Calibration(geometry=geometry, tuning=tuning, **data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("calibration %s is not readable and will be made again: %s", path.name, error)
        return None


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Writes the whole file or nothing. Raises OSError."""
    data = {"format": FORMAT, **{one.name: getattr(calibration, one.name) for one in fields(calibration)}}
    data["geometry"], data["tuning"] = asdict(calibration.geometry), asdict(calibration.tuning)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.replace(path)


@contextmanager
def calibrating(directory: Path) -> Iterator[None]:
    """A lock that one calibrating process holds at a time. Raises OSError when the directory cannot be made."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / "calibrating.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
