"""Breaks of kvdock/datapath/: a copy that did not bring the right bytes must say so."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "P2c", "checksums are compared in their low 32 bits", "kvdock/datapath/copy.py",
        "wanted is None or sum_ == wanted)",
        "wanted is None or sum_ % 2**32 == wanted % 2**32)",
        ("tests/copy/test_copy.py", "-k", "bit or flipped"), "test_checksums_are_compared_in_all_their_bits",
    ),
    Mutant(
        "P2d", "the last part of a copy is always right", "kvdock/datapath/copy.py",
        "wanted is None or sum_ == wanted)",
        "wanted in (None, expected[-1]) or sum_ == wanted)",
        ("tests/copy/test_copy.py",), "test_a_flipped_byte_in_the_slot_is_never_ok",
    ),
    Mutant(
        "K4", "a damaged header is unpacked", "csrc/copy/packed.cpp",
        "sums[i] != expected[i] || is_packed_part(shape, reinterpret_cast<const char*>(parts[i].slot))",
        "true",
        ("tests/copy/test_packed.py",), "test_a_part_with_another_header_is_not_unpacked_even_with_its_checksum",
    ),
)
