"""What the vLLM connector counts, and how it adds up: needs no vLLM."""

from __future__ import annotations

import pickle
import sys
import threading

import msgspec
import pytest

from kvdock.connectors.plans import LoadPiece, LoadPlan, StorePiece, StorePlan
from kvdock.connectors.vllm.figures import METRICS, CopyFigures, Data, Figures, merge, summary
from kvdock.protocol.schemas import Group, Manifest, Part, WritePart

MANIFEST = Manifest(
    model="m", kv_dtype="f16", layers=2, kv_heads=1, head_size=8, chunk_tokens=32, block_tokens=16,
    tensor_parallel=2, writers=2,
    groups=(Group(part_bytes=1000), Group(kind="window", window_tokens=40, part_bytes=10)),
)
PART = Part(group=0, writer=0, segment=0, offset=0, length=1, checksum="0" * 16)
WRITE = WritePart(group=0, writer=0, segment=0, offset=0, length=1)


def load_plan(local: int, hit: int) -> LoadPlan:
    """Full attention has every chunk behind `local`, the window the last."""
    chunks = range(local // 32, hit // 32)
    pieces = [LoadPiece(chunk, 0, (PART,), (1, 2), 0) for chunk in chunks]
    return LoadPlan("r", "lease", local, hit, 32, (*pieces, LoadPiece(chunks[-1], 1, (PART,), (1, 2), 0)))


def test_what_was_taken_is_counted_once() -> None:
    figures = Figures()
    figures.add("load_bytes", 5)
    figures.add("lookup_seconds", 0.5)
    figures.add("lookup_seconds", 0.25)
    assert figures.take() == {"load_bytes": 5, "lookup_seconds": [0.5, 0.25]}
    assert figures.take() == {}


def test_a_gauge_is_told_when_it_changes() -> None:
    figures = Figures()
    told = []
    for value in (1, 1, 0, 0, 1):
        figures.state("attached", value)
        told.append(figures.take())
    assert told == [{"attached": 1}, {}, {"attached": 0}, {}, {"attached": 1}]


def test_nothing_is_no_figure() -> None:
    figures = Figures()
    figures.add("load_bytes", 0)
    assert figures.take() == {}


def test_no_count_is_lost_between_threads() -> None:
    figures, total = Figures(), 0

    def count() -> None:
        for _ in range(2000):
            figures.add("load_bytes", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            total += int(figures.take().get("load_bytes", 0))  # type: ignore[arg-type]  # a counter
    finally:
        sys.setswitchinterval(usual_s)
    assert total + int(figures.take().get("load_bytes", 0)) == 8000  # type: ignore[arg-type]  # a counter


def test_a_load_that_fell_short_counts_what_is_there() -> None:
    figures = CopyFigures(MANIFEST, ranks=(0,))
    figures.loaded(load_plan(32, 128), 128, 0.5)
    assert figures.take() == {"load_tokens": 96, "load_bytes": 3 * 1000 + 10, "load_seconds": [0.5]}
    figures.loaded(load_plan(32, 128), 64, 0.5)
    assert figures.take() == {"load_tokens": 32, "load_bytes": 1000, "load_seconds": [0.5]}


def test_ranks_together_count_each_token_once_and_each_byte() -> None:
    total: Data = {}
    plan = StorePlan("r", "reservation", 64, tuple(StorePiece(at, 0, (WRITE,), (1, 2)) for at in range(2)))
    for rank, ready in ((0, 0), (1, 2)):  # the last to commit publishes
        figures = CopyFigures(MANIFEST, (rank,))
        figures.loaded(load_plan(0, 32), 32, 0.5)
        figures.stored(plan, ready, 0.25)
        merge(total, figures.take())
    assert total == {
        "load_tokens": 32, "load_bytes": 2 * 1010, "load_seconds": [0.5, 0.5],
        "store_tokens": 64, "store_bytes": 2 * 2 * 1000, "store_seconds": [0.25, 0.25],
    }


def test_a_sum_leaves_its_parts_as_they_were_and_gauges_are_not_added() -> None:
    one: Data = {"load_seconds": [1.0], "attached": 1, "load_bytes": 1}
    total: Data = {}
    merge(total, one)
    merge(total, {"load_seconds": [2.0], "attached": 0, "load_bytes": 2})
    assert total == {"load_seconds": [1.0, 2.0], "attached": 0, "load_bytes": 3}
    assert one == {"load_seconds": [1.0], "attached": 1, "load_bytes": 1}


def test_the_log_line_says_what_happened_and_nothing_else() -> None:
    assert summary({}) == {}
    assert summary({
        "load_bytes": 3 * 10**9, "load_seconds": [0.05, 0.1], "load_failures": 1, "lookup_seconds": [0.001, 0.002],
        "attached": 0,
    }) == {
        "Loads": 2, "Load MB": 3000, "Avg load GB/s": 20, "Failed loads": 1, "Lookups": 2, "Max lookup ms": 2.0,
        "Server attached": 0,
    }
    assert summary({"store_bytes": 10**6, "store_seconds": [0.001], "stores_dropped": 2, "fence_seconds": 0.5}) == {
        "Stores": 1, "Store MB": 1, "Avg store GB/s": 1, "Dropped stores": 2, "Waited for stores ms": 500,
    }


@pytest.mark.parametrize("name", METRICS)
def test_every_figure_travels(name: str) -> None:
    figures = Figures()
    if METRICS[name].kind == "gauge":
        figures.state(name, 1)
    else:
        figures.add(name, 1)
    data = figures.take()
    assert set(data) == {name}
    assert pickle.loads(pickle.dumps(data)) == msgspec.msgpack.decode(msgspec.msgpack.encode(data)) == data
