"""Packed parts against docs/understand/packing.md in plain Python, on every code path, with every kind of plane."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from kvdock import _core
from kvdock.datapath.errors import CopyError

ELEMENTS, SPARES = 2048, 6
MARKS = 144
TILE = 2048 + 768 + MARKS // 2 + 8


@pytest.fixture(params=_core.tile_paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    assert _core.use_tile_path(request.param)
    yield request.param
    _core.use_tile_path("")


def reference(tile: bytes, book: bytes, marks: int) -> bytes | None:
    """A packed tile as docs/understand/packing.md has it, bit by bit; None: it does not fit."""
    elements = struct.unpack(f"<{ELEMENTS}H", tile)
    rests = bytes(e >> 8 & 0x80 | e & 0x7F for e in elements)
    planes, nibbles, spares = [bytearray(256) for _ in range(3)], list[int](), bytearray()
    for at, element in enumerate(elements):
        exponent = element >> 7 & 0xFF
        rank = book.index(exponent) if exponent in book else 255
        code = min(rank, 7)
        for bit, plane in enumerate(planes):
            plane[at // 8] |= (code >> bit & 1) << at % 8
        if code == 7:
            nibbles.append(15 if rank == 255 else rank - 7)
            if rank == 255:
                spares.append(exponent)
    if len(nibbles) > marks or len(spares) > SPARES:
        return None
    nibbles += [0] * (marks - len(nibbles))
    packed = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    return rests + b"".join(planes) + packed + bytes(spares).ljust(SPARES, b"\0") + b"\0\0"


def shape_of(tiles: int, *, marks: int = MARKS, spills: int = 0, rest: int = 0) -> _core.PackedShape:
    return _core.PackedShape([(tiles * _core.TILE_BYTES + rest, marks)], spills)


def packed(shape: _core.PackedShape, part: bytes, books: bytes | None = None) -> tuple[int, bytes]:
    slot = bytearray(random.randbytes(shape.packed_bytes))  # an earlier part's bytes
    return _core.pack_part(shape, books or _core.learn_books(shape, part), part, slot), bytes(slot)


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
    "anything": lambda source, n: source.randbytes(2 * n),
}


def test_all_values_come_back_bit_for_bit(path: str) -> None:
    """In tiles where the value's exponent has a short code, is marked, and is far."""
    for exponent in range(256):
        others = [one for one in range(256) if one != exponent][:22]
        values = [sign << 15 | exponent << 7 | mantissa for sign in (0, 1) for mantissa in range(128)]
        filler = others[0] << 7
        tiles = [
            (values * 8, [exponent, *others[:21]]),
            (values[:128] + [filler] * 1920, [*others[:7], exponent, *others[7:21]]),
            (values[128:] + [filler] * 1920, [*others[:21], exponent]),
            (values[::50] + [filler] * (ELEMENTS - 6), others),
        ]
        for elements, book in tiles:
            part, shape = struct.pack(f"<{ELEMENTS}H", *elements), shape_of(1)
            spilled, slot = packed(shape, part, bytes(book))
            assert spilled == 0 and unpacked(shape, slot) == part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_plane_comes_back_bit_for_bit(path: str, kind: str, seed: int) -> None:
    source = random.Random(f"{kind} {seed}")
    part = KINDS[kind](source, 5 * ELEMENTS + 88)
    shape = shape_of(5, spills=5, rest=176)
    spilled, slot = packed(shape, part)
    assert spilled == (5 if kind == "anything" else spilled if kind == "heavy tails" else 0)
    assert unpacked(shape, slot) == part


@pytest.mark.parametrize("seed", range(4))
def test_a_tile_is_packed_as_the_page_says(path: str, seed: int) -> None:
    source = random.Random(seed)
    part = gaussian(source, ELEMENTS - 6) + b"".join(source.randbytes(2) for _ in range(6))
    shape = shape_of(1, spills=1)
    books = _core.learn_books(shape, gaussian(source, ELEMENTS, spread=1.5))
    wanted = reference(part, books, MARKS)
    spilled, slot = packed(shape, part, books)
    assert spilled == (0 if wanted else 1)
    assert slot[:8] == b"KVP1\1\0" + bytes([spilled, 0]) and slot[16:38] == books
    if wanted:
        assert slot[64 : 64 + TILE] == wanted


def test_a_book_has_the_commonest_exponents_first() -> None:
    part = b"".join(struct.pack("<H", exponent << 7) * (30 - exponent) for exponent in range(30)).ljust(4096, b"\0")
    assert _core.learn_books(shape_of(1), part) == bytes(range(22))


