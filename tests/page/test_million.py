"""A server that holds a million chunks, fewer without --sweeps: the page shows them, and neither gets slow."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from api_helpers import OPERATOR, PATIENCE_S, ServerProcess, attach
from page_helpers import OpenPage
from playwright.sync_api import expect

from kvdock.client.client import Client
from kvdock.protocol import schemas as s

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.page

GIB = 1 << 30
SLOT_BYTES = 4096
CHUNKS, SWEPT = 250_000, 1_000_000
"""Without and with --sweeps."""
PER_CALL = 1000
CALLS, ROUNDS, MOST_ROUNDS = 20, 10, 300


@pytest.fixture(scope="module")
def chunks(sweeps: bool) -> int:
    return SWEPT if sweeps else CHUNKS


@pytest.fixture(scope="module")
def full_server(chunks: int) -> Iterator[ServerProcess]:
    """Each part has a slot of 4 KiB."""
    pool_bytes = -(-chunks * SLOT_BYTES // GIB) * GIB
    free = shutil.disk_usage("/dev/shm").free
    if free < pool_bytes + GIB:
        pytest.skip(f"/dev/shm has {free / GIB:.1f} GiB free, {chunks:,} chunks want {pool_bytes // GIB + 1}")
    sizes: dict[str, object] = {
        "pool_bytes": pool_bytes, "segment_bytes": GIB, "table_records": chunks * 11 // 10, "heartbeat_s": 60.0,
    }
    with ServerProcess(**sizes) as server, Client(server.unix, timeout_s=PATIENCE_S) as client:
        engine = attach(client, groups=(s.Group(part_bytes=SLOT_BYTES),))
        source = random.Random(1)
        stored = 0
        while stored < chunks:
            keys = source.randbytes(32 * PER_CALL)
            body = s.Reserve(session=engine.session, member=engine.member, store=f"s{stored}", keys=keys)
            granted = client.reserve(body)
            assert granted.reservation is not None, granted
            done = [s.PartDone(chunk.index, 0, "0000000000000001") for chunk in granted.chunks]
            client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=done))
            stored += len(done)
        yield server
        engine.close()


def test_a_million_chunks_are_shown_and_kept_up_to_date(
    full_server: ServerProcess, chunks: int, open_page: OpenPage
) -> None:
    page = open_page(full_server.http, access_token=OPERATOR)
    with Client(full_server.unix) as client:
        ready = client.status().chunks.ready
    assert ready > 0.95 * chunks, "the pool's rounding may cost a few"
    expect(page.locator("#pool")).to_contain_text(f"{ready:,}")
    shown = page.get_by_text("updated ").first
    before = shown.inner_text()
    expect(shown).not_to_have_text(before)
    expect(page.locator("#pill")).to_have_text("Ready")


def test_the_status_of_a_million_chunks_costs_what_that_of_none_does(full_server: ServerProcess) -> None:
    """A walk over a million chunks takes some ten times as long as all else, over a quarter of them a third of it."""
    with ServerProcess(heartbeat_s=60.0) as empty, Client(empty.unix, timeout_s=PATIENCE_S) as of_none, \
            Client(full_server.unix, timeout_s=PATIENCE_S) as of_all:
        of_none.status()
        of_all.status()
        none_ns, all_ns = inf, inf
        for number in range(MOST_ROUNDS):  # a busy machine makes each longer, never shorter
            none_ns = min(none_ns, status_cost_ns(empty, of_none))
            all_ns = min(all_ns, status_cost_ns(full_server, of_all))
            if number >= ROUNDS and all_ns < 2 * none_ns:
                return
    pytest.fail(f"the status of a million chunks takes {all_ns / 1e6:.1f} ms, that of none {none_ns / 1e6:.1f}")


def status_cost_ns(server: ServerProcess, client: Client) -> int:
    """The processor time of the server's event loop for CALLS of status."""
    before_ns = loop_ns(server)
    for _ in range(CALLS):
        client.status()
    return loop_ns(server) - before_ns


def loop_ns(server: ServerProcess) -> int:
    """The processor time of the server's main thread so far."""
    return int(Path(f"/proc/{server.process.pid}/schedstat").read_text().split()[0])
