"""Packed parts against a plain-Python reference of docs/understand/packing.md, on every code path and with every kind
of plane."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st
from packed_reference import ELEMENTS, RAW_TILE, SPARES, book_of, packed_part, tile_bytes

from kvdock import _core
from kvdock.datapath.errors import CopyError

MARKS = 144
TILE = tile_bytes(MARKS)
RAW_UNITS = -(-(4096 - TILE + 16) // 32)


@pytest.fixture(params=_core.tile_paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    assert _core.use_tile_path(request.param)
    yield request.param
    _core.use_tile_path("")


def shape_of(tiles: int, *, marks: int = MARKS, units: int = 0, rest: int = 0) -> _core.PackedShape:
    return _core.PackedShape([tiles * _core.TILE_BYTES + rest], marks, units)


def packed(shape: _core.PackedShape, part: bytes, books: bytes | None = None) -> tuple[int, bytes]:
    slot = bytearray(random.randbytes(shape.packed_bytes))  # an earlier part's bytes
    return _core.pack_part(shape, part, slot, books), bytes(slot)


def unpacked(shape: _core.PackedShape, slot: bytes) -> bytes | None:
    part = bytearray(random.randbytes(shape.raw_bytes))
    return bytes(part) if _core.unpack_part(shape, slot, part) else None


def gaussian(source: random.Random, elements: int, spread: float = 1.0) -> bytes:
    words = [struct.unpack("<I", struct.pack("<f", source.gauss(0, spread)))[0] >> 16 for _ in range(elements)]
    return struct.pack(f"<{elements}H", *words)


def heavy(source: random.Random, elements: int) -> bytes:
    words = [
        struct.unpack("<I", struct.pack("<f", source.gauss(0, 1) * 2.0 ** source.gauss(0, 2)))[0] >> 16
        for _ in range(elements)
    ]
    return struct.pack(f"<{elements}H", *words)


def between(source: random.Random, elements: int, first: int, end: int) -> bytes:
    return struct.pack(f"<{elements}H", *(source.randrange(first, end) for _ in range(elements)))


KINDS: dict[str, Callable[[random.Random, int], bytes]] = {
    "gaussian": gaussian,
    "heavy tails": heavy,
    "zeros": lambda _source, n: bytes(2 * n),
    "negative zeros": lambda _source, n: b"\x00\x80" * n,
    "one value": lambda _source, n: b"\x93\xc1" * n,
    "infinities": lambda source, n: b"".join(source.choice((b"\x80\x7f", b"\x80\xff")) for _ in range(n)),
    "NaNs with payloads": lambda source, n: between(source, n, 0x7F81, 0x8000),
    "denormals": lambda source, n: between(source, n, 0, 0x80),
    "all exponents alike": lambda source, n: struct.pack(
        f"<{n}H", *(at % 256 << 7 | source.choice((0, 1 << 15)) | source.randrange(128) for at in range(n))
    ),
    "anything": lambda source, n: source.randbytes(2 * n),
}


def test_all_values_come_back_bit_for_bit(path: str) -> None:
    """In tiles where the value's exponent has a short code, is marked, is marked beyond the reserve, and is far."""
    shape = shape_of(1, units=30)
    for exponent in range(256):
        others = [one for one in range(256) if one != exponent][:22]
        values = [sign << 15 | exponent << 7 | mantissa for sign in (0, 1) for mantissa in range(128)]
        filler = others[0] << 7
        tiles = [
            (values * 8, [exponent, *others[:21]], 0),
            (values[:128] + [filler] * 1920, [*others[:7], exponent, *others[7:21]], 0),
            (values[128:] + [filler] * 1920, [*others[:21], exponent], 0),
            (values * 8, [*others[:21], exponent], 30),
            (values[::60] + [filler] * (ELEMENTS - 5), others, 0),
        ]
        for elements, book, units in tiles:
            part = struct.pack(f"<{ELEMENTS}H", *elements)
            used, slot = packed(shape, part, bytes(book))
            assert used == units and unpacked(shape, slot) == part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_plane_is_packed_as_the_page_says(path: str, kind: str, seed: int) -> None:
    """Two planes of several tiles and a rest, in each byte; and comes back bit for bit."""
    source = random.Random(f"{kind} {seed}")
    planes = [KINDS[kind](source, 5 * ELEMENTS + 88), KINDS[kind](source, 2 * ELEMENTS)]
    shape = _core.PackedShape([len(plane) for plane in planes], MARKS, 7 * RAW_UNITS)
    wanted = packed_part(planes, MARKS, 7 * RAW_UNITS)
    assert packed(shape, b"".join(planes)) == wanted
    assert unpacked(shape, wanted[1]) == b"".join(planes)
    is_raw = [wanted[1][64 + at * TILE + TILE - 3] == RAW_TILE for at in range(5)]
    assert all(is_raw) if kind in ("anything", "all exponents alike") else not any(is_raw) or kind == "heavy tails"


