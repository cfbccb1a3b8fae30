"""CUDA graphs that a thread of the engine captures while others copy, register memory and call torch.

While a graph is captured in the global mode, which is torch's, the driver refuses many calls in all other threads and
drops the graph. Each test has a real capture under way, and replays what was captured.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import pytest
import torch
from api_helpers import eventually
from bytes_helpers import Paged, Shape
from cuda_helpers import STAGED, WAYS, cuda, cuda_copier, needs_gpu, new_stream, slots_in, stream_of

from kvdock import _core
from kvdock.api.pool.lock import PoolLock
from kvdock.api.pool.segments import SegmentPool
from kvdock.connectors.background import Background
from kvdock.datapath.copy import PartCopy
from kvdock.datapath.cuda import CopyTuning, CudaCopier
from kvdock.datapath.errors import CudaError
from kvdock.datapath.layout import paged_layout
from kvdock.datapath.segments import AttachedSegments, CudaRegister, SegmentRegistrar
from kvdock.datapath.threads import Pool, new_thread
from kvdock.datapath.tuning import Geometry, calibrate

pytestmark = needs_gpu
T = TypeVar("T")
GIB = 1 << 30
SEGMENTS = 4
LONG_S = 120.0
GLOBAL, RELAXED = 0, 2
SHAPE = Shape(layers=3, blocks=9, tokens=4, heads=2, head_size=256)
IDS = [5, 0, 3, 8, 6]


class Graph:
    """A graph that adds 1 to each of its numbers twice."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(4096, device="cuda")
        self._numbers += 1  # what is compiled or loaded for this is there before the capture
        self._graph = cuda.CUDAGraph()

    @contextmanager
    def captured(self) -> Iterator[int]:
        """Yields the stream that is being captured."""
        with cuda.graph(self._graph, capture_error_mode="global"):
            self._numbers += 1
            yield stream_of(cuda.current_stream())
            self._numbers += 1

    def is_whole(self) -> bool:
        self._numbers.zero_()
        for _ in range(3):
            self._graph.replay()
        cuda.synchronize()
        return bool((self._numbers == 6).all())


def beside_a_capture(work: Callable[[], T], threads: Callable[[int], ThreadPoolExecutor] = ThreadPoolExecutor) -> T:
    """What `work` returns, which another thread does from beginning to end while a graph is being captured. The graph
    must be whole."""
    graph = Graph()
    with threads(1) as others:
        with graph.captured():
            done = others.submit(work)
            wait([done], LONG_S)
        found = done.result(0.0)
    assert graph.is_whole()
    return found


def capture_mode() -> int:
    """This thread's."""
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(GLOBAL)
    assert exchange(ctypes.byref(mode)) == 0
    found = mode.value
    assert exchange(ctypes.byref(mode)) == 0
    return found


def filled() -> Paged:
    paged = Paged("NL_X_NB_TWO_BS_NH_HS", torch.bfloat16, SHAPE, device="cuda")
    paged.fill_random(int(np.random.default_rng().integers(1 << 31)))
    return paged


@pytest.mark.parametrize("way", WAYS)
def test_a_copier_opens_stores_loads_and_closes_beside_a_capture(way: str) -> None:
    paged, target = filled(), filled()
    wanted = paged.reference(IDS)
    with slots_in("host", 1, len(wanted)) as slots:
        address = slots.address(0)

        def copied() -> bool:
            copier = CudaCopier(paged.layout, device=0, tuning=WAYS[way])
            (stored,) = copier.gather([PartCopy(address, IDS)]).result()
            loader = copier.beside(target.layout)
            (loaded,) = loader.scatter([PartCopy(address, IDS, 0, stored.checksum)]).result()
            copier.close()
            return loaded.ok

        assert beside_a_capture(copied)
        assert slots.read(0)[: len(wanted)] == wanted
        assert target.reference(IDS) == wanted


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_the_thread_that_captures_run_at_once_and_are_no_part_of_its_graph(way: str) -> None:
    paged, graph = filled(), Graph()
    wanted, other = paged.reference(IDS), new_stream()
    with slots_in("host", 1, len(wanted)) as slots, cuda_copier(paged.layout, WAYS[way]) as copier:
        with graph.captured():
            handle = copier.gather([PartCopy(slots.address(0), IDS)], after=stream_of(other))
            handle.order(stream_of(other))
            assert handle.wait(LONG_S)
            assert capture_mode() == GLOBAL, "the engine's thread has the mode that it had"
        assert slots.read(0)[: len(wanted)] == wanted
        assert graph.is_whole()


def test_a_stream_that_is_being_captured_is_refused_and_its_graph_stays_whole() -> None:
    paged, graph = filled(), Graph()
    wanted = paged.reference(IDS)
    with slots_in("host", 1, len(wanted)) as slots, cuda_copier(paged.layout, STAGED) as copier:
        parts = [PartCopy(slots.address(0), IDS)]
        with graph.captured() as stream:
            with pytest.raises(CudaError, match="being captured"):
                copier.gather(parts, after=stream)
            handle = copier.gather(parts)
            with pytest.raises(CudaError, match="being captured"):
                handle.order(stream)
            assert handle.wait(LONG_S)
        assert slots.read(0)[: len(wanted)] == wanted
        assert graph.is_whole()