@pytest.mark.parametrize("marked", [MARKS - 1, MARKS, MARKS + 1])
def test_a_tile_fits_up_to_its_reserve(path: str, marked: int) -> None:
    books = bytes(range(1, 23))
    part = struct.pack("<H", 8 << 7) * marked + struct.pack("<H", 1 << 7) * (ELEMENTS - marked)
    shape = shape_of(1, spills=1)
    spilled, slot = packed(shape, part, books)
    assert spilled == (marked > MARKS) and unpacked(shape, slot) == part


@pytest.mark.parametrize("far", [5, 6, 7])
def test_a_tile_has_six_spares(path: str, far: int) -> None:
    source = random.Random(far)
    elements = [1 << 7] * (ELEMENTS - far) + [source.randrange(23, 256) << 7 | 0x8011 for _ in range(far)]
    source.shuffle(elements)
    part, shape = struct.pack(f"<{ELEMENTS}H", *elements), shape_of(1, spills=1)
    spilled, slot = packed(shape, part, bytes(range(1, 23)))
    assert spilled == (far > SPARES) and unpacked(shape, slot) == part


def test_a_part_with_too_many_spilled_tiles_is_not_packed(path: str) -> None:
    part = random.Random(1).randbytes(4 * _core.TILE_BYTES)
    assert packed(shape_of(4, spills=3), part)[0] == -1
    assert packed(shape_of(4, spills=4), part)[0] == 4


def test_planes_have_books_and_reserves_of_their_own(path: str) -> None:
    source = random.Random(7)
    part = gaussian(source, 3 * ELEMENTS, 1e-6) + heavy(source, 2 * ELEMENTS) + gaussian(source, ELEMENTS, 1e9)
    shape = _core.PackedShape([(3 * 4096, 112), (2 * 4096, 496), (4096, 176)], 2)
    spilled, slot = packed(shape, part)
    assert spilled <= 2 and unpacked(shape, slot) == part
    assert shape.packed_bytes == 128 + 3 * 2880 + 2 * 3072 + 2912 + 2 * (4096 - 2880 + 16)


def test_equal_parts_have_equal_slots_on_all_paths() -> None:
    part, shape, made = heavy(random.Random(3), 8 * ELEMENTS), shape_of(8, spills=8), set()
    for name in _core.tile_paths():
        assert _core.use_tile_path(name)
        made.add(packed(shape, part)[1])
    _core.use_tile_path("")
    assert len(made) == 1


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), where=st.lists(st.integers(0, 3 * TILE + 64 + 2 * 1216), min_size=1, max_size=40))
def test_damaged_slots_are_refused_or_give_equal_parts_on_all_paths(seed: int, where: list[int]) -> None:
    source = random.Random(seed)
    part, shape = heavy(source, 3 * ELEMENTS), shape_of(3, spills=2)
    spilled, whole = packed(shape, part)
    slot = bytearray(whole if spilled >= 0 else source.randbytes(shape.packed_bytes))
    for at in where:
        slot[at % len(slot)] = source.randrange(256)
    found = set()
    for name in _core.tile_paths():
        assert _core.use_tile_path(name)
        found.add(unpacked(shape, bytes(slot)))
    _core.use_tile_path("")
    assert len(found) == 1


@pytest.mark.parametrize(("planes", "spills", "message"), [
    ([], 0, "planes: found 0, wanted at least 1"),
    ([(4095, 144)], 0, "plane 0: bytes: found 4095, wanted a multiple of 16"),
    ([(4096, 144), (4096, 145)], 0, "plane 1: marks: found 145, wanted 16 more than a multiple of 32, and at most 496"),
    ([(4096, 528)], 0, "plane 0: marks: found 528, wanted 16 more than a multiple of 32, and at most 496"),
    ([(4096, 144)], 65536, "spills: found 65536, wanted at most 65535"),
])
def test_a_shape_that_cannot_be_is_refused(planes: list[tuple[int, int]], spills: int, message: str) -> None:
    with pytest.raises(CopyError, match=message):
        _core.PackedShape(planes, spills)


def test_buffers_of_other_sizes_are_refused() -> None:
    shape, part = shape_of(1), bytes(4096)
    books, slot = bytes(range(22)), bytearray(shape.packed_bytes)
    for wrong in (
        lambda: _core.pack_part(shape, books, part[1:], slot), lambda: _core.pack_part(shape, books, part, slot[1:]),
        lambda: _core.pack_part(shape, books[1:], part, slot), lambda: _core.pack_part(shape, b"\0" * 22, part, slot),
        lambda: _core.unpack_part(shape, slot[1:], bytearray(4096)),
        lambda: _core.unpack_part(shape, slot, bytearray(4095)),
    ):
        with pytest.raises(CopyError, match=r"found .*, wanted"):
            wrong()