@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 24, 129])
@pytest.mark.parametrize("seed", range(2))
def test_a_book_is_learnt_from_the_sample_that_the_page_names(tiles: int, seed: int) -> None:
    """Every granule has exponents of its own, so another sample gives another book."""
    source = random.Random(f"{tiles} {seed}")
    part = b"".join(struct.pack("<64H", *[source.randrange(256) << 7] * 64) for _ in range(32 * tiles))
    assert _core.learn_books(shape_of(tiles), part) == book_of(part)


def test_a_book_has_the_commonest_exponents_first() -> None:
    part = b"".join(struct.pack("<H", (exponent + 100) << 7) * (30 - exponent) for exponent in range(30))
    part = part.ljust(4096, b"\0")
    assert _core.learn_books(shape_of(1), part) == bytes([0, *range(100, 121)])


@pytest.mark.parametrize(("commonest", "wanted"), [
    (130, [130, 140, *range(129, 109, -1)]), (5, [5, 140, *range(4, -1, -1), *range(6, 21)]),
])
def test_a_book_is_filled_with_exponents_below_the_commonest(commonest: int, wanted: list[int]) -> None:
    part = struct.pack("<H", commonest << 7) * 2000 + struct.pack("<H", 140 << 7) * 48
    assert _core.learn_books(shape_of(1), part) == bytes(wanted)


@pytest.mark.parametrize("marked", [0, 1, MARKS - 1, MARKS, MARKS + 1, MARKS + 64, MARKS + 65, 2047, 2048])
def test_marks_beyond_the_reserve_take_units(path: str, marked: int) -> None:
    books = bytes(range(1, 23))
    source = random.Random(marked)
    elements = [source.randrange(8, 23) << 7 for _ in range(marked)] + [1 << 7] * (ELEMENTS - marked)
    source.shuffle(elements)
    part, shape = struct.pack(f"<{ELEMENTS}H", *elements), shape_of(1, units=32)
    used, slot = packed(shape, part, books)
    assert used == -(-max(marked - MARKS, 0) // 64) and unpacked(shape, slot) == part
    assert (used, slot) == packed_part([part], MARKS, 32, [books])


@pytest.mark.parametrize("far", [0, 1, 4, 5, 6])
@pytest.mark.parametrize("marked", [20, 300])
def test_a_tile_has_five_spares(path: str, far: int, marked: int) -> None:
    source = random.Random(far)
    elements = [1 << 7] * (ELEMENTS - marked - far) + [9 << 7] * marked
    elements += [source.randrange(23, 256) << 7 | 0x8011 for _ in range(far)]
    source.shuffle(elements)
    part, shape, books = struct.pack(f"<{ELEMENTS}H", *elements), shape_of(1, units=RAW_UNITS), bytes(range(1, 23))
    used, slot = packed(shape, part, books)
    assert used == (RAW_UNITS if far > SPARES else 3 if marked == 300 else 0) and unpacked(shape, slot) == part
    assert (used, slot) == packed_part([part], MARKS, RAW_UNITS, [books])


def test_a_part_that_needs_too_many_units_is_not_packed(path: str) -> None:
    part = random.Random(1).randbytes(4 * _core.TILE_BYTES)
    assert packed(shape_of(4, units=4 * RAW_UNITS - 1), part)[0] == -1
    assert packed(shape_of(4, units=4 * RAW_UNITS), part)[0] == 4 * RAW_UNITS


@pytest.mark.parametrize("marks", [16, 176, 496])
def test_each_reserve_gives_the_page_s_bytes(path: str, marks: int) -> None:
    source = random.Random(7)
    planes = [gaussian(source, 3 * ELEMENTS, 1e-6), heavy(source, 2 * ELEMENTS), gaussian(source, ELEMENTS, 1e9)]
    shape = _core.PackedShape([len(plane) for plane in planes], marks, 256)
    wanted = packed_part(planes, marks, 256)
    assert packed(shape, b"".join(planes)) == wanted
    assert unpacked(shape, wanted[1]) == b"".join(planes)


def test_what_suits_most_kv_is_the_default() -> None:
    shape = _core.PackedShape([24 * 4096] * 60)
    assert (shape.marks, shape.units, shape.packed_bytes) == (176, 1440, 1472 + 1440 * (2912 + 32))
    assert _core.PackedShape([4096]).units == 40


def trailer_of(units: int, first: int) -> bytes:
    return bytes(SPARES) + struct.pack("<BH", units, first)


@pytest.mark.parametrize(("units", "first", "is_read"), [
    (0, 65535, True), (1, 39, True), (1, 40, False), (32, 8, True), (32, 9, False), (33, 0, False), (254, 0, False),
    (RAW_TILE, 40 - RAW_UNITS, True), (RAW_TILE, 41 - RAW_UNITS, False), (RAW_TILE, 65535, False),
])
def test_units_beyond_the_shape_are_refused(path: str, units: int, first: int, is_read: bool) -> None:
    shape = shape_of(1, units=40)
    slot = bytearray(packed(shape, gaussian(random.Random(1), ELEMENTS))[1])
    slot[64 + TILE - 8 : 64 + TILE] = trailer_of(units, first)
    assert (unpacked(shape, bytes(slot)) is not None) == is_read


@pytest.mark.parametrize("at", [0, 3, 4, 5])
def test_another_header_is_refused(path: str, at: int) -> None:
    shape = shape_of(1)
    slot = bytearray(packed(shape, bytes(4096))[1])
    assert unpacked(shape, bytes(slot)) is not None
    slot[at] ^= 1
    assert unpacked(shape, bytes(slot)) is None


def test_marks_and_far_elements_that_no_writer_makes_get_exponent_0(path: str) -> None:
    """All elements marked and far: the reserve has too few nibbles for them, and the trailer too few spares."""
    shape = shape_of(1, units=1)
    slot = bytearray(packed(shape, bytes(4096))[1])
    slot[64 : 64 + 2048] = b"\xff" * 2048
    slot[64 + 2048 : 64 + TILE] = b"\xff" * 768 + b"\xff" * (MARKS // 2) + b"\x01\x02\x03\x04\x05" + b"\0\0\0"
    part = unpacked(shape, bytes(slot))
    exponents = [1, 2, 3, 4, 5] + [0] * (ELEMENTS - 5)
    assert part == struct.pack(f"<{ELEMENTS}H", *(0x807F | exponent << 7 for exponent in exponents))


def test_buffers_lie_as_they_like(path: str) -> None:
    """Parts and slots at odd addresses."""
    source = random.Random(5)
    part, shape = heavy(source, 3 * ELEMENTS), shape_of(3, units=3 * RAW_UNITS)
    used, slot = packed(shape, part)
    for shift in (1, 2, 16, 63):
        apart, aslot = bytearray(shift + len(part)), bytearray(shift + len(slot))
        apart[shift:] = part
        assert _core.pack_part(shape, memoryview(apart)[shift:], memoryview(aslot)[shift:]) == used
        assert aslot[shift:] == slot
        apart[shift:] = bytes(len(part))
        assert _core.unpack_part(shape, memoryview(aslot)[shift:], memoryview(apart)[shift:])
        assert apart[shift:] == part


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), where=st.lists(st.integers(0, 3 * TILE + 64 + 2 * 1216), min_size=1, max_size=40))
def test_damaged_slots_are_refused_or_give_equal_parts_on_all_paths(seed: int, where: list[int]) -> None:
    source = random.Random(seed)
    part, shape = heavy(source, 3 * ELEMENTS), shape_of(3, units=2 * RAW_UNITS)
    used, whole = packed(shape, part)
    slot = bytearray(whole if used >= 0 else source.randbytes(shape.packed_bytes))
    for at in where:
        slot[at % len(slot)] = source.randrange(256)
    found = set()
    for name in _core.tile_paths():
        assert _core.use_tile_path(name)
        found.add(unpacked(shape, bytes(slot)))
    _core.use_tile_path("")
    assert len(found) == 1


