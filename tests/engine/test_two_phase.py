"""Local hits and fresh blocks over several KV groups: no physical block is ever allocated twice.

Each contended scenario runs in both orders. In two phases it must succeed. In the other order
(Interleaved), one group's allocation takes another's hits, and that must be detected, or the scenario shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from engine_helpers import MemoryConnector, Pool, config, make_engine, prompt, run, run_one, sampling

from kvdock.engine.blocks import BlockManager, Hit, OutOfBlocks, Table, held
from kvdock.engine.config import FullAttention, GroupKind, SlidingWindow, preset
from kvdock.engine.engine import Engine

pytestmark = pytest.mark.two_phase

BLOCK = 16
FULL_AND_WINDOW = (FullAttention(), SlidingWindow(40))
FULL_AND_TWO_WINDOWS = (FullAttention(), SlidingWindow(24), SlidingWindow(72))


@dataclass(frozen=True)
class ChunkedLocal:
    """A kind that the engine does not have: a token attends to its own chunk of tokens."""

    tokens: int

    @property
    def reach(self) -> int:
        return self.tokens

    def first_seen(self, position: int) -> int:
        return position // self.tokens * self.tokens


@dataclass(frozen=True)
class State:
    """Like a recurrent layer: an entry for each block, and only the last one is needed."""

    reach = 1

    def first_seen(self, position: int) -> int:
        return position


OTHERS = (FullAttention(), ChunkedLocal(48), State())
KINDS: list[tuple[GroupKind, ...]] = [FULL_AND_WINDOW, FULL_AND_TWO_WINDOWS, OTHERS]


def name_of(kinds: object) -> str:
    return "-".join(type(kind).__name__ for kind in kinds) if isinstance(kinds, tuple) else ""


class Interleaved(BlockManager):
    """The wrong order: each group touches its hits and allocates before the next one does."""

    def _turns(self) -> Iterable[tuple[int, int]]:
        return [(phase, group) for group in range(len(self.kinds)) for phase in (0, 1)]


def manager(kinds: Sequence[GroupKind], num_blocks: int, interleaved: bool = False) -> BlockManager:
    return (Interleaved if interleaved else BlockManager)(kinds, num_blocks, BLOCK, step_tokens=64)


def names(seed: int, count: int) -> list[bytes]:
    return [b"%d/%d" % (seed, index) for index in range(count)]


@dataclass
class Holder:
    """The block-related part of a request."""

    names: list[bytes]
    table: Table = field(default_factory=list)
    computed: int = 0

    def admit(self, blocks: BlockManager, external: int, more: int) -> None:
        """Admits what is cached, then `external` blocks to be loaded and `more` to be computed."""
        hit = blocks.match(self.names)
        reached = hit.length + external
        self.table = blocks.admit(hit, reached * BLOCK, (reached + more) * BLOCK)
        self.computed = (reached + more) * BLOCK
        blocks.register(self.table, self.names[: reached + more], hit.length)

    def release(self, blocks: BlockManager) -> None:
        blocks.release(self.table)
        self.table, self.computed = [], 0


def check(blocks: BlockManager, *holders: Holder) -> None:
    blocks.check_integrity([(holder.table, holder.computed) for holder in holders], [])


def at_the_head(blocks: BlockManager, wanted: Sequence[int]) -> None:
    for block in reversed(wanted):
        blocks.pool.free.move_to_end(block, last=False)


def left_by_another(blocks: BlockManager, length: int) -> Hit:
    """A request has computed `length` blocks and ended."""
    first = Holder(names(1, length))
    first.admit(blocks, 0, length)
    first.release(blocks)
    hit = blocks.match(names(1, length))
    assert hit.length == length
    return hit


# ---------------------------------------------------------------------- scenes that contend


def hits_at_the_head_of_the_queue(kinds: Sequence[GroupKind], interleaved: bool) -> None:
    """The blocks that a later group hits are the first that an earlier group's allocation would take."""
    blocks = manager(kinds, 40, interleaved)
    hit = left_by_another(blocks, 5)
    at_the_head(blocks, held(hit.blocks[1:]))
    second = Holder(names(1, 8))
    second.admit(blocks, 1, 2)
    check(blocks, second)


def the_last_group_is_contended_too(kinds: Sequence[GroupKind], interleaved: bool) -> None:
    blocks = manager(kinds, 40, interleaved)
    hit = left_by_another(blocks, 5)
    at_the_head(blocks, held(hit.blocks[-1:]))
    second = Holder(names(1, 8))
    second.admit(blocks, 0, 3)
    check(blocks, second)


def preempted_and_allocated_again(kinds: Sequence[GroupKind], interleaved: bool) -> None:
    """The preempted request's blocks are the oldest in the queue: others have run and ended after it."""
    blocks = manager(kinds, 12 * len(kinds), interleaved)
    victim, other = Holder(names(1, 9)), Holder(names(2, 7))
    victim.admit(blocks, 2, 3)
    other.admit(blocks, 0, 7)
    check(blocks, victim, other)
    victim.release(blocks)
    other.release(blocks)
    victim.admit(blocks, 1, 3)
    check(blocks, victim)
    assert victim.computed == 9 * BLOCK


