"""Two GPUs at once, each a worker process over the same registered segments: compared with two plain copies at once."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np
import torch

from bench.cuda_rig import GIB, SHAPES, Case, Clock, ThreeSegments, segments
from kvdock import _core
from kvdock.datapath.cuda import CudaCopier
from kvdock.shm.checksum import checksum
from kvdock.shm.segment import SegmentInfo

ROUNDS = 7
PASSES = 4
"""Copies in a round: enough that the rounds of the two workers overlap except at their ends."""


def work(device: int, pool_id: int, infos: list[SegmentInfo], seed: int, start: Barrier, results: Connection) -> None:
    """Times plain copies and ours in rounds that both workers begin together; sends the medians in ms a byte."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    memory = ThreeSegments(pool_id, infos, device)
    shape = next(shape for shape in SHAPES if shape.name == "mla_18k")
    case = Case(shape, memory, GIB // 2, device, seed)
    # `shared`: slots that both workers read, as ranks read MLA parts; `own`: slots that only this one reads.
    places = memory.slots(shape.part_bytes, 10**9, np.random.default_rng(seed))
    shared, own = places[: case.parts], places[case.parts * (1 + device) : case.parts * (2 + device)]
    copier = CudaCopier(case.layout, device=device)
    clock, buffer = Clock(device), _core.CudaBuffer(device=device, bytes=GIB // 2, host=False)
    if device == 0:
        case.slots = shared
        case.verify(copier)
    start.wait()
    parts = {}
    for name, case.slots in (("own", own), ("shared", shared)):
        if name == "own":
            case.verify(copier)
        sums = [checksum(memoryview(memory.bytes_at(slot, shape.part_bytes))) for slot in case.slots]
        parts[name] = case.copies(sums)
    half = memory.plain_bytes // 2
    mine = memory.plain_at + device * (half // 4096 * 4096)
    size = min(half // 4096 * 4096, case.bytes)

    def passes(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: clock.ms(lambda: [call() for _ in range(PASSES)])

    ways = {
        "memcpy_load": passes(lambda: clock.plain(buffer.address, mine, size, to_device=True)),
        "memcpy_store": passes(lambda: clock.plain(mine, buffer.address, size, to_device=False)),
        "load_shared": passes(lambda: copier.scatter(parts["shared"], after=clock.stream).order(clock.stream)),
        "load": passes(lambda: copier.scatter(parts["own"], after=clock.stream).order(clock.stream)),
        "store": passes(lambda: copier.gather(parts["own"], after=clock.stream).order(clock.stream)),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start.wait()
            took[name].append(way() / PASSES / (size if name.startswith("memcpy") else case.bytes))
    for part in parts["shared"]:
        if not copier.scatter([part]).result()[0].ok:
            raise AssertionError("a part that both read has other bytes")
    results.send({name: statistics.median(values) for name, values in took.items()})
    copier.close()
    memory.close()


def measure(seed: int) -> dict[str, object]:
    """The rates of both workers together, divided by those of two plain copies at once."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2, timeout=120)
    with segments() as (pool_id, infos):
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        workers = [
            context.Process(target=work, args=(device, pool_id, infos, seed, start, pipes[device][1]))
            for device in range(2)
        ]
        for worker, (_, results) in zip(workers, pipes, strict=True):
            worker.start()
            results.close()  # so that a worker that ends without figures is noticed
        try:
            found = [pipe.recv() for pipe, _ in pipes]
        except EOFError as error:
            raise RuntimeError("a worker ended without figures: see above") from error
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    rates = {name: sum(1 / one[name] for one in found) for name in found[0]}
    return {
        "two_gpu_memcpy_h2d_gb_s": round(rates["memcpy_load"] / 1e6, 1),
        "two_gpu_memcpy_d2h_gb_s": round(rates["memcpy_store"] / 1e6, 1),
        "two_gpu_mla_load_share": round(rates["load_shared"] / rates["memcpy_load"], 4),
        "two_gpu_load_share": round(rates["load"] / rates["memcpy_load"], 4),
        "two_gpu_store_share": round(rates["store"] / rates["memcpy_store"], 4),
    }
