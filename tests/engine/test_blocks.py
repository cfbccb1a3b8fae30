"""The block pool: holders, the order of eviction, and its invariants under random use."""

from __future__ import annotations

from random import Random

import pytest

from kvdock.engine.blocks import BlockPool, Name, OutOfBlocks, chain_hash


def name(text: bytes) -> Name:
    return (0, text)


def match(blocks: BlockPool, *names: bytes) -> list[int]:
    return [blocks.cached[name(text)] for text in names if name(text) in blocks.cached]


def test_allocation_forgets_the_least_recently_released_prefix() -> None:
    blocks = BlockPool(3)
    held = blocks.allocate(3)
    for block in held:
        blocks.register(block, name(bytes([block])))
    for block in (held[1], held[2], held[0]):
        blocks.release([block])
    assert blocks.allocate(1) == [held[1]]
    assert match(blocks, bytes([held[1]])) == []
    assert match(blocks, bytes([held[2]])) == [held[2]]


def test_a_prefix_outlives_what_follows_it() -> None:
    blocks = BlockPool(4)
    table = blocks.allocate(4)
    blocks.release(table)
    assert blocks.allocate(2) == [table[3], table[2]]


def test_touch_saves_a_free_block_from_allocation() -> None:
    blocks = BlockPool(2)
    [first] = blocks.allocate(1)
    blocks.register(first, name(b"a"))
    blocks.release([first])
    blocks.touch(match(blocks, b"a"))
    assert blocks.allocate(1) != [first]
    with pytest.raises(OutOfBlocks, match="found 0 free, wanted 1"):
        blocks.allocate(1)
    blocks.check_integrity([[0], [1]])


def test_space_beside_does_not_count_what_is_to_be_held() -> None:
    blocks = BlockPool(4)
    held, freed = blocks.allocate(2)
    blocks.release([freed])
    assert blocks.room_beside([held, freed]) == 2
    assert blocks.room_beside([]) == 3


def test_a_refused_allocation_takes_nothing() -> None:
    blocks = BlockPool(2)
    with pytest.raises(OutOfBlocks):
        blocks.allocate(3)
    blocks.check_integrity([])


def test_a_hit_on_an_evictable_block_is_not_counted_as_free_too() -> None:
    blocks = BlockPool(3)
    table = blocks.allocate(2)
    blocks.register(table[0], name(b"a"))
    blocks.release(table)
    assert (blocks.evictable, len(blocks.free)) == (1, 3)
    assert blocks.room_beside([table[0], table[0]]) == 2, "one block, however often it is hit"
    blocks.touch([table[0]])
    assert (blocks.evictable, len(blocks.free)) == (0, 2)
    blocks.release([table[0]])
    assert blocks.evictable == 1
    blocks.allocate(3)
    assert blocks.evictable == 0


def test_the_same_tokens_have_another_name_in_each_group() -> None:
    blocks = BlockPool(2)
    first, second = blocks.allocate(2)
    blocks.register(first, (0, b"a"))
    blocks.register(second, (1, b"a"))
    assert blocks.cached == {(0, b"a"): first, (1, b"a"): second}


def test_the_first_block_of_a_prefix_keeps_its_name() -> None:
    blocks = BlockPool(2)
    first, second = blocks.allocate(2)
    blocks.register(first, name(b"a"))
    blocks.register(second, name(b"a"))
    assert match(blocks, b"a") == [first]
    blocks.check_integrity([[first, second]])


def test_a_hash_names_everything_before_it() -> None:
    first, other = chain_hash(b"", [1, 2]), chain_hash(b"", [1, 3])
    assert chain_hash(first, [4, 5]) != chain_hash(other, [4, 5])
    assert chain_hash(first, [4, 5]) == chain_hash(chain_hash(b"", [1, 2]), [4, 5])


def test_integrity_notices_a_leak_a_double_release_and_a_stale_name() -> None:
    blocks = BlockPool(2)
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="references"):
        blocks.check_integrity([])
    blocks.release([0])
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release([0])
    blocks.cached[name(b"gone")] = 1
    with pytest.raises(AssertionError, match="names differ"):
        blocks.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_random_use_matches_a_plain_model(seed: int) -> None:
    """Model: content[block] is what was written there last; a matched block must still hold its name's content."""
    random, blocks = Random(seed), BlockPool(12)
    content: dict[int, bytes] = {}
    held: list[list[int]] = []
    for step in range(600):
        match random.randrange(4):
            case 0 if (count := random.randint(1, 4)) <= len(blocks.free):
                table = blocks.allocate(count)
                assert not {b for t in held for b in t} & set(table), "a held block was given out"
                for block in table:
                    content[block] = bytes([step % 256, step // 256, block])
                held.append(table)
            case 1 if held:
                for block in random.choice(held):
                    blocks.register(block, name(content[block]))
            case 2 if held:
                blocks.release(held.pop(random.randrange(len(held))))
            case 3 if blocks.cached:
                known = random.choice(sorted(blocks.cached))
                block = blocks.cached[known]
                assert name(content[block]) == known, "a cached name points at rewritten content"
                blocks.touch([block])
                held.append([block])
        blocks.check_integrity(held)
