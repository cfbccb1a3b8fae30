"""`python -m bench.copy --device cuda --json`: copies on a GPU, compared with plain copies of the same run.

A share is the speed relative to one plain copy of as many bytes: by the GPU's clock, the median of paired ratios, with
checksums on. Every destination is poisoned first and compared byte by byte. Peers are one cudaMemcpyBatchAsync with an
entry for each fragment, and a cudaMemcpyAsync for each. Victims run beside copies: a memory-bound kernel (c = a + b),
and a copy of 256 bytes to the host, like that of an engine's tokens.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.cuda_rig import GIB, POISON, SHAPES, Case, Clock, Shape, ThreeSegments, in_turns, median_ratio, segments
from kvdock import _core
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier, CudaHandle
from kvdock.datapath.tuning import calibrate

cuda: Any = torch.cuda  # its classes have no types
ROUNDS = 9
CHUNK_ROUNDS = 40
VICTIM_BYTES = 1 << 30
PEER_BYTES = 128 << 20


def say(text: str) -> None:
    print(f"bench.copy: {text}", file=sys.stderr, flush=True)


class Bench:
    """Measures copies on one GPU; `figures` holds the results so far."""

    def __init__(self, memory: ThreeSegments, device: int, seed: int) -> None:
        self.memory, self.device, self.seed = memory, device, seed
        self.clock = Clock(device)
        self.plain_on_gpu = _core.CudaBuffer(device=device, bytes=GIB, host=False)
        self.figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(device), "seed": seed}

    def case(self, shape: Shape, total_bytes: int = GIB, salt: int = 0) -> Case:
        return Case(shape, self.memory, total_bytes, self.device, self.seed + salt)

    def tuning(self, shape: Shape) -> CopyTuning:
        made = calibrate(_core.cuda_devices()[self.device], shape)
        say(made.describe())
        self.figures[f"tuning_{shape.name}"] = {**asdict(made.tuning), "took_s": made.took_s}
        return made.tuning

    def plain_ms(self, to_device: bool, size: int) -> float:
        """Time of one plain copy. For more bytes than the segment has, it copies fewer and scales the time."""
        moved = min(size, self.memory.plain_bytes, GIB)
        gpu, host = self.plain_on_gpu.address, self.memory.plain_at
        to, from_ = (gpu, host) if to_device else (host, gpu)
        return self.clock.ms(lambda: self.clock.plain(to, from_, moved, to_device=to_device)) * size / moved

    # ------------------------------------------------------------------ whole transfers

    def shares(self, shape: Shape) -> None:
        case, tuning = self.case(shape), self.tuning(shape)
        load, store = (CudaCopier(case.layout, device=self.device, tuning=tuning) for _ in range(2))
        parts = case.copies(case.verify(load))
        case.paged.fill_(POISON)
        pairs = in_turns(lambda: self.plain_ms(True, case.bytes), lambda: self.clock.load_ms(load, parts), ROUNDS)
        self.figures[f"scatter_share_{shape.name}"] = round(median_ratio(pairs), 4)
        case.compare("the timed scatter")
        case.poison_slots()
        pairs = in_turns(lambda: self.plain_ms(False, case.bytes), lambda: self.clock.store_ms(store, parts), ROUNDS)
        self.figures[f"gather_share_{shape.name}"] = round(median_ratio(pairs), 4)
        case.compare("the timed gather")
        self.figures["staging_mib"] = (load.staging_bytes + store.staging_bytes) >> 20
        self._submission(case, load, parts)
        for copier in (load, store):
            copier.close()
        say(f"{shape.name}: {case.parts} parts of {shape.part_bytes / 2**20:.1f} MiB verified and timed")

    def _submission(self, case: Case, copier: CudaCopier, parts: list[PartCopy]) -> None:
        took = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            handle = copier.scatter(parts)
            took.append((time.perf_counter() - began) * 1e3)
            handle.wait(None)
        if case.shape.name == "32k":
            self.figures["submit_1gib_ms"] = round(statistics.median(took[1:]), 4)
            self.figures["submit_1gib_parts"] = case.parts
        elif case.shape.name == "1k":
            self.figures["submit_1gib_1k_ms"] = round(statistics.median(took[1:]), 4)
            self.figures["submit_1gib_1k_parts"] = case.parts

    def ceilings(self) -> None:
        for name, to_device in (("h2d", True), ("d2h", False)):
            ms = statistics.median(self.plain_ms(to_device, GIB) for _ in range(ROUNDS))
            self.figures[f"memcpy_{name}_gb_s"] = round(GIB / ms / 1e6, 2)

    def duplex(self, shape: Shape, tuning: CopyTuning) -> None:
        """Loads and stores at once, half a GiB each, four times; compared with two plain copies at once."""
        cases = [self.case(shape, GIB // 2, salt) for salt in (1, 2)]
        # Both cases draw from the same slots, so the second gets those that the first left.
        taken = set(cases[0].slots)
        cases[1].slots = [
            slot for slot in self.memory.slots(shape.part_bytes, 10**9, np.random.default_rng(self.seed))
            if slot not in taken
        ][: cases[1].parts]
        copiers = [CudaCopier(case.layout, device=self.device, tuning=tuning) for case in cases]
        sums = [case.verify(copier) for case, copier in zip(cases, copiers, strict=True)]
        parts = [case.copies(one) for case, one in zip(cases, sums, strict=True)]
        other, half = Clock(self.device), GIB // 2

        def ours() -> float:
            began = time.perf_counter()
            handles = []
            for _ in range(4):
                handles += [copiers[0].scatter(parts[0]), copiers[1].gather(parts[1])]
            for handle in handles:
                handle.wait(None)
            took_s = time.perf_counter() - began
            if not all(result.ok for handle in handles for result in handle.result()):
                raise RuntimeError("a timed copy has wrong checksums")
            return took_s

        def plain() -> float:
            gpu, host = self.plain_on_gpu.address, self.memory.plain_at
            size = min(half, self.memory.plain_bytes // 2)
            began = time.perf_counter()
            for _ in range(4):
                self.clock.plain(gpu, host, size, to_device=True)
                other.plain(host + half - 4096, gpu + half, size, to_device=False)
            torch.cuda.synchronize(self.device)
            return (time.perf_counter() - began) * half / size

        cases[0].paged.fill_(POISON)
        cases[1].poison_slots()
        torch.cuda.synchronize()
        pairs = in_turns(plain, ours, ROUNDS)
        for case in cases:
            case.compare("both directions at once")
        self.figures["duplex_share"] = round(median_ratio(pairs), 4)
        self.figures["duplex_memcpy_gb_s"] = round(4 * GIB / statistics.median(one for one, _ in pairs) / 1e9, 1)
        for copier in copiers:
            copier.close()
        say("both directions at once")

    # ------------------------------------------------------------------ single chunks

    def chunks(self) -> None:
        for name, planes in (("32mib", 64), ("2mib", 4)):
            shape = Shape(planes, 32 << 10, 1, 16, name)
            case = self.case(shape, 4 * shape.part_bytes)
            copier = CudaCopier(case.layout, device=self.device, tuning=self.tuning(shape))
            part = case.copies(case.verify(copier))[:1]
            over = {}
            for direction, timed, to_device in (
                ("load", self.clock.load_ms, True), ("store", self.clock.store_ms, False)
            ):
                plain = partial(self.plain_ms, to_device, shape.part_bytes)
                pairs = in_turns(partial(timed, copier, part), plain, CHUNK_ROUNDS)
                over[direction] = statistics.median((ours_ms - plain_ms) * 1e3 for ours_ms, plain_ms in pairs)
                self.figures[f"chunk_{name}_{direction}_over_memcpy_us"] = round(over[direction], 1)
            self.figures[f"chunk_{name}_over_memcpy_us"] = round(max(over.values()), 1)
            copier.close()
        say("single chunks")

    # ------------------------------------------------------------------ beside other work

    def victims(self, shape: Shape, tuning: CopyTuning) -> None:
        case = self.case(shape)
        copier = CudaCopier(case.layout, device=self.device, tuning=tuning)
        parts = case.copies(case.verify(copier))
        a, b, c = (torch.zeros(VICTIM_BYTES // 4, device=f"cuda:{self.device}") for _ in range(3))
        stream = cuda.Stream(self.device)
        gpu, host, size = self.plain_on_gpu.address, self.memory.plain_at, self.memory.plain_bytes

        def victim_ms() -> float:
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record()
                for _ in range(40):
                    torch.add(a, b, out=c)
                end.record()
            end.synchronize()
            return float(begin.elapsed_time(end))

        def beside(start: Callable[[], Callable[[], bool]]) -> float:
            busy = start()
            time.sleep(0.003)  # until the copies run
            took = victim_ms()
            if not busy():
                raise RuntimeError("the copies ended before the victim")
            while busy():
                time.sleep(0.001)  # the next figure wants an idle bus
            torch.cuda.synchronize(self.device)
            return took

        def ours(call: Callable[[list[PartCopy]], CudaHandle]) -> Callable[[], Callable[[], bool]]:
            def start() -> Callable[[], bool]:
                last = [call(parts) for _ in range(6)][-1]
                return lambda: not last.done()

            return start

        def plain(to_device: bool) -> Callable[[], Callable[[], bool]]:
            def start() -> Callable[[], bool]:
                to, from_ = (gpu, host) if to_device else (host, gpu)
                for _ in range(6):
                    self.clock.plain(to, from_, size, to_device=to_device)
                own = cuda.ExternalStream(self.clock.stream, self.device)
                return lambda: not own.query()

            return start

        victim_ms()  # its kernel is loaded at the first call
        for name, start in (
            ("load", ours(copier.scatter)), ("store", ours(copier.gather)),
            ("memcpy_h2d", plain(True)), ("memcpy_d2h", plain(False)),
        ):
            pairs = in_turns(partial(beside, start), victim_ms, ROUNDS)
            self.figures[f"victim_slowdown_{name}"] = round(median_ratio(pairs), 4)
        copier.close()
        say("victims")

    def tokens(self, shape: Shape, tuning: CopyTuning) -> None:
        """Microseconds that a small copy to the host takes: alone, and while 1 GiB is copied there too, in pieces like
        those of staged stores. One small copy follows the other, so a few of them wait until the large copy ends, for a
        long time."""
        case = self.case(shape)
        background, usual = (
            CudaCopier(case.layout, device=self.device, tuning=one)
            for one in (tuning.for_stores(), replace(tuning, direct_store_bytes=0))
        )
        case.verify(background)
        parts, own = case.copies([None] * case.parts), cuda.ExternalStream(self.clock.stream, self.device)
        on_gpu, on_host = torch.ones(64, device=f"cuda:{self.device}"), torch.zeros(64).pin_memory()
        stream, piece = cuda.Stream(self.device), 16 << 20

        def plain() -> Callable[[], bool]:
            for at in range(0, self.memory.plain_bytes - piece, piece):
                self.clock.plain(self.memory.plain_at + at, self.plain_on_gpu.address + at, piece, to_device=False)
            return lambda: not own.query()

        def stored(copier: CudaCopier) -> Callable[[], bool]:
            handle = copier.gather(parts)
            return lambda: not handle.done()

        def small_us() -> float:
            began = time.perf_counter()
            with torch.cuda.stream(stream):
                on_host.copy_(on_gpu, non_blocking=True)
            stream.synchronize()
            return (time.perf_counter() - began) * 1e6

        alone = [small_us() for _ in range(200)][100:]
        self.figures["small_d2h_us_alone"] = round(statistics.median(alone), 1)
        for name, start in (
            ("store", partial(stored, background)), ("staged_store", partial(stored, usual)), ("memcpy_d2h", plain),
        ):
            took = []
            for _ in range(ROUNDS):
                torch.cuda.synchronize(self.device)
                busy = start()
                while busy():
                    took.append(small_us())
            ways = {"p50": statistics.median(took), "p90": sorted(took)[len(took) * 9 // 10], "max": max(took)}
            self.figures[f"small_d2h_us_beside_{name}"] = {way: round(us, 1) for way, us in ways.items()}
        case.poison_slots()
        ours = partial(self.clock.store_ms, background, parts)
        pairs = in_turns(partial(self.plain_ms, False, case.bytes), ours, ROUNDS)
        self.figures[f"gather_share_{shape.name}_for_stores"] = round(median_ratio(pairs), 4)
        case.compare("the timed gather of stores")
        for copier in (background, usual):
            copier.close()
        say("small copies")

    # ------------------------------------------------------------------ peers

    def peers(self, shape: Shape) -> None:
        case = self.case(shape, PEER_BYTES)
        at_block = case.paged.data_ptr() + np.arange(shape.planes).reshape(1, -1, 1) * case.paged[0].nbytes
        blocks = (at_block + case.ids.numpy().reshape(case.parts, 1, -1) * shape.run_bytes).reshape(-1)
        per_part = np.arange(shape.planes * shape.part_blocks) * shape.run_bytes
        slots = (np.array(case.slots, dtype=np.uint64).reshape(-1, 1) + per_part.astype(np.uint64)).reshape(-1)
        for direction, to, from_, to_device in (
            ("load", blocks.astype(np.uint64), slots, True), ("store", slots, blocks.astype(np.uint64), False)
        ):
            ways: dict[str, Callable[[], object]] = {
                "memcpy_per_fragment": partial(
                    self._each, to.tolist(), from_.tolist(), shape.run_bytes, to_device
                ),
            }
            batch = batch_copies(to, from_, shape.run_bytes, self.clock.stream)
            if batch is not None:
                ways["memcpy_batch"] = batch
            for name, way in ways.items():
                case.fill_slots()
                case.paged.random_(0, 256)  # so that whatever is not copied differs
                plain = partial(self.plain_ms, to_device, case.bytes)
                key = f"{name}_{direction}_share_{shape.name}"
                try:
                    self.figures[key] = round(median_ratio(in_turns(plain, partial(self.clock.ms, way), 3)), 4)
                    case.compare(name)
                except RuntimeError as error:
                    say(f"{name}: {error}")
                    self.figures[key] = None
        say(f"peers at {shape.name}")

    def _each(self, to: list[int], from_: list[int], size: int, to_device: bool) -> None:
        for to_one, from_one in zip(to, from_, strict=True):
            self.clock.plain(to_one, from_one, size, to_device=to_device)


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: sources are read in stream order, without hints."""

    _fields_ = (("source_access_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def batch_copies(to: Any, from_: Any, size: int, stream: int) -> Callable[[], object] | None:
    """One cudaMemcpyBatchAsync of CUDA 13 with an entry for each fragment; None when torch brings no CUDA 13."""
    try:
        call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        say(f"no cudaMemcpyBatchAsync: {error}")
        return None
    pointers = ctypes.POINTER(ctypes.c_uint64)
    targets, sources = np.ascontiguousarray(to), np.ascontiguousarray(from_)
    sizes = np.full(len(targets), size, dtype=np.uint64)
    attributes, first = _Attributes(1), ctypes.c_size_t(0)

    def copy() -> None:
        status = call(
            targets.ctypes.data_as(pointers), sources.ctypes.data_as(pointers), sizes.ctypes.data_as(pointers),
            ctypes.c_size_t(len(targets)), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1),
            ctypes.c_void_p(stream),
        )
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync: error {status}")

    return copy


def measure(seed: int, device: int = 0) -> dict[str, object]:
    torch.cuda.set_device(device)
    torch.manual_seed(seed)
    torch.zeros(1, device=f"cuda:{device}")
    with segments() as (pool_id, infos):
        memory = ThreeSegments(pool_id, infos, device)
        try:
            bench = Bench(memory, device, seed)
            bench.ceilings()
            for shape in SHAPES:
                bench.shares(shape)
                torch.cuda.empty_cache()
            largest = next(shape for shape in SHAPES if shape.name == "32k")
            tuning = bench.tuning(largest)
            bench.duplex(largest, tuning)
            bench.chunks()
            bench.victims(largest, tuning)
            bench.tokens(largest, tuning)
            for shape in SHAPES:
                if shape.name in ("4k", "32k"):
                    bench.peers(shape)
            return bench.figures
        finally:
            memory.close()
