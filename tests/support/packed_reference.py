"""Packed parts in plain Python, as docs/understand/packing.md has them, bit by bit. Slow, and simple."""

from __future__ import annotations

import struct
from collections import Counter

TILE_BYTES, ELEMENTS, GRANULE_BYTES = 4096, 2048, 128
BOOK, SHORT, SPARES, SAMPLE = 22, 7, 5, 64
UNIT_MARKS, UNIT_BYTES, RAW_TILE = 64, 32, 255
FAR = 15


def elements_of(content: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(content) // 2}H", content)


def exponent_of(element: int) -> int:
    return element >> 7 & 0xFF


def tile_bytes(marks: int) -> int:
    return 2048 + 768 + marks // 2 + 8


def book_of(plane: bytes) -> bytes:
    granules = len(plane) // TILE_BYTES * (TILE_BYTES // GRANULE_BYTES)
    numbers = [i if granules <= SAMPLE else (i * 0x9E3779B9 % 2**32) * granules >> 32 for i in range(SAMPLE)]
    counts: Counter[int] = Counter()
    for number in numbers[:granules]:
        counts.update(map(exponent_of, elements_of(plane[number * GRANULE_BYTES : (number + 1) * GRANULE_BYTES])))
    book = sorted(counts, key=lambda exponent: (-counts[exponent], exponent))
    commonest = book[0] if book else 0
    others = [*range(commonest - 1, -1, -1), *range(commonest, 256)]
    return bytes([*book, *(exponent for exponent in others if exponent not in counts)][:BOOK])


def joined(nibbles: list[int], marks: int) -> bytes:
    """The nibbles of so many marks, those that are missing 0."""
    filled = nibbles + [0] * (marks - len(nibbles))
    return bytes(low | high << 4 for low, high in zip(filled[::2], filled[1::2], strict=True))


def packed_tile(tile: bytes, book: bytes, marks: int, first: int) -> tuple[bytes, bytes]:
    """What is in the tile's place, and its units, which begin with number `first`."""
    elements = elements_of(tile)
    ranks = [book.index(exponent) if (exponent := exponent_of(e)) in book else BOOK for e in elements]
    planes = [bytearray(ELEMENTS // 8) for _ in range(3)]
    for at, rank in enumerate(ranks):
        for bit, plane in enumerate(planes):
            plane[at // 8] |= (min(rank, SHORT) >> bit & 1) << at % 8
    spares = bytes(exponent_of(e) for e, rank in zip(elements, ranks, strict=True) if rank == BOOK)
    if len(spares) > SPARES:
        kept = tile_bytes(marks) - 16
        others = tile[kept:]
        units = others.ljust(-(-len(others) // UNIT_BYTES) * UNIT_BYTES, b"\0")
        return tile[:kept] + bytes(8) + bytes(SPARES) + struct.pack("<BH", RAW_TILE, first), units
    nibbles = [rank - SHORT for rank in ranks if rank >= SHORT]
    more = nibbles[marks:]
    count = -(-len(more) // UNIT_MARKS)
    trailer = spares.ljust(SPARES, b"\0") + struct.pack("<BH", count, first if count else 0)
    rests = bytes(e >> 8 & 0x80 | e & 0x7F for e in elements)
    return rests + b"".join(planes) + joined(nibbles[:marks], marks) + trailer, joined(more, count * UNIT_MARKS)


def packed_part(planes: list[bytes], marks: int, units: int, books: list[bytes] | None = None) -> tuple[int, bytes]:
    """The units in use, and the slot; -1 where they are too many."""
    body, pool, books = b"", b"", books or [book_of(plane) for plane in planes]
    for plane, book in zip(planes, books, strict=True):
        whole = len(plane) // TILE_BYTES * TILE_BYTES
        for at in range(0, whole, TILE_BYTES):
            tile, more = packed_tile(plane[at : at + TILE_BYTES], book, marks, len(pool) // UNIT_BYTES)
            body, pool = body + tile, pool + more
        body += plane[whole:]
    used = len(pool) // UNIT_BYTES
    if used > units:
        return -1, b""
    header = b"KVP1" + struct.pack("<HHQ", len(planes), used, 0) + b"".join(book + b"\0\0" for book in books)
    return used, header.ljust(-(-len(header) // 64) * 64, b"\0") + body + pool.ljust(units * UNIT_BYTES, b"\0")