def test_copies_are_measured_and_memory_comes_and_goes_beside_a_capture() -> None:
    layout = filled().layout
    found = beside_a_capture(lambda: calibrate(_core.cuda_devices()[0], Geometry.of(layout, 4)))
    assert isinstance(found.tuning, CopyTuning) and found.load_share > 0


def test_threads_of_ours_call_torch_beside_a_capture() -> None:
    """As SGLang's linker does: it waits for an event, and reads block ids that are on the GPU."""
    numbers = torch.arange(5, device="cuda")
    event = cuda.Event()
    event.record()
    _core.cuda_devices()  # a connector has opened the driver before it starts a thread

    def called() -> list[int]:
        event.synchronize()
        fresh: list[int] = (torch.empty(5, dtype=torch.int64).pin_memory().cuda().zero_() + numbers).tolist()
        return fresh

    assert beside_a_capture(called, Pool) == [0, 1, 2, 3, 4]


def test_threads_of_ours_are_relaxed_and_no_other_is_for_longer_than_a_call() -> None:
    found: list[int] = []
    _core.cuda_devices()
    background = Background("test")
    background.run(lambda: found.append(capture_mode())).result(LONG_S)
    background.close()
    thread = new_thread("test", lambda: found.append(capture_mode()))
    thread.start()
    thread.join(LONG_S)
    assert found == [RELAXED, RELAXED]
    with ThreadPoolExecutor(1) as others:
        others.submit(lambda: _core.CudaStopwatch(device=0).start()).result(LONG_S)
        assert others.submit(capture_mode).result(LONG_S) == GLOBAL
    assert capture_mode() == GLOBAL


class GrowingPool:
    """A pool of several GiB, of which one segment after the other is registered, written to and read."""

    def __init__(self, pool: SegmentPool) -> None:
        self._pool, self._attached = pool, AttachedSegments(pool.pool_id)
        self._registrar = SegmentRegistrar(self._attached, CudaRegister(0))
        self._tensors = [torch.empty((512, 16, 512), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        self._layout = paged_layout("NL_X_NB_BS_HS", self._tensors, block_tokens=16)
        self.loads = self.right = 0
        """How many there were, and how many gave what was stored."""

    def run(self) -> None:
        """In a thread of its own."""
        generator = torch.Generator(device="cuda").manual_seed(secrets.randbits(31))
        copier = CudaCopier(self._layout, device=0, tuning=CopyTuning())
        half = self._layout.num_blocks // 2
        first, second = list(range(half)), list(range(half, 2 * half))
        size = self._layout.part_bytes(half)
        for _ in range(SEGMENTS):
            info = self._pool.grow()
            self._attached.attach(info)
            self._registrar.wake()
            eventually(partial(self._is_registered, info.id), LONG_S)
            for at in range(0, info.bytes - info.data_offset - size, 8 * size):
                for tensor in self._tensors:
                    tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)
                cuda.current_stream().synchronize()
                address = self._attached.address(info.id, info.data_offset + at, size)
                (stored,) = copier.gather([PartCopy(address, first)]).result()
                (loaded,) = copier.scatter([PartCopy(address, second, 0, stored.checksum)]).result()
                self.loads += 1
                self.right += loaded.ok and all(
                    torch.equal(tensor.view(torch.int16)[:half], tensor.view(torch.int16)[half : 2 * half])
                    for tensor in self._tensors
                )
        copier.close()
        for info in self._attached.segments:
            self._registrar.unregister(info.id)
            self._attached.detach(info.id)

    def _is_registered(self, segment: int) -> bool:
        return self._registrar.pinned_through > segment

    def close(self) -> None:
        self._registrar.close()
        self._attached.close()


def test_graphs_are_captured_one_after_the_other_while_a_pool_is_registered_grows_and_is_copied_from_and_to() -> None:
    pool_id = secrets.randbits(64)
    lock = PoolLock.create(pool_id, address="a test's")
    pool = SegmentPool(pool_id, limit_bytes=SEGMENTS * GIB)
    growing, others = GrowingPool(pool), torch.zeros(4096, device="cuda")
    done: Future[None]
    captured = 0
    try:
        with Pool(1, "kvdock-test") as threads:
            done = threads.submit(growing.run)
            while not done.done():
                graph = Graph()
                with graph.captured():
                    for _ in range(300):
                        others += 1
                assert graph.is_whole()
                captured += 1
            done.result()
    finally:
        growing.close()
        pool.close()
        lock.close(unlink=True)
    assert growing.right == growing.loads >= 8 * SEGMENTS
    assert captured > SEGMENTS
