"""The heads that the core writes for a run of records are those of kvdock/tiers/disk/log.py, byte for byte."""

from __future__ import annotations

import mmap
import random

import pytest

from kvdock._core import TableError, match_record_heads, write_record_heads
from kvdock.tiers.disk.log import MARK_BYTES, RECORD_HEAD_BYTES, key_of, record_bytes, record_head
from kvdock.tiers.record import PartName, Record
from kvdock.tiers.tier import PAGE_BYTES

pytestmark = pytest.mark.tiers

COUNT = 32
MARK = bytes(range(MARK_BYTES))


def records() -> list[Record]:
    draw = random.Random(5)
    found = [
        Record(
            PartName(
                draw.randbytes(32), draw.randbytes(32), draw.randrange(256), draw.randrange(256), draw.getrandbits(64),
                draw.getrandbits(64), draw.getrandbits(32),
            ),
            draw.choice([1, PAGE_BYTES, PAGE_BYTES + 1, draw.randrange(1, 1 << 30)]), draw.getrandbits(64),
        )
        for _ in range(COUNT - 2)
    ]
    name, most = PartName(bytes(32), bytes(32), 0, 0), (1 << 64) - 1
    return [*found, Record(name, 1, 0), Record(PartName(b"\xff" * 32, b"\xff" * 32, 255, 255, most, most), 1, most)]


def fields_of(some: list[Record]) -> list[tuple[bytes, int, int]]:
    return [(key_of(one.name), one.length, one.checksum) for one in some]


def test_each_record_of_a_run_has_its_head_at_its_page() -> None:
    some, begin = records(), 7 * PAGE_BYTES
    with mmap.mmap(-1, COUNT * PAGE_BYTES) as pages:
        write_record_heads(pages, fields_of(some), MARK, begin)
        offset = begin
        for number, one in enumerate(some):
            page = pages[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
            assert page == record_head(one, MARK, offset).ljust(PAGE_BYTES, b"\0")
            offset += record_bytes(one.length)
        assert match_record_heads(pages, fields_of(some), MARK, begin) == [True] * COUNT


def test_a_head_with_any_other_byte_does_not_match() -> None:
    some = fields_of(records()[:3])
    with mmap.mmap(-1, 3 * PAGE_BYTES) as pages:
        write_record_heads(pages, some, MARK, 0)
        for at in range(RECORD_HEAD_BYTES):
            pages[PAGE_BYTES + at] ^= 1
            assert match_record_heads(pages, some, MARK, 0) == [True, False, True]
            pages[PAGE_BYTES + at] ^= 1
        assert match_record_heads(pages, some, MARK, PAGE_BYTES) == [False] * 3
        assert match_record_heads(pages, some, MARK[::-1], 0) == [False] * 3


@pytest.mark.parametrize(("pages", "key", "mark"), [
    (PAGE_BYTES - 1, bytes(86), MARK), (PAGE_BYTES, bytes(85), MARK), (PAGE_BYTES, bytes(86), MARK[1:]),
])  # fmt: skip
def test_memory_keys_and_marks_of_another_length_are_refused(pages: int, key: bytes, mark: bytes) -> None:
    memory = bytearray(pages)
    for call in (write_record_heads, match_record_heads):
        with pytest.raises(TableError) as error:
            call(memory, [(key, 1, 0)], mark, 0)
        assert error.value.found != error.value.wanted and not any(memory)
