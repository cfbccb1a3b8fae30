"""`kvdock bench`: how fast a running server answers lookups, and how fast stores and loads are beside plain memcpy.

The benchmark attaches two engines of its own. One stores many tiny chunks and times lookups of them. The other stores
and loads synthetic KV through the connectors. Its blocks are wiped in between and compared afterwards, so that a fast
copy of wrong bytes is an error. All stored chunks are deleted at the end.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import secrets
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvdock import _core
from kvdock.cli.client import TIMEOUT_S, delete, print_json, reached
from kvdock.cli.errors import FAILED, CommandError
from kvdock.cli.render import say, size
from kvdock.cli.status import state_in_words
from kvdock.client.client import Client
from kvdock.client.transport import Address
from kvdock.connectors.engine_connector import ConnectorSettings, open_worker, start
from kvdock.connectors.errors import RefusedError
from kvdock.connectors.interface import Hit, Pending
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment, Identity, SessionObserver
from kvdock.datapath.layout import PagedLayout, Plane
from kvdock.protocol import schemas as s

LOOKUP_KEYS = (2, 32, 512)
BLOCK_TOKENS = 16
WARM_UP = 20
COPY_ROUNDS = 5
ANSWER_S = 10.0
"""How long the thread that waits for a lookup sleeps at most; each call has a timeout of its own."""
POOL_SHARE = 0.5
"""The benchmark holds at most this share of the bytes that one session may hold."""
REQUEST = "bench"
_NO_ROOM = "the benchmark's chunks do not fit in the pool: try a smaller --mib, or an idle server"
_DISTURBED = "other engines use the pool, or it was drained or handed over; try again when it is idle"
_LOST = "the server was lost during the benchmark"


@dataclass(frozen=True)
class Shape:
    """The dimensions of the KV; by default those of a small model, with chunks of 2 MiB."""

    planes: int = 8
    run_bytes: int = 16 << 10
    """Bytes of one block in one plane."""
    chunk_blocks: int = 16

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * BLOCK_TOKENS

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.planes * self.run_bytes

    def manifest(self) -> s.Manifest:
        """Equal in every run, so that all runs share a namespace."""
        return s.Manifest(
            model=f"kvdock-bench-{self.chunk_bytes}", kv_dtype="bytes", layers=self.planes // 2, kv_heads=1,
            head_size=self.run_bytes // BLOCK_TOKENS, chunk_tokens=self.chunk_tokens, block_tokens=BLOCK_TOKENS,
            groups=(s.Group(part_bytes=self.chunk_bytes),),
        )


TINY = Shape(planes=2, run_bytes=512, chunk_blocks=1)
"""Chunks of 1 KiB, for lookups: only their number matters."""


def run_bench(server: str, *, rounds: int, mib: int, threads: int, as_json: bool, console: Console) -> None:
    """`--json` prints the figures of the table. `gb_s`: 10⁹ bytes per second; `moved_bytes`: the bytes that each round
    stores once and loads once. Raises CommandError when no server answers, when the pool is too full, and when wrong
    bytes were loaded, and ApiError."""
    with reached(server) as client:
        status = client.status()
        _require_own(client)
        if status.status == "not ready":
            raise CommandError(f"the server is {state_in_words(status)}", FAILED)
        limits = client.config().limits
        share, chunk_bytes = POOL_SHARE * min(limits.session_cap, limits.total_cap), Shape().chunk_bytes
        most = int(share * limits.pool_bytes) // chunk_bytes
        if not most:
            least = size(chunk_bytes / share) if share else "one whose session_cap and total_cap are above 0"
            raise CommandError(f"the pool is too small: found {size(limits.pool_bytes)}, wanted {least}", FAILED)
        lookups = _lookups(client, rounds)
        chunks = min(-(-(mib << 20) // chunk_bytes), most)
        figures = {**lookups, **_copies(client, chunks, threads), "moved_bytes": chunks * Shape().chunk_bytes}
    if as_json:
        print_json(console, figures)
    else:
        say(console, _table(figures))


def _require_own(client: Client) -> None:
    """Commands of root trust servers that its engines do not trust, which map their memory. Raises CommandError."""
    try:
        Address.parse(client.address, trusted_uid=client.trusted_uid).connect(TIMEOUT_S).close()
    except PermissionError as error:
        raise CommandError(f"the benchmark maps the pool, as engines do; {error}", FAILED) from error


class _Engine:
    """An engine without a model: paged memory, a layout over it, and both connectors.

    It is attached from its construction until close(). It owns `memory`, and a mapping of the same size for plain
    copies. Raises CommandError when the server refuses it.
    """

    def __init__(self, client: Client, shape: Shape, chunks: int, threads: int) -> None:
        self.shape, self.chunks, self._people, self._threads = shape, chunks, client, threads
        self.tokens: list[int] = []
        blocks = chunks * shape.chunk_blocks
        self.memory, self._spare = (mmap.mmap(-1, chunks * shape.chunk_bytes) for _ in range(2))
        self._spare[:] = bytes(len(self._spare))  # touches every page, so that no page fault is measured
        self._order = random.Random(7).sample(range(blocks), blocks)
        name, run = f"bench-{secrets.token_hex(8)}", shape.run_bytes
        self._bases = [_address_of(self.memory) + plane * blocks * run for plane in range(shape.planes)]
        planes: tuple[Plane, ...] = tuple((base, run, run, 1, run) for base in self._bases)
        core = _core.PagedLayout(planes, num_blocks=blocks, block_tokens=BLOCK_TOKENS)
        layout = PagedLayout("pages", "NHD", planes, blocks, BLOCK_TOKENS, [], core)
        self.session, self._worker = open_worker(
            ConnectorSettings(client.address, copy_threads=threads, trusted_uid=client.trusted_uid), shape.manifest(),
            Identity(name, name, label="kvdock bench", is_bench=True), [layout],
        )
        self._scheduler = SchedulerConnector(self.session)
        try:
            start(self.session, self._worker, SessionObserver(self._scheduler.lookups.keeps_lease))
        except RefusedError as error:
            raise CommandError(str(error), FAILED) from error

    def close(self) -> None:
        self._scheduler.close()
        self._worker.close()
        self.session.close()
        self.session.client.close()

    @contextmanager
    def stored(self) -> Iterator[tuple[Attachment, list[bytes]]]:
        """Stores all blocks under random tokens, whose keys no pool has; yields the keys, and deletes their chunks at
        the end."""
        source = random.Random(secrets.randbits(64))
        self.tokens = [source.randrange(1 << 32) for _ in range(self.chunks * self.shape.chunk_tokens)]
        offer = self._scheduler.stores.begin_store(REQUEST, self.tokens, [self._order], len(self.tokens))
        if offer is None:
            raise CommandError(_LOST, FAILED)
        keys = [key for batch in offer.batches for key in batch.keys]
        try:
            for batch in offer.batches:
                if (plan := self._scheduler.stores.reserve(offer, batch)) is not None:
                    self._worker.store(offer.attachment, plan)
            yield offer.attachment, keys
        finally:
            offer.attachment.release()
            self._scheduler.finished(REQUEST)
            delete(self._people, offer.attachment.namespace.hex(), [key.hex() for key in keys])

    def find(self) -> None:
        """Looks up the stored tokens. Raises CommandError unless all of them are found. `load` releases the lease;
        without it the lease ends with the session."""
        lookups = self._scheduler.lookups
        found = lookups.lookup(REQUEST, self.tokens, 0)
        while isinstance(found, Pending):
            lookups.wait_for_answer(ANSWER_S)
            found = lookups.lookup(REQUEST, self.tokens, 0)
        if not isinstance(found, Hit) or found.tokens < len(self.tokens):
            raise CommandError(_NO_ROOM, FAILED)

    def load(self) -> None:
        """Fills the blocks with what `find` found."""
        begun = self._scheduler.lookups.begin_load(REQUEST, [self._order], 0, len(self.tokens))
        if begun is None:
            raise CommandError(_LOST, FAILED)
        attachment, plan = begun
        self._worker.load(attachment, plan)
        self._worker.settle(attachment)
        attachment.release()

    def memcpy_s(self) -> float:
        """Seconds to copy every run of the blocks, in the order in which they are stored, to the spare mapping."""
        run, spare = self.shape.run_bytes, _address_of(self._spare)
        pieces = array("Q", (base + block * run for block in self._order for base in self._bases))
        to = array("Q", range(spare, spare + len(self._spare), run))
        began = time.perf_counter()
        _core.memcpy_pieces(to, pieces, run, threads=self._threads)
        return time.perf_counter() - began


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _lookups(client: Client, rounds: int) -> dict[str, float]:
    """Times round trips, one of each size in turn. Each call also releases the lease of the call before."""
    took_ms: dict[int, list[float]] = {count: [] for count in LOOKUP_KEYS}
    with closing(_Engine(client, TINY, max(LOOKUP_KEYS), threads=1)) as engine, engine.stored() as (at, keys):
        engine.find()
        asked, session, member = engine.session.client, at.session, at.member  # the leases end with the session
        for number in range(-WARM_UP, rounds):
            for count in LOOKUP_KEYS:
                body = s.Lookup(
                    session=session, member=member, request=f"bench-{count}-{number}", keys=b"".join(keys[:count])
                )
                began = time.perf_counter_ns()
                answer = asked.lookup(body)
                spent_ms = (time.perf_counter_ns() - began) / 1e6
                if answer.lease is None or len(answer.chunks) != count:
                    found = f"a lookup found {len(answer.chunks)} of {count} chunks"
                    raise CommandError(f"{found}: {_DISTURBED}", FAILED)
                asked.release_later(answer.lease, session, [0])
                if number >= 0:
                    took_ms[count].append(spent_ms)
        asked.flush(session)
    return {
        f"lookup_{count}_p{percent}_ms": round(sorted(spent)[len(spent) * percent // 100], 4)
        for count, spent in took_ms.items() for percent in (50, 99)
    }


def _copies(client: Client, chunks: int, threads: int) -> dict[str, float]:
    """Times stores (reserve, copy, checksum, commit), loads (copy, check, release) and a memcpy of the same pieces with
    as many threads."""
    spent_s: dict[str, list[float]] = {"store": [], "load": [], "memcpy": []}
    with closing(_Engine(client, Shape(), chunks, threads)) as engine:
        for _ in range(1 + COPY_ROUNDS):  # the first round maps the pool's pages and does not count
            engine.memory[:] = before = random.randbytes(len(engine.memory))
            began = time.perf_counter()
            with engine.stored():
                spent_s["store"].append(time.perf_counter() - began)
                engine.find()
                engine.memory[:] = bytes(len(engine.memory))
                began = time.perf_counter()
                engine.load()
                spent_s["load"].append(time.perf_counter() - began)
                if engine.memory[:] != before:
                    raise CommandError("loaded bytes differ from those stored: do not use this build", FAILED)
            spent_s["memcpy"].append(engine.memcpy_s())
    moved_bytes = chunks * Shape().chunk_bytes
    return {f"{name}_gb_s": round(moved_bytes / statistics.median(took[1:]) / 1e9, 2) for name, took in spent_s.items()}


def _table(figures: dict[str, float]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for count in LOOKUP_KEYS:
        p50, p99 = (figures[f"lookup_{count}_p{percent}_ms"] for percent in (50, 99))
        table.add_row(f"lookup and lease of {count} keys", f"{p50:.3f} ms", f"p99 {p99:.3f} ms")
    plain = figures["memcpy_gb_s"]
    for name in ("store", "load"):
        rate = figures[f"{name}_gb_s"]
        table.add_row(
            f"{name} {size(figures['moved_bytes'])}", f"{rate:.2f} GB/s", f"{100 * rate / plain:.0f} % of memcpy"
        )
    table.add_row("plain memcpy", f"{plain:.2f} GB/s", "")
    return table
