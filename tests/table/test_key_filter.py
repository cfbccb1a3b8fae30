"""KeyFilter has every key that was added and not removed, hardly any other, and takes few bytes."""

from __future__ import annotations

import random

import pytest

from kvdock._core import KeyFilter, TableError

SPACE = b"\1" * 32
MOST = 1 << 18


def keys_of(count: int, seed: int, step: int = 8) -> bytes:
    return random.Random(seed).randbytes(count * step)


def test_it_has_what_was_added_and_not_removed() -> None:
    known, keys = KeyFilter(salt=7, most_keys=MOST), keys_of(100_000, 1)
    assert known.missing(SPACE, keys, 8) == keys
    assert known.add(SPACE, keys, 8) and known.missing(SPACE, keys, 8) == b""
    half = len(keys) // 2
    known.remove(SPACE, keys[:half], 8)
    assert len(known.missing(SPACE, keys[half:], 8)) < 0.001 * half  # they looked like one that was removed
    assert len(known.missing(SPACE, keys[:half], 8)) > 0.998 * half
    known.remove(SPACE, keys[half:], 8)
    assert known.size < 100  # of two keys that look alike, the second is not added


def test_few_other_keys_seem_to_be_there() -> None:
    known = KeyFilter(salt=8, most_keys=MOST)
    known.add(SPACE, keys_of(200_000, 1), 8)
    others = keys_of(200_000, 2)
    assert len(others) - len(known.missing(SPACE, others, 8)) < 8 * 200_000 * 0.001
    assert len(others) - len(known.missing(b"\2" * 32, keys_of(200_000, 1), 8)) < 8 * 200_000 * 0.001


def test_it_takes_few_bytes_and_says_when_it_is_full() -> None:
    known = KeyFilter(salt=9, most_keys=MOST)
    added = 0
    for seed in range(1000):
        if not known.add(SPACE, keys_of(1000, seed), 8):
            break
        added += 1000
        assert known.bytes <= max(1 << 17, 5 * known.size)
    assert 0.9 * MOST < added < MOST and known.bytes <= 2 * MOST
    for seed in range(added // 1000):
        assert known.missing(SPACE, keys_of(1000, seed), 8) == b""


def test_the_beginning_of_longer_keys_counts() -> None:
    known, keys = KeyFilter(salt=10, most_keys=MOST), keys_of(3, 1, 32)
    known.add(SPACE, keys[:8] + keys[64:72], 8)
    assert known.missing(SPACE, keys, 32) == keys[32:64]


@pytest.mark.parametrize(("space", "keys", "step"), [(b"\1" * 7, b"", 8), (SPACE, b"\1" * 9, 8), (SPACE, b"", 4)])
def test_bytes_that_are_no_keys_are_refused(space: bytes, keys: bytes, step: int) -> None:
    known = KeyFilter(salt=11, most_keys=MOST)
    for call in (known.add, known.remove, known.missing):
        with pytest.raises(TableError, match="at least 8"):
            call(space, keys, step)