SCENES: list[Callable[[Sequence[GroupKind], bool], None]] = [
    hits_at_the_head_of_the_queue, the_last_group_is_contended_too, preempted_and_allocated_again,
]


@pytest.mark.parametrize("kinds", KINDS, ids=name_of)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_two_phases_give_no_block_out_twice(
    scene: Callable[[Sequence[GroupKind], bool], None], kinds: Sequence[GroupKind]
) -> None:
    scene(kinds, False)


@pytest.mark.parametrize("kinds", KINDS, ids=name_of)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_interleaved_order_is_found_out(
    scene: Callable[[Sequence[GroupKind], bool], None], kinds: Sequence[GroupKind]
) -> None:
    with pytest.raises(AssertionError, match=r"block|names differ"):
        scene(kinds, True)


# ---------------------------------------------------------------------- what is touched, and what is not


def test_hits_that_a_window_has_left_behind_stay_untouched() -> None:
    blocks = manager(FULL_AND_TWO_WINDOWS, 60)
    hit = left_by_another(blocks, 6)
    behind = held(hit.blocks[1:])
    before = [block for block in blocks.pool.free if block in behind]
    table = blocks.admit(hit, 12 * BLOCK, 12 * BLOCK)
    assert [block for block in blocks.pool.free if block in behind] == before, "their place in the queue changed"
    assert [column.count(None) for column in table] == [0, (12 * BLOCK - 24) // BLOCK, (12 * BLOCK - 72) // BLOCK]
    assert all(blocks.pool.references[block] == 0 for block in behind)
    blocks.check_integrity([(table, 12 * BLOCK)], [])


def test_a_window_touches_only_what_the_longer_prefix_still_needs() -> None:
    blocks = manager(FULL_AND_WINDOW, 60)
    hit = left_by_another(blocks, 6)
    table = blocks.admit(hit, 7 * BLOCK, 7 * BLOCK)
    kept = [block for block in table[1][:6] if block is not None]
    assert kept == list(hit.blocks[1][4:]), "the last 40 of 112 tokens begin in block 4"
    assert [blocks.pool.references[block] for block in held(hit.blocks[1:])] == [0, 1, 1]


def test_a_prefix_is_a_hit_where_every_group_has_what_it_needs() -> None:
    blocks = manager(FULL_AND_WINDOW, 60)
    first = Holder(names(1, 8))
    first.admit(blocks, 0, 8)
    lost = first.table[1][5]
    assert lost is not None
    first.release(blocks)
    at_the_head(blocks, [lost])
    blocks.pool.allocate(1)
    hit = blocks.match(names(1, 8))
    assert hit.length == 5, "8, 7 and 6 need block 5 of the window"
    assert [column.count(None) for column in hit.blocks] == [0, (5 * BLOCK - 40) // BLOCK]
    at_the_head(blocks, held(hit.blocks[:1])[-1:])
    blocks.pool.allocate(1)
    assert blocks.match(names(1, 8)).length == 4, "full attention needs every block"


def test_a_running_request_takes_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is matched, touched or looked up for a running request, however much of what follows is cached."""
    engine, connector = hybrid_engine({}, num_blocks=128)
    twin = engine.add_request(prompt(1, 200), sampling(40))
    run(engine)
    request = engine.requests[engine.add_request(prompt(1, 200), sampling(40, max_local_hit_tokens=16), twin)]
    engine.step()
    asked = connector.asked[twin][0]

    def unexpected(_: Sequence[bytes]) -> Hit:
        raise AssertionError("the prefix cache was asked for a running request")

    monkeypatch.setattr(engine.scheduler.blocks, "match", unexpected)
    while request.computed < 200:
        engine.step()
        engine.check_integrity()
    assert connector.asked[twin][0] == asked


def test_a_freed_request_is_new_again() -> None:
    blocks = manager(FULL_AND_TWO_WINDOWS, 60)
    request = Holder(names(1, 6))
    request.admit(blocks, 2, 4)
    first = held(request.table)
    request.release(blocks)
    check(blocks)
    assert not any(blocks.pool.references)
    request.admit(blocks, 0, 0)
    assert request.computed == 6 * BLOCK
    assert set(held(request.table)) < set(first), "its own prefix is what it finds"
    assert all(blocks.pool.references[block] == 1 for block in held(request.table))
    check(blocks, request)


def test_an_allocation_that_does_not_fit_touches_nothing() -> None:
    blocks = manager(FULL_AND_WINDOW, 20)
    hit = left_by_another(blocks, 6)
    before = list(blocks.pool.free)
    with pytest.raises(OutOfBlocks, match="found room for 11, wanted 12"):
        blocks.admit(hit, 6 * BLOCK, 12 * BLOCK)
    assert list(blocks.pool.free) == before
    table = blocks.admit(hit, 6 * BLOCK, 9 * BLOCK)
    with pytest.raises(OutOfBlocks, match="found 1 too few, wanted 3 for each of 2 groups"):
        blocks.grow(table, 11 * BLOCK + 1)
    check(blocks, Holder([], table, 9 * BLOCK))


# ---------------------------------------------------------------------- at random


def random_use(kinds: Sequence[GroupKind], seed: int, interleaved: bool) -> int:
    """Admissions, growth, moving windows, stores that end after their request. Returns hits with fresh blocks."""
    random, blocks = Random(seed), manager(kinds, 30 * len(kinds), interleaved)
    running: list[Holder] = []
    stores: list[list[int]] = []
    content: dict[int, tuple[int, bytes]] = {}
    contended = 0
    for _ in range(500):
        match random.randrange(6):
            case 0 | 1:
                holder = Holder(names(random.randrange(4), 24))
                hit = blocks.match(holder.names[: random.randint(0, 20)])
                for group, column in enumerate(hit.blocks):
                    for index, block in enumerate(column):
                        assert block is None or content[block] == (group, holder.names[index]), "a hit on other bytes"
                external = random.randint(0, 23 - hit.length)
                reached = hit.length + external
                if blocks.fits(hit, (reached + 1) * BLOCK):
                    holder.table = blocks.admit(hit, reached * BLOCK, (reached + 1) * BLOCK)
                    holder.computed = reached * BLOCK
                    running.append(holder)
                    contended += external > 0 and hit.length > 0
                    fill(blocks, holder, hit.length, content)
            case 2 | 3 if running:
                holder = random.choice(running)
                end = holder.computed + random.choice([1, 16, 40])
                if end <= 24 * BLOCK and blocks.lacking(holder.table, end) <= 0:
                    begin = holder.computed // BLOCK
                    blocks.grow(holder.table, end)
                    holder.computed = end
                    fill(blocks, holder, begin, content)
                    if random.random() < 0.5:
                        stores.append(held(holder.table)[-3:])
                        blocks.pool.touch(stores[-1])
                    blocks.leave_behind(holder.table, holder.computed)
            case 4 if running:
                running.pop(random.randrange(len(running))).release(blocks)
            case 5 if stores:
                blocks.pool.release(stores.pop(random.randrange(len(stores))))
        blocks.check_integrity([(h.table, h.computed) for h in running], stores)
        assert blocks.pool.evictable + sum(map(bool, blocks.pool.references)) <= blocks.pool.num_blocks
    return contended


def fill(blocks: BlockManager, holder: Holder, begin: int, content: dict[int, tuple[int, bytes]]) -> None:
    """What was computed or loaded since `begin` is valid in its blocks and registered."""
    full = holder.names[: holder.computed // BLOCK]
    for group, column in enumerate(holder.table):
        for index in range(begin, len(full)):
            block = column[index]
            if block is not None:
                content[block] = (group, full[index])
    blocks.register(holder.table, full, begin)


@pytest.mark.parametrize("kinds", KINDS, ids=name_of)
@pytest.mark.parametrize("seed", range(6))
def test_random_use_keeps_every_block_accounted_for(seed: int, kinds: Sequence[GroupKind]) -> None:
    assert random_use(kinds, seed, False) > 10


@pytest.mark.parametrize("kinds", KINDS, ids=name_of)
def test_random_use_finds_the_interleaved_order_out(kinds: Sequence[GroupKind]) -> None:
    with pytest.raises(AssertionError, match=r"block|names differ|hit on other"):
        for seed in range(40):
            random_use(kinds, seed, True)


# ---------------------------------------------------------------------- in the engine


def hybrid_engine(pool: Pool, **changes: object) -> tuple[Engine, MemoryConnector]:
    settings = config(model=preset("tiny-hybrid3").model, **changes)
    engine = make_engine(settings, lambda kv: MemoryConnector(kv, pool))
    assert isinstance(engine.connector, MemoryConnector)
    return engine, engine.connector


def load_behind_a_local_hit(interleaved: bool) -> None:
    """Three groups; full attention's fresh blocks would be taken from those that the windows hit."""
    tokens = prompt(1, 140)
    pool: Pool = {}
    writer, _ = hybrid_engine(pool)
    wanted = run_one(writer, tokens)
    assert writer.drain(10.0)
    engine, connector = hybrid_engine(pool)
    engine.scheduler.blocks.__class__ = Interleaved if interleaved else BlockManager
    run_one(engine, tokens[:100])
    assert engine.drain(10.0)
    cached = engine.scheduler.blocks.pool.cached
    latest = [block for (group, _), block in reversed(cached.items()) if group == 2]
    at_the_head(engine.scheduler.blocks, latest)
    found = run_one(engine, tokens)
    assert [(load.local_tokens, load.hit_tokens) for load in connector.all_loads] == [(0, 96), (96, 128)]
    assert found.output_tokens == wanted.output_tokens


def test_an_engine_loads_behind_a_contended_local_hit() -> None:
    load_behind_a_local_hit(interleaved=False)


def test_an_engine_that_interleaves_is_found_out() -> None:
    with pytest.raises(AssertionError, match=r"block|names differ"):
        load_behind_a_local_hit(interleaved=True)
