"""Several KV groups against a real server: one record a chunk, for all groups or not at all; windows declared absent.

The model has full attention and windows of 24 and 72 tokens; chunks are 64. Blocks of group g are numbered from
40 * g, so that a test speaks of block i of a request and means one in each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from api_helpers import MIB, ServerProcess, eventually, unique
from connector_helpers import BLOCK, CHUNK, PER_CHUNK, Rig, Spectator, engine_over, kvdock_of, tokens_of
from engine_helpers import make_engine, poison, prompt, run_one, sampling

from kvdock import _core
from kvdock.client.client import Client
from kvdock.connectors.errors import LayoutMismatchError
from kvdock.connectors.interface import LoadDone
from kvdock.connectors.worker import WorkerConnector
from kvdock.datapath.copy import Copier
from kvdock.datapath.cuda import CopyTuning
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.engine.config import preset
from kvdock.engine.kv_cache import KVCache
from kvdock.protocol.schemas import listed_id
from kvdock.protocol.wire_types import MAX_ENTRIES, MAX_STORE_KEYS

SETTINGS = preset("tiny-hybrid3")
WINDOWS = [None, 24, 72]
SHARE = 40
Table = list[list[int | None]]


@pytest.fixture
def rig(server: ServerProcess) -> Iterator[Rig]:
    kv = KVCache(SETTINGS)
    with Rig(server.unix, kv=kv, salt=unique("groups")) as one:
        one.fill(1)
        yield one


@pytest.fixture
def spectator(client: Client, rig: Rig) -> Iterator[Spectator]:
    with Spectator(client, rig.connector.session.manifest) as one:
        yield one


def table_of(blocks: range, hit: int = 0) -> Table:
    """One list a group; None for what the windows leave behind of a prefix of `hit` tokens."""
    firsts = [0 if window is None else max(0, hit - window) // BLOCK for window in WINDOWS]
    return [
        [SHARE * group + block if at >= first else None for at, block in enumerate(blocks)]
        for group, first in enumerate(firsts)
    ]


def store(rig: Rig, tokens: Sequence[int], table: Table, request: str = "store") -> None:
    read = rig.connector.begin_store(request, tokens, table, len(tokens))
    rig.wait_store(request, read)
    rig.connector.finished(request)


def load(rig: Rig, request: str, table: Table, local: int, hit: int) -> LoadDone:
    rig.connector.begin_load(request, table, local, hit)
    return rig.wait_load(request)


def without(table: Table, group: int, chunk: int) -> Table:
    """One block of a chunk is gone in a group."""
    changed = [list(column) for column in table]
    changed[group][chunk * PER_CHUNK] = None
    return changed


def assert_loaded(rig: Rig, found: Table, stored: Table, local: int) -> None:
    for group, (column, wanted) in enumerate(zip(found, stored, strict=True)):
        for index, (block, source) in enumerate(zip(column, wanted, strict=False)):
            if block is not None and index >= local // BLOCK:
                assert source is not None
                assert torch.equal(rig.blocks([block]), rig.blocks([source])), f"block {index} of group {group}"


@pytest.mark.parametrize("local", [0, 48, 64, 112, 176])
def test_a_load_fills_what_each_group_needs_and_nothing_else(rig: Rig, local: int) -> None:
    tokens = tokens_of(1, 3)
    store(rig, tokens, table_of(range(12)))
    assert rig.lookup("r", tokens, local) == 192
    target = table_of(range(20, 32), 192)
    before = rig.blocks(range(128))
    assert load(rig, "r", target, local, 192).valid_tokens == 192
    assert_loaded(rig, target, table_of(range(12)), local)
    written = {block for column in target for block in column[local // BLOCK :] if block is not None}
    others = [block for block in range(128) if block not in written]
    assert torch.equal(rig.blocks(others), before[:, others])


def test_only_the_parts_that_a_window_still_needs_are_planned(rig: Rig) -> None:
    tokens = tokens_of(2, 4)
    store(rig, tokens, table_of(range(16)))
    assert rig.lookup("r", tokens) == 256
    begun = rig.connector.scheduler.lookups.begin_load("r", table_of(range(16, 32), 256), 0, 256)
    assert begun is not None
    attachment, plan = begun
    planned = [(piece.group, piece.chunk, piece.skip_blocks) for piece in plan.pieces]
    assert sorted(planned) == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 3, 2), (2, 2, 3), (2, 3, 0)]
    assert rig.connector.worker.load(attachment, plan) == 256
    attachment.release()


@pytest.mark.parametrize(("group", "chunk", "hit"), [(1, 3, 192), (2, 2, 128), (2, 1, 256), (1, 2, 256)])
def test_a_window_that_is_absent_where_a_prefix_ends_shortens_the_hit(
    rig: Rig, group: int, chunk: int, hit: int
) -> None:
    """Window 24 needs the last chunk, window 72 the last two; what lies before is not required."""
    tokens = tokens_of(3, 4)
    store(rig, tokens, without(table_of(range(16)), group, chunk))
    assert rig.lookup("r", tokens) == hit
    target = table_of(range(20, 20 + hit // BLOCK), hit)
    assert load(rig, "r", target, 0, hit).valid_tokens == hit
    assert_loaded(rig, target, table_of(range(16)), 0)


def test_a_refused_reservation_ends_the_store_there() -> None:
    """Nobody could find what lies behind it."""
    with (
        ServerProcess(session_grants=1) as server, Client(server.unix) as client,
        Rig(server.unix, kv=KVCache(SETTINGS), salt=unique("groups")) as rig,
    ):
        rig.fill(1)
        tokens, table = tokens_of(12, 4), table_of(range(16))
        store(rig, tokens, table)
        assert rig.lookup("holder", tokens) == 256, "its lease is the one grant that a session may have"
        made = client.status().counters["reservations"]
        offer = rig.connector.scheduler.stores.begin_store("late", tokens_of(13, 4), without(table, 2, 1), 256)
        assert offer is not None and len(offer.batches) > 1
        assert rig.connector.scheduler.stores.reserve(offer, offer.batches[0]) is None
        rig.connector.finished("holder")
        eventually(lambda: not client.leases().leases)
        assert rig.connector.scheduler.stores.reserve(offer, offer.batches[1]) is None
        assert client.status().counters["reservations"] == made
        offer.attachment.release()
        rig.connector.finished("late")


def test_a_store_with_more_groups_replaces_one_that_had_fewer(rig: Rig, client: Client) -> None:
    tokens = tokens_of(4, 2)
    store(rig, tokens, without(table_of(range(8)), 2, 1))
    assert rig.lookup("r", tokens) == CHUNK
    rig.connector.finished("r")
    store(rig, tokens, table_of(range(8)))
    assert rig.lookup("s", tokens) == 2 * CHUNK
    before = client.status().counters["stored_chunks"]
    store(rig, tokens, without(table_of(range(8)), 2, 1))
    assert client.status().counters["stored_chunks"] == before, "one with fewer groups is no news"
    rig.connector.finished("s")


def test_a_store_longer_than_one_reservation_and_one_commit_takes_several() -> None:
    chunks = MAX_STORE_KEYS + 76
    column = [index % SHARE for index in range(chunks * PER_CHUNK)]  # an engine's blocks, over and over
    table: Table = [[SHARE * group + block for block in column] for group in range(len(WINDOWS))]
    assert MAX_STORE_KEYS * len(WINDOWS) > MAX_ENTRIES
    with ServerProcess(pool_bytes=256 * MIB, segment_bytes=256 * MIB) as server, Client(server.unix) as client, \
            Rig(server.unix, kv=KVCache(SETTINGS)) as rig:
        rig.fill(1)
        tokens = tokens_of(5, chunks)
        store(rig, tokens, table)
        counters = client.status().counters
        assert (counters["stored_chunks"], counters["reservations"]) == (chunks, 2)
        assert rig.lookup("r", tokens) == len(tokens)


def test_a_chunk_whose_full_attention_is_not_there_ends_the_store(rig: Rig) -> None:
    tokens = tokens_of(5, 3)
    read = rig.connector.begin_store("r", tokens, without(table_of(range(12)), 0, 1), len(tokens))
    assert [len(blocks) for blocks in read] == [PER_CHUNK] * 3
    rig.wait_store("r", read)
    assert rig.lookup("s", tokens) == CHUNK


def test_one_group_that_cannot_be_copied_publishes_no_group(rig: Rig, client: Client) -> None:
    tokens = tokens_of(6, 2)
    ready = client.status().chunks.ready
    rig.connector.worker._storers[1].close()
    store(rig, tokens, table_of(range(8)))
    chunks = client.status().chunks
    assert (chunks.ready, chunks.reserved) == (ready, 0)
    assert rig.lookup("r", tokens) == 0


@pytest.mark.parametrize(
    ("group", "chunk", "valid"), [(0, 0, 0), (0, 2, 128), (1, 3, 192), (2, 2, 128), (2, 3, 192)]
)
def test_a_damaged_part_of_any_group_fails_its_chunk_and_is_not_offered_again(
    rig: Rig, client: Client, spectator: Spectator, group: int, chunk: int, valid: int
) -> None:
    tokens = tokens_of(7, 4)
    store(rig, tokens, table_of(range(16)))
    before = client.status().counters["mismatches"]
    slots = spectator.slots(tokens)  # chunk by chunk; the windows' only where this hit needs them
    per_chunk = {0: [0], 1: [0], 2: [0, 2], 3: [0, 1, 2]}
    named = [(index, held) for index, groups in per_chunk.items() for held in groups]
    assert [part.group for part in slots] == [held for _, held in named]
    spectator.flip(slots[named.index((chunk, group))], 8000)
    assert rig.lookup("r", tokens) == 256
    assert load(rig, "r", table_of(range(20, 36), 256), 0, 256).valid_tokens == valid
    assert client.status().counters["mismatches"] == before + 1
    assert rig.lookup("r", tokens) == valid, "what failed was offered again to the same request"
    assert rig.lookup("another", tokens) == valid, "the damaged record is still there"
    rig.connector.finished("another")


def test_bytes_that_a_window_skips_in_a_chunk_are_hashed_all_the_same(rig: Rig, spectator: Spectator) -> None:
    """Window 24 wants two blocks of the last chunk; damage in the other two must be seen, or nobody ever would."""
    tokens = tokens_of(8, 1)
    store(rig, tokens, table_of(range(4)))
    [part] = [part for part in spectator.slots(tokens) if part.group == 1]
    spectator.flip(part, 3)
    assert rig.lookup("r", tokens) == CHUNK
    assert load(rig, "r", table_of(range(20, 24), CHUNK), 0, CHUNK).valid_tokens == 0


def test_a_load_of_another_length_than_answered_is_refused_and_its_lease_ends(rig: Rig, client: Client) -> None:
    """A shorter prefix needs parts of the windows that nobody leased."""
    tokens = tokens_of(9, 4)
    store(rig, tokens, table_of(range(16)))
    assert rig.lookup("r", tokens) == 256
    shorter = table_of(range(20, 28), 128)
    assert rig.connector.scheduler.lookups.begin_load("r", shorter, 16, 128) is None, "no rank gets the lease"
    assert load(rig, "r", shorter, 16, 128) == LoadDone("r", 16)
    rig.connector.finished("r")
    eventually(lambda: not [one for one in client.leases().leases if one.session == listed_id(rig.attachment.session)])
    assert rig.lookup("r", tokens[:128]) == 128, "fewer tokens asked for is the way to a shorter hit"
    assert load(rig, "r", table_of(range(20, 28), 128), 16, 128).valid_tokens == 128


def test_what_a_preempted_request_stores_begins_where_its_new_hit_ended(rig: Rig, client: Client) -> None:
    """Asked often before it resumes: one lease. Other blocks; more tokens; only what was not hit is offered."""
    tokens = tokens_of(10, 4)
    store(rig, tokens[: 2 * CHUNK], table_of(range(8)), "r")
    for _ in range(5):
        assert rig.lookup("r", tokens) == 2 * CHUNK
    leases = [one for one in client.leases().leases if one.session == listed_id(rig.attachment.session)]
    assert len(leases) == 1
    assert load(rig, "r", table_of(range(20, 28), 2 * CHUNK), 0, 2 * CHUNK).valid_tokens == 2 * CHUNK
    table = table_of(range(20, 36), 2 * CHUNK)
    read = rig.connector.begin_store("r", tokens, table, 3 * CHUNK)
    assert read == tuple(tuple(SHARE * group + block for block in range(28, 32)) for group in range(3))
    rig.wait_store("r", read)


def test_a_layout_for_each_group_is_wanted(rig: Rig) -> None:
    with pytest.raises(LayoutMismatchError, match="layouts: found 0, wanted one for each of 3 groups"):
        WorkerConnector(rig.connector.session, [])


@pytest.mark.parametrize(
    "given", [None, CopyTuning(background_store_ctas=3, direct_store_bytes=0)], ids=["measured", "given"]
)
def test_stores_are_told_to_leave_the_engine_alone_and_loads_are_not(rig: Rig, given: CopyTuning | None) -> None:
    measured, told = CopyTuning(background_store_ctas=1), []

    class Watched(Device):
        def tuning(self, layouts: Sequence[PagedLayout], *, chunk_tokens: int) -> CopyTuning:
            assert chunk_tokens == CHUNK
            return measured

        def open_copiers(
            self, layouts: Sequence[PagedLayout], *, chunk_tokens: int, threads: int, tuning: CopyTuning | None = None,
            packing: Sequence[_core.PackedShape | None] | None = None,
        ) -> list[Copier]:
            assert chunk_tokens == CHUNK
            told.append(tuning)
            return super().open_copiers(
                layouts, chunk_tokens=chunk_tokens, threads=threads, tuning=tuning, packing=packing
            )

    layout = paged_layout(rig.kv.format, rig.kv.tensors, block_tokens=rig.kv.block_tokens)
    WorkerConnector(rig.connector.session, [layout] * 3, device=Watched(), tuning=given).close()
    wanted = given or measured
    assert told == [wanted, wanted.for_stores()]


def test_the_manifest_names_each_groups_window(rig: Rig) -> None:
    groups = rig.connector.session.manifest.groups
    assert [(group.kind, group.window_tokens) for group in groups] == [("full", 0), ("window", 24), ("window", 72)]


@pytest.mark.parametrize("model", ["tiny-hybrid2", "tiny-hybrid3"])
def test_an_engine_whose_window_is_damaged_computes_from_the_shorter_hit(
    server: ServerProcess, client: Client, model: str
) -> None:
    settings, tokens, salt = preset(model), prompt(11, 300), unique(model)
    writer = engine_over(server.unix, settings, salt=salt)
    wanted = run_one(writer, tokens, sampling(6))
    assert writer.drain(20.0)
    manifest = kvdock_of(writer).session.manifest
    writer.close()
    with Spectator(client, manifest) as spectator:
        part = [part for part in spectator.slots(tokens) if part.group == 1][-1]
        spectator.flip(part, 100)
    reader = engine_over(server.unix, settings, salt=salt)
    found = run_one(reader, tokens, sampling(6))
    assert reader.drain(20.0)
    reader.close()
    assert (found.metrics.loaded_tokens, found.metrics.computed_prefill_tokens) == (192, 108)
    assert found.output_tokens == wanted.output_tokens
    alone = make_engine(settings)
    poison(alone.kv)
    assert found.output_tokens == run_one(alone, tokens, sampling(6)).output_tokens
