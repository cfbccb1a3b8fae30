"""The checksum against the protocol's vectors and a plain-Python reference, on every copy loop."""

from __future__ import annotations

import functools
import struct
import threading
from hashlib import shake_128

import pytest
from hypothesis import given, settings, strategies as st

from kvdock import _core
from kvdock.datapath.errors import CopyError
from kvdock.shm.checksum import checksum, copy_hashed, ensure_keys, share_of

PRIME = 2**61 - 1
VECTORS = [(bytes(4096), 0x043ED4A6D9C7888F), (bytes(7 * i % 251 for i in range(10000)), 0x0C7DE3B4AC216971)]


@functools.cache
def _keys(stripes: int) -> tuple[list[int], list[int], list[int]]:
    raw = shake_128(b"kvdock checksum 1").digest(8192 + 32 * stripes)
    words = struct.unpack("<2048I", raw[:8192])
    level2 = [word & PRIME for word in struct.unpack(f"<{4 * stripes}Q", raw[8192:])]
    return list(words[:1024]), list(words[1024:]), level2


def reference(data: bytes) -> int:
    """docs/understand/lifetime_protocol.md#checksum, word by word."""
    stripes = -(-len(data) // 4096)
    first, second, level2 = _keys(16)
    padded = data + bytes(4096 * stripes - len(data))
    total = 0
    for j in range(stripes):
        words = struct.unpack_from("<1024I", padded, 4096 * j)
        halves = []
        for key in (first, second):
            pairs = range(0, 1024, 2)
            nh = sum((words[i] + key[i]) % 2**32 * ((words[i + 1] + key[i + 1]) % 2**32) for i in pairs) % 2**64
            halves += [nh % 2**32, nh >> 32]
        total += sum(half * level2[4 * j + i] for i, half in enumerate(halves))
    return total % PRIME


@pytest.mark.parametrize(("data", "wanted"), VECTORS, ids=["zeros", "ramp"])
def test_protocol_vectors_hold_on_every_path(cpu_path: str, data: bytes, wanted: int) -> None:
    assert checksum(data) == wanted
    assert reference(data) == wanted


def test_lengths_around_every_boundary_match_the_reference(cpu_path: str) -> None:
    data = shake_128(b"bytes").digest(9000)
    for length in (0, 1, 3, 15, 16, 17, 31, 63, 64, 65, 4080, 4095, 4096, 4097, 4112, 8191, 8192, 8209):
        assert checksum(data[:length]) == reference(data[:length]), length


@settings(deadline=None)
@given(data=st.binary(max_size=9000), shift=st.integers(0, 63))
def test_any_bytes_at_any_alignment_match_the_reference_on_all_paths(data: bytes, shift: int) -> None:
    view = memoryview(bytes(shift) + data)[shift:]
    try:
        for path in _core.cpu_paths():
            _core.use_cpu_path(path)
            assert checksum(view) == reference(data), path
    finally:
        _core.use_cpu_path("")


@settings(deadline=None)
@given(data=st.binary(max_size=9000), shift=st.integers(0, 33), to=st.integers(0, 33), cut=st.integers(0, 2))
def test_what_is_copied_is_hashed_as_a_share_of_its_part(data: bytes, shift: int, to: int, cut: int) -> None:
    """At any alignment of both sides, in one piece or two, and nothing beside the memory is written."""
    source, edge = memoryview(bytes(shift) + data)[shift:], min(4096 * cut, len(data))
    try:
        for path in _core.cpu_paths():
            _core.use_cpu_path(path)
            memory = bytearray(b"\xaa" * (to + len(data) + 70))
            pages = memoryview(memory)[to : to + len(data)]
            shares = [copy_hashed(pages[:edge], source[:edge]), copy_hashed(pages[edge:], source[edge:], edge)]
            assert sum(shares) % PRIME == reference(data), path
            assert memory == b"\xaa" * to + data + b"\xaa" * 70, path
            assert shares == [share_of(source[:edge], 0), share_of(source[edge:], edge)], path
    finally:
        _core.use_cpu_path("")


def test_a_copy_to_memory_of_another_length_is_refused() -> None:
    memory = bytearray(b"\xaa" * 10)
    with pytest.raises(ValueError, match="found 11 for a memory of 10, wanted as many"):
        copy_hashed(memoryview(memory), memoryview(bytes(11)))
    assert memory == b"\xaa" * 10


def test_a_flipped_bit_or_a_swapped_stripe_changes_the_sum() -> None:
    data = bytearray(shake_128(b"bytes").digest(3 * 4096))
    whole = checksum(data)
    for at in (0, 5000, len(data) - 1):
        data[at] ^= 0x10
        assert checksum(data) != whole
        data[at] ^= 0x10
    assert checksum(data[4096:8192] + data[:4096] + data[8192:]) != whole


def test_longer_keys_change_no_sum_while_others_hash() -> None:
    data = shake_128(b"bytes").digest(100_000)
    wanted = checksum(data)
    wrong: list[int] = []
    stop = threading.Event()

    def hash_on() -> None:
        while not stop.is_set():
            found = checksum(data)
            if found != wanted:
                wrong.append(found)

    threads = [threading.Thread(target=hash_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for mib in (8, 16, 32, 64):
        ensure_keys(mib << 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert checksum(bytes((64 << 20) - 1)) < PRIME


def test_a_part_longer_than_the_keys_is_refused_by_the_core() -> None:
    ensure_keys(1)
    with pytest.raises(CopyError, match="checksum keys") as caught:
        _core.checksum(bytes(512 << 20))
    assert caught.value.wanted == 131072


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu path: found 'abacus'"):
        _core.use_cpu_path("abacus")
