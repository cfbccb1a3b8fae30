"""`kvdock bench`: how fast a running server answers and copies on this machine, beside plain memcpy; some seconds.

Two engines of the benchmark's own attach. One stores many tiny chunks and times lookups of them. The other stores and
loads synthetic KV through the connector, into blocks that are wiped in between and compared afterwards, so that a
fast copy of wrong bytes cannot score. Everything stored is deleted at the end.
"""

from __future__ import annotations

import random
import secrets
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table

from kvdock import _core
from kvdock.cli.bench_engine import BLOCK_TOKENS, BenchEngine, Shape
from kvdock.cli.operator import print_json, reached
from kvdock.cli.outcome import FAILED, CommandError
from kvdock.cli.words import size
from kvdock.client.client import Client
from kvdock.protocol import schemas as s

LOOKUP_KEYS = (2, 32, 512)
TINY = Shape(layers=1, heads=1, head_size=16, chunk_blocks=1)
"""Chunks of 1 KiB: their number matters here, not their size."""
WARM_UP = 20
COPY_ROUNDS = 5
POOL_SHARE = 0.5
"""The benchmark uses at most this share of what one session may hold."""


class Figures(msgspec.Struct, kw_only=True):
    """What `--json` prints. `gb_s`: 10⁹ bytes a second."""

    lookup_2_p50_ms: float
    lookup_2_p99_ms: float
    lookup_32_p50_ms: float
    lookup_32_p99_ms: float
    lookup_512_p50_ms: float
    lookup_512_p99_ms: float
    store_gb_s: float
    """From `begin_store` to its `StoreDone`: reserve, copy, checksum, commit."""
    load_gb_s: float
    """From `begin_load` to its `LoadDone`: the blocks are filled and checked, and the lease is released."""
    memcpy_gb_s: float
    """memcpy of the same pieces with as many threads."""
    moved_bytes: int
    """Stored once and loaded once, per round."""


def run_bench(
    server: str, *, rounds: int, mib: int, threads: int, as_json: bool, console: Console
) -> None:
    """Raises CommandError when no server answers, when the pool has no room or wrong bytes are loaded; ApiError."""
    with reached(server) as client:
        status = client.status()
        if status.status != "ok":
            raise CommandError(f"the server is not ready: {', '.join(status.reasons)}", FAILED)
        budget_bytes = min(mib << 20, _room_bytes(client))
        lookups = _lookups(client, rounds)
        chunks = budget_bytes // Shape().chunk_bytes
        figures = Figures(
            **lookups, **_copies(client, chunks, threads), moved_bytes=chunks * Shape().chunk_bytes
        )
    if as_json:
        print_json(console, figures)
    else:
        console.print(_table(figures))


def _room_bytes(client: Client) -> int:
    limits = client.config().limits
    return int(POOL_SHARE * min(limits.session_cap, limits.total_cap) * limits.pool_bytes)


# --------------------------------------------------------------------------- lookups


