"""KV groups with blocks of their own sizes: what the server takes, what plans name, and which bytes a load writes.

All groups' blocks lie in one memory, as inference engines lay out hybrid models: a group of smaller blocks leaves the
rest of each unused, and nothing may touch it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import lcm

import msgspec
import pytest
import torch
from api_helpers import PATIENCE_S, ServerProcess, attach, manifest, unique
from connector_helpers import Rig
from hypothesis import given, settings, strategies as st

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.errors import LayoutMismatchError
from kvdock.connectors.interface import LoadDone
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import namespace_digest

LARGEST, WIDTH, LAYERS, BLOCKS = 32, 8, 2, 192
CHUNK = 64
Table = list[list[int | None]]


def hybrid(sizes: Sequence[int], windows: Sequence[int | None], chunk_tokens: int, **more: object) -> s.Manifest:
    groups = tuple(
        s.Group(
            kind="full" if window is None else "window", window_tokens=window or 0, block_tokens=size,
            part_bytes=chunk_tokens * WIDTH * 4 * LAYERS,
        )
        for size, window in zip(sizes, windows, strict=True)
    )
    return manifest(
        token_order="ND", chunk_tokens=chunk_tokens, block_tokens=lcm(*sizes), groups=groups, layers=LAYERS, **more
    )


def layouts_over(memory: torch.Tensor, sizes: Sequence[int]) -> list[PagedLayout]:
    return [paged_layout("NL_X_NB_BS_HS", [layer[:, :size] for layer in memory], block_tokens=size) for size in sizes]


class Mixed(Rig):
    """An engine process whose groups have blocks of different sizes. memory: (layers, blocks, 32 tokens, 8) int32."""

    def __init__(
        self, address: str, sizes: Sequence[int], windows: Sequence[int | None], *, salt: str, seed: int = 0,
        chunk_tokens: int = CHUNK,
    ) -> None:
        self.sizes, self.windows, self.chunk_tokens = sizes, windows, chunk_tokens
        self.memory = torch.randint(
            1 << 30, (LAYERS, BLOCKS, LARGEST, WIDTH), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
        )
        self.connector = EngineConnector(
            ConnectorSettings(address, timeout_s=PATIENCE_S), hybrid(sizes, windows, chunk_tokens, cache_salt=salt),
            Identity(unique("instance"), unique("member")), layouts_over(self.memory, sizes),
        )
        self.loads, self.stores = [], []

    def __enter__(self) -> Mixed:
        return self

    def table(self, source: random.Random, tokens: int, behind: int = 0) -> Table:
        """Blocks anywhere in the memory for `tokens` tokens; None for what the windows before `behind` left behind."""
        free = source.sample(range(BLOCKS), BLOCKS)
        return self.left_behind([[free.pop() for _ in range(-(-tokens // size))] for size in self.sizes], behind)

    def left_behind(self, table: Table, behind: int) -> Table:
        firsts = [
            0 if window is None else max(0, behind - window) // size
            for size, window in zip(self.sizes, self.windows, strict=True)
        ]
        return [
            [block if at >= first else None for at, block in enumerate(column)]
            for column, first in zip(table, firsts, strict=True)
        ]

    def put(self, request: str, tokens: Sequence[int], table: Table, computed: int) -> None:
        read = self.connector.begin_store(request, tokens, table, computed)
        if read:
            self.wait_store(request, read)

    def fill_table(self, request: str, table: Table, local: int, hit: int) -> LoadDone:
        self.connector.begin_load(request, table, local, hit)
        return self.wait_load(request)

    def after_loading(self, table: Table, local: int, hit: int, writer: Mixed, stored: Table) -> torch.Tensor:
        """The memory as it must be: whole blocks of [local, hit) as the writer had them, and nothing else changed."""
        wanted = self.memory.clone()
        for size, column, theirs in zip(self.sizes, table, stored, strict=True):
            for at in range(local // size, hit // size):
                block, source = column[at], theirs[at]
                if block is not None:
                    assert source is not None
                    wanted[:, block, :size] = writer.memory[:, source, :size]
        return wanted


@pytest.fixture
def pair(server: ServerProcess) -> Iterator[tuple[Mixed, Mixed]]:
    """Two engines of one model: full attention in blocks of 16 tokens, a window of 40 in blocks of 32."""
    salt = unique("sizes")
    with (
        Mixed(server.unix, (16, 32), (None, 40), salt=salt, seed=1) as writer,
        Mixed(server.unix, (16, 32), (None, 40), salt=salt, seed=2) as reader,
    ):
        yield writer, reader


def stored(writer: Mixed, tokens: Sequence[int]) -> Table:
    table = writer.table(random.Random(5), len(tokens))
    writer.put("store", tokens, table, len(tokens))
    return table


# --------------------------------------------------------------------------- one engine stores, another loads


@pytest.mark.parametrize("local", [0, 32, 64, 96, 160])
def test_a_load_fills_whole_blocks_of_each_groups_size_and_nothing_else(pair: tuple[Mixed, Mixed], local: int) -> None:
    writer, reader = pair
    tokens = list(range(200))
    theirs = stored(writer, tokens)
    assert reader.lookup("r", tokens, local) == 192
    table = reader.table(random.Random(6), 200, behind=192)
    assert [sum(block is None for block in column) for column in table] == [0, 4]
    wanted = reader.after_loading(table, local, 192, writer, theirs)
    assert reader.fill_table("r", table, local, 192).valid_tokens == 192
    assert torch.equal(reader.memory, wanted)


def test_a_plan_counts_blocks_of_each_group_in_its_own_size(pair: tuple[Mixed, Mixed]) -> None:
    writer, reader = pair
    tokens = list(range(128))
    stored(writer, tokens)
    assert reader.lookup("r", tokens, 32) == 128
    begun = reader.connector.scheduler.lookups.begin_load(
        "r", [[10, 11, 12, 13, 14, 15, 16, 17], [None, None, 22, 23]], 32, 128
    )
    assert begun is not None
    attachment, plan = begun
    assert [(piece.chunk, piece.group, piece.block_ids, piece.skip_blocks) for piece in plan.pieces] == [
        (0, 0, (0, 0, 12, 13), 2), (1, 0, (14, 15, 16, 17), 0), (1, 1, (22, 23), 0)
    ]
    attachment.release()


def test_a_store_counts_blocks_of_each_group_in_its_own_size(pair: tuple[Mixed, Mixed]) -> None:
    writer, _ = pair
    offer = writer.connector.scheduler.stores.begin_store(
        "w", list(range(150)), [[10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [None, 21, 22, 23, 24]], 150
    )
    assert offer is not None
    assert [(batch.groups, batch.block_ids) for batch in offer.batches] == [
        ((0,), (((10, 11, 12, 13),),)), ((0, 1), (((14, 15, 16, 17), (22, 23)),))
    ]
    assert offer.reads == ((10, 11, 12, 13, 14, 15, 16, 17), (22, 23))
    offer.attachment.release()


def test_local_tokens_that_end_inside_a_block_of_any_group_are_a_miss(pair: tuple[Mixed, Mixed]) -> None:
    """16 tokens are a block of one group and half a block of the other, which can be neither skipped nor written."""
    writer, reader = pair
    tokens = list(range(64))
    stored(writer, tokens)
    before = reader.memory.clone()
    table = reader.table(random.Random(7), 64, behind=64)
    assert reader.lookup("r", tokens, 16) == 16
    assert reader.lookup("s", tokens, 0) == 64
    assert reader.lookup("s", tokens, 16) == 16
    assert reader.fill_table("s", table, 16, 64) == LoadDone("s", 16)
    assert torch.equal(reader.memory, before)


def test_a_load_that_ends_inside_a_chunk_is_refused(server: ServerProcess) -> None:
    with Mixed(server.unix, (16, 32), (None, None), salt=unique("sizes")) as engine:
        tokens = list(range(128))
        stored(engine, tokens)
        before = engine.memory.clone()
        assert engine.lookup("r", tokens, 0) == 128
        assert engine.fill_table("r", engine.table(random.Random(8), 96), 0, 96) == LoadDone("r", 0)
        assert torch.equal(engine.memory, before)


GROUPS = st.lists(
    st.tuples(st.sampled_from((8, 16, 32)), st.one_of(st.none(), st.integers(1, 200))), min_size=1, max_size=3
)


@settings(max_examples=25, deadline=None)
@given(
    full=st.sampled_from((8, 16, 32)), others=GROUPS, chunk_steps=st.integers(1, 3), seed=st.integers(0, 1 << 32)
)
def test_whatever_the_sizes_a_hit_is_what_was_stored_and_a_load_writes_only_it(
    server: ServerProcess, full: int, others: list[tuple[int, int | None]], chunk_steps: int, seed: int
) -> None:
    sizes, windows = (full, *(size for size, _ in others)), (None, *(window for _, window in others))
    step, source, salt = lcm(*sizes), random.Random(seed), unique("sizes")
    chunk = step * chunk_steps
    tokens = list(range(source.randrange(chunk, 300 if chunk < 300 else 2 * chunk)))
    with (
        Mixed(server.unix, sizes, windows, salt=salt, chunk_tokens=chunk, seed=1) as writer,
        Mixed(server.unix, sizes, windows, salt=salt, chunk_tokens=chunk, seed=2) as reader,
    ):
        theirs, whole = writer.table(source, len(tokens)), set[tuple[int, int]]()
        computed = offered = 0
        while computed < len(tokens):  # steps of any length: windows may move on before a chunk is offered
            table = writer.left_behind(theirs, behind=computed)
            computed = min(len(tokens), computed + source.randrange(1, 3 * chunk))
            writer.put("w", tokens, table, computed)
            for at in range(offered, computed // chunk):
                whole |= {
                    (group, at) for group, (size, column) in enumerate(zip(sizes, table, strict=True))
                    if None not in column[at * chunk // size : (at + 1) * chunk // size]
                }
            offered = computed // chunk
        hit = longest(whole, windows, chunk, offered)
        local = source.randrange(len(tokens) // step + 1) * step
        assert reader.lookup("r", tokens, local) == max(hit, local)
        if hit > local:
            ours = reader.table(source, len(tokens), behind=hit)
            wanted = reader.after_loading(ours, local, hit, writer, theirs)
            assert reader.fill_table("r", ours, local, hit).valid_tokens == hit
            assert torch.equal(reader.memory, wanted)


def longest(whole: set[tuple[int, int]], windows: Sequence[int | None], chunk: int, chunks: int) -> int:
    """The longest prefix in tokens for which each group has every chunk that it looks back to."""
    for end in range(chunks, 0, -1):
        firsts = [0 if window is None else max(0, end * chunk - window) // chunk for window in windows]
        if all((group, at) in whole for group, first in enumerate(firsts) for at in range(first, end)):
            return end * chunk
    return 0


# --------------------------------------------------------------------------- manifests


def test_a_manifest_of_one_block_size_is_the_namespace_it_was_before_groups_had_sizes() -> None:
    """Golden: caches of engines that know nothing of groups' sizes stay theirs. It changes when the manifest loses a
    field that has a default, as `scale_mode`."""
    digest = namespace_digest(msgspec.to_builtins(manifest()))
    assert digest.hex() == "7cdf8a848a49598e51df41b704bca18701788a98051f5fe8ed5333347d544ff7"


def test_a_group_that_spells_out_the_manifests_size_is_in_the_same_namespace(client: Client) -> None:
    silent = attach(client)
    spelled = attach(client, groups=(s.Group(part_bytes=16384, block_tokens=4),))
    other = attach(client, groups=(s.Group(part_bytes=16384, block_tokens=2),))
    assert spelled.attached.namespace == silent.attached.namespace != other.attached.namespace
    for engine in (silent, spelled, other):
        engine.close()


@pytest.mark.parametrize("size", [3, 5, 8, 16])
def test_a_groups_size_that_does_not_divide_the_manifests_is_refused(client: Client, size: int) -> None:
    groups = (s.Group(part_bytes=16384), s.Group(part_bytes=16384, block_tokens=size))
    with pytest.raises(ApiError, match=r"groups\[1\]: the manifest's block_tokens is a multiple") as error:
        attach(client, groups=groups)
    assert (error.value.code, error.value.found, error.value.wanted) == ("bad_argument", size, "a divisor of 4")


@pytest.mark.parametrize("size", [0, -1, 65537])
def test_a_groups_size_out_of_range_is_refused(client: Client, size: int) -> None:
    with pytest.raises(ApiError) as error:
        attach(client, groups=(s.Group(part_bytes=16384, block_tokens=size),))
    assert error.value.code == "invalid_body"


def test_members_of_one_instance_agree_on_the_groups_sizes(client: Client) -> None:
    first = attach(client, groups=(s.Group(part_bytes=16384, block_tokens=2),))
    with pytest.raises(ApiError) as error:
        attach(client, instance=first.body.instance, ranks=[1], scheduler=False)
    assert error.value.code == "layout_mismatch"
    assert error.value.wanted == {
        "groups": [{"kind": "full", "window_tokens": 0, "part_bytes": 16384, "block_tokens": 2}]
    }
    first.close()


def test_a_layout_whose_blocks_are_not_as_the_manifest_says_is_refused(server: ServerProcess) -> None:
    memory = torch.zeros((LAYERS, BLOCKS, LARGEST, WIDTH), dtype=torch.int32)
    with pytest.raises(LayoutMismatchError, match="block tokens of group 1: found 16, wanted 32 as the manifest says"):
        EngineConnector(
            ConnectorSettings(server.unix), hybrid((16, 32), (None, 40), CHUNK), Identity("i", "m"),
            layouts_over(memory, (16, 16)),
        )
