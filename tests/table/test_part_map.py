"""Where the tier on disk has its parts (csrc/base/part_map.h)."""

from __future__ import annotations

import math
import random

import pytest

from kvdock._core import FIRST_MOMENT, PartMap, TableError

PAGE = 4096
WEIGHT = 2 * PAGE


def test_the_map_does_what_a_dict_does() -> None:
    draw, found, wanted = random.Random(1), PartMap(), dict[bytes, tuple[int, int, int]]()
    names = [draw.randbytes(86) if at % 2 else bytes(32) + draw.randbytes(38) + bytes(16) for at in range(2000)]
    for step in range(60_000):
        name, action = draw.choice(names), draw.random()
        if action < 0.5:
            part = (draw.randrange(1 << 26), draw.randrange(1 << 28), draw.getrandbits(64))
            if action < 0.3:
                found.put(name, *part)
            else:
                found.put_back(name, *part, FIRST_MOMENT - draw.randrange(1000), draw.randrange(4))
            wanted[name] = part
        elif action < 0.8:
            assert (found.drop if action < 0.65 else found.evict)(name) == (wanted.pop(name, None) is not None)
        elif action < 0.9:
            assert found.use(name) == (name in wanted)
        else:
            assert placed(found.get(name)) == wanted.get(name) and (name in found) == (name in wanted)
        if step % 4000 == 0:
            assert len(found) == len(wanted)
            for sequence in range(64):
                of_segment = {name: part for name, part in wanted.items() if part[0] >> 20 == sequence}
                assert {name: placed(part) for name, part in found.of_segment(sequence)} == of_segment
                assert found.size_of(sequence) == len(of_segment)
    for name in names:
        found.drop(name)
    assert len(found) == 0 and not any(map(found.size_of, range(64)))


def placed(part: tuple[int, int, int, int, int] | None) -> tuple[int, int, int] | None:
    return part and part[:3]


def name_of(number: int) -> bytes:
    return random.Random(number).randbytes(86)


def state_of(parts: PartMap, number: int) -> tuple[int, int]:
    """(used, uses)."""
    part = parts.get(name_of(number))
    assert part is not None
    return part[3:]


def test_uses_are_counted_up_to_three_and_close_ones_once() -> None:
    parts = PartMap()
    for number in range(128):
        parts.put(name_of(number), number, 1, 1)
    assert state_of(parts, 0) == (FIRST_MOMENT + 1, 0)
    for seen in (1, 1, 1, 2, 2, 2, 3, 3, 3, 3):  # fewer than 3 moments are close
        assert parts.use(name_of(0)) and state_of(parts, 0)[1] == seen
    assert not parts.use(name_of(999))
    assert state_of(parts, 1) == (FIRST_MOMENT + 2, 0)


def test_a_part_that_was_evicted_goes_on_with_its_count_and_a_deleted_one_does_not() -> None:
    parts = PartMap()
    for number in range(20):
        parts.put(name_of(number), number, 1, 1)
        assert parts.use(name_of(number))
        assert (parts.evict if number < 10 else parts.drop)(name_of(number))
        parts.put(name_of(number), number, 1, 1)
    assert [state_of(parts, number)[1] for number in range(20)] == [2] * 10 + [0] * 10
    assert not parts.evict(name_of(99))


def test_parts_of_a_former_map_keep_their_order_and_what_cannot_be_is_taken_for_the_latest() -> None:
    parts = PartMap()
    for number, used in enumerate((FIRST_MOMENT - 7, FIRST_MOMENT - 1, FIRST_MOMENT - 9, 12, FIRST_MOMENT + 5)):
        parts.put_back(name_of(number), number, 1, 1, used, 9)
    assert [state_of(parts, at)[0] - FIRST_MOMENT for at in range(5)] == [-7, -1, -9, -1, -1]
    assert {state_of(parts, at)[1] for at in range(5)} == {3}
    assert [place for _, place in parts.turn(0, 1 << 20, 0, 0, 0)[0]] == [2, 0, 4, 3, 1]


