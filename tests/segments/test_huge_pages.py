"""Shared memory in huge pages, whatever the machine's setting is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdock._core import HUGE_PAGE_BYTES, Mapping, allocate_huge
from kvdock.shm import objects

PAGE = 4096
POOL = 0x00E0_11A6_0000_0001
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def kernel_gives_them() -> bool:
    """By its version and its setting, so that no test is skipped because the code makes none."""
    major, minor = map(int, os.uname().release.split(".")[:2])
    return (major, minor) >= (6, 1) and SETTING.exists() and "[deny]" not in SETTING.read_text()


without = pytest.mark.skipif(not kernel_gives_them(), reason="found a kernel without huge pages for this")


@contextmanager
def made(size: int) -> Iterator[tuple[int, Mapping]]:
    """A new object, as the pool makes it, and a mapping of it."""
    name = objects.segment_name(POOL, 0, int.from_bytes(os.urandom(8), "little"))
    fd = objects.create(name, size)
    objects.unlink(name)
    mapping = Mapping(fd, size)
    try:
        yield fd, mapping
    finally:
        mapping.close()
        os.close(fd)


def huge_bytes(mapping: Mapping) -> int:
    """How many bytes of a mapping lie in huge pages, by this process's page table."""
    of_each = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (own,) = [one for one in of_each if one.startswith(f"{mapping.address:x}-")]
    found = re.search(r"ShmemPmdMapped: +(\d+) kB", own)
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize("size", [
    PAGE, HUGE_PAGE_BYTES - PAGE, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + PAGE, 33 * HUGE_PAGE_BYTES + 5 * PAGE,
])
def test_an_object_has_all_its_memory_and_no_more(size: int) -> None:
    with made(size) as (fd, mapping):
        found = os.fstat(fd)
        assert (found.st_size, found.st_blocks * 512) == (size, size)
        with memoryview(mapping) as whole:
            assert not any(whole[:: PAGE // 2]) and not whole[-1]


@without
def test_a_kernel_that_gives_them_is_found_to_do_so() -> None:
    assert objects.gives_huge_pages()


@without
def test_a_mapping_has_the_huge_pages_in_its_page_table() -> None:
    size = 5 * HUGE_PAGE_BYTES + PAGE
    with made(size) as (_, mapping):
        assert mapping.address % HUGE_PAGE_BYTES == 0
        mapping.populate(0, size)
        assert huge_bytes(mapping) == 5 * HUGE_PAGE_BYTES


@without
def test_each_process_maps_them_as_huge_pages() -> None:
    with made(3 * HUGE_PAGE_BYTES) as (fd, first):
        second = Mapping(fd, 3 * HUGE_PAGE_BYTES)
        first.populate(0, first.bytes)
        second.populate(0, second.bytes)
        assert huge_bytes(first) == huge_bytes(second) == 3 * HUGE_PAGE_BYTES
        second.close()


def test_a_file_system_without_huge_pages_gives_none_and_leaves_the_rest_to_the_caller(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert allocate_huge(fd, 4 * HUGE_PAGE_BYTES) == 0
        objects.allocate(fd, 4 * HUGE_PAGE_BYTES + PAGE, "file")
        assert os.fstat(fd).st_size == 4 * HUGE_PAGE_BYTES + PAGE
    finally:
        os.close(fd)