@pytest.mark.parametrize(("planes", "marks", "units", "message"), [
    ([], 144, 0, "planes: found 0, wanted at least 1"),
    ([4095], 144, 0, "plane 0: bytes: found 4095, wanted a multiple of 16"),
    ([4096, 8], 144, 0, "plane 1: bytes: found 8, wanted a multiple of 16"),
    ([4096], 145, 0, "marks: found 145, wanted 16 more than a multiple of 32, and at most 496"),
    ([4096], 528, 0, "marks: found 528, wanted 16 more than a multiple of 32, and at most 496"),
    ([4096], 144, 65536, "units: found 65536, wanted at most 65535"),
])
def test_a_shape_that_cannot_be_is_refused(planes: list[int], marks: int, units: int, message: str) -> None:
    with pytest.raises(CopyError, match=message):
        _core.PackedShape(planes, marks, units)


def test_buffers_of_other_sizes_are_refused() -> None:
    shape, part = shape_of(1), bytes(4096)
    books, slot = bytes(range(22)), bytearray(shape.packed_bytes)
    for wrong in (
        lambda: _core.pack_part(shape, part[1:], slot), lambda: _core.pack_part(shape, part, slot[1:]),
        lambda: _core.pack_part(shape, part, slot, books[1:]), lambda: _core.pack_part(shape, part, slot, b"\0" * 22),
        lambda: _core.unpack_part(shape, slot[1:], bytearray(4096)),
        lambda: _core.unpack_part(shape, slot, bytearray(4095)),
        lambda: _core.learn_books(shape, part[1:]),
    ):
        with pytest.raises(CopyError, match=r"found .*, wanted"):
            wrong()