def test_of_a_segment_those_go_that_were_not_used_for_longest() -> None:
    """A part of a byte weighs two pages: the one that describes it, and its own."""
    parts = PartMap()
    for number in range(100):
        parts.put(name_of(number), 2 * number + 1, 1, 1)
    for number in (5, 6):
        parts.use(name_of(number))

    def gone(kept: float, left: int, least: int = 0) -> list[int]:
        return [place // 2 for _, place in parts.turn(0, 201 * PAGE, kept, left, least)[0]]

    assert gone(1, 1 << 40) == [] and gone(1, 99 * WEIGHT) == [0]
    assert gone(1, 92 * WEIGHT) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert gone(1, 92 * 2 * WEIGHT, 2 * WEIGHT) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert gone(0, 1 << 40) == [*range(5), *range(7, 100), 5], "none but the latest is to be kept"
    assert 50 < len(gone(0.4, 1 << 40)) < 70, "the map has looked at a sample"
    assert 0 < parts.turn(0, 201 * PAGE, 0.9, 70 * WEIGHT, 0)[2] < 1 < parts.turn(0, 201 * PAGE, 0.6, 1 << 40, 0)[2]
    assert parts.turn(1, 9 * PAGE, 0, 0, 0) == ([], [(PAGE, 9 * PAGE)], math.inf) and len(parts) == 100


def test_the_gaps_are_what_is_between_the_parts_that_stay() -> None:
    parts = PartMap()
    for number in range(10):
        parts.put(name_of(number), 7 << 20 | 3 * number + 1, PAGE + 1, 1)  # three pages each
    for number in (1, 2, 5, 9):
        parts.use(name_of(number))
    for size, last in ((31 * PAGE, []), (40 * PAGE, [(31, 40)])):
        _, gaps, age = parts.turn(7, size, 1, 4 * 3 * PAGE, 0)
        assert age == 0, "all are to be kept"
        assert [(begin // PAGE, end // PAGE) for begin, end in gaps] == [(1, 4), (10, 16), (19, 28), *last]
    assert parts.turn(7, 31 * PAGE, 1, 1 << 40, 0) == ([], [], math.inf)


def test_the_map_learns_which_parts_are_used_again() -> None:
    """Those that were used before are, and those that were not are not: after a while, the latter go first though they
    are younger."""
    parts, newest = PartMap(), 1000
    for number in range(64):
        parts.put(name_of(number), number, 1, 1)
    for _ in range(100):
        for _ in range(64):
            newest += 1
            parts.use(name_of(newest))
            parts.put(name_of(newest), newest, 1, 1)
        for _, place in parts.turn(0, 1 << 40, 0.95, 128 * WEIGHT, 0)[0]:
            parts.evict(name_of(place))
        found = []
        for number in range(64):
            found.append(parts.use(name_of(number)))
            if not found[-1]:
                parts.put(name_of(number), number, 1, 1)
    assert all(found)
    parts.put(name_of(5000), 5000, 1, 1)
    for number in range(64):
        parts.use(name_of(number + 6000))
    order = [place for _, place in parts.turn(0, 1 << 40, 0, 0, 0)[0]]
    assert order[-65:] == [5000, *range(64)], "it was stored later than the others were used"


def test_a_part_takes_at_most_120_bytes_of_memory() -> None:
    parts, draw = PartMap(), random.Random(2)
    for count in range(1, 100_001):
        parts.put(draw.randbytes(86)[:32] + draw.randbytes(38) + bytes(16), count, 1, 1)
        assert count < 10_000 or parts.bytes <= 120 * count
    assert len(parts) == 100_000


def test_a_name_of_another_length_is_refused() -> None:
    with pytest.raises(TableError, match="a part's name") as refused:
        PartMap().get(bytes(85))
    assert (refused.value.found, refused.value.wanted) == (85, 86)