def _lookups(client: Client, rounds: int) -> dict[str, float]:
    """Times round trips, the sizes in turn. Each call also releases the lease of the call before."""
    tokens = _fresh_tokens(max(LOOKUP_KEYS), TINY)
    took_ms: dict[int, list[float]] = {count: [] for count in LOOKUP_KEYS}
    with _engine(client, TINY, max(LOOKUP_KEYS), threads=1) as engine, engine.stored(client, tokens) as keys:
        if engine.hit_chunks(tokens) < len(keys):
            raise CommandError(_NO_ROOM, FAILED)
        # The connector keeps this attachment alive; the leases end with its session.
        session, member = engine.attachment.session, engine.attachment.member
        for number in range(-WARM_UP, rounds):
            for count in LOOKUP_KEYS:
                body = s.Lookup(
                    session=session, member=member, request=f"bench-{count}-{number}", keys=b"".join(keys[:count])
                )
                began = time.perf_counter_ns()
                answer = engine.client.lookup(body)
                spent_ms = (time.perf_counter_ns() - began) / 1e6
                if answer.lease is None or len(answer.chunks) != count:
                    found = f"a lookup found {len(answer.chunks)} of {count} chunks"
                    raise CommandError(f"{found}: other engines use the pool; try when it is idle", FAILED)
                engine.client.release_later(answer.lease, session, [0])
                if number >= 0:
                    took_ms[count].append(spent_ms)
        engine.client.flush(session)
    return {
        f"lookup_{count}_p{percent}_ms": round(_quantile(spent, percent / 100), 4)
        for count, spent in took_ms.items() for percent in (50, 99)
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


# --------------------------------------------------------------------------- copies


def _copies(client: Client, chunks: int, threads: int) -> dict[str, float]:
    shape = Shape()
    if chunks < 1:
        raise CommandError(_NO_ROOM, FAILED)
    moved_bytes = chunks * shape.chunk_bytes
    store_s: list[float] = []
    load_s: list[float] = []
    plain_s: list[float] = []
    with _engine(client, shape, chunks, threads=threads) as engine:
        for _ in range(1 + COPY_ROUNDS):  # the first round, which maps the pool's pages, is left out
            tokens = _fresh_tokens(chunks, shape)
            engine.fill(secrets.randbits(32))
            before = engine.contents()
            began = time.perf_counter()
            with engine.stored(client, tokens):
                store_s.append(time.perf_counter() - began)
                if engine.hit_chunks(tokens) < chunks:
                    raise CommandError(_NO_ROOM, FAILED)
                engine.wipe()
                began = time.perf_counter()
                engine.load(chunks)
                load_s.append(time.perf_counter() - began)
                if engine.contents() != before:
                    raise CommandError("loaded bytes differ from those stored: do not use this build", FAILED)
            plain_s.append(_memcpy_s(engine, threads))
    return {
        "store_gb_s": _rate(moved_bytes, store_s),
        "load_gb_s": _rate(moved_bytes, load_s),
        "memcpy_gb_s": _rate(moved_bytes, plain_s),
    }


def _memcpy_s(engine: BenchEngine, threads: int) -> float:
    """Copies every run of the engine's blocks to its spare memory."""
    pieces, piece_bytes = engine.pieces()
    to = array("Q", range(engine.spare, engine.spare + len(pieces) * piece_bytes, piece_bytes))
    began = time.perf_counter()
    _core.memcpy_pieces(to, pieces, piece_bytes, threads=threads)
    return time.perf_counter() - began


def _rate(moved_bytes: int, spent_s: list[float]) -> float:
    return round(moved_bytes / statistics.median(spent_s[1:]) / 1e9, 2)


_NO_ROOM = "the pool has no room for the benchmark's chunks: try a smaller --mib, or an idle server"


def _fresh_tokens(chunks: int, shape: Shape) -> list[int]:
    """Random, so that their keys are in no pool."""
    source = random.Random(secrets.randbits(64))
    return [source.randrange(1 << 32) for _ in range(chunks * shape.chunk_tokens)]


@contextmanager
def _engine(client: Client, shape: Shape, chunks: int, *, threads: int) -> Iterator[BenchEngine]:
    engine = BenchEngine(client.address, shape, chunks * shape.chunk_tokens // BLOCK_TOKENS, threads=threads)
    try:
        yield engine
    finally:
        engine.close()


def _table(figures: Figures) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for count in LOOKUP_KEYS:
        p50, p99 = (getattr(figures, f"lookup_{count}_p{percent}_ms") for percent in (50, 99))
        table.add_row(f"lookup and lock {count} keys", f"{p50:.3f} ms", f"p99 {p99:.3f} ms")
    for name, rate in (("store", figures.store_gb_s), ("load", figures.load_gb_s)):
        share = f"{100 * rate / figures.memcpy_gb_s:.0f} % of memcpy"
        table.add_row(f"{name} {size(figures.moved_bytes)}", f"{rate:.2f} GB/s", share)
    table.add_row("plain memcpy", f"{figures.memcpy_gb_s:.2f} GB/s", "")
    return table
