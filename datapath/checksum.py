"""Keys of the part checksum, and the sum that joins a chunk's parts (docs/lifetime_protocol.md, section 7).

The keys are a SHAKE-128 stream, so a longer table begins with the shorter one: growing it changes no
checksum. Tables grow by powers of two and are swapped whole in the native core; a copy that runs
meanwhile keeps the one it started with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from hashlib import shake_128
from typing import Final

from kvdock import _core

STRIPE_BYTES: Final = 4096
PRIME: Final = (1 << 61) - 1
_NH_BYTES: Final = 8192
_KEY_BYTES_PER_STRIPE: Final = 32
_FIRST_STRIPES: Final = 1024  # parts of up to 4 MiB; made in about a millisecond

_lock = threading.Lock()
_stripes = 0


def ensure_keys(part_bytes: int) -> None:
    """Makes the native core able to hash parts of that many bytes. Cheap when it already is."""
    global _stripes
    needed = -(-part_bytes // STRIPE_BYTES)
    if _stripes > 0 and needed <= _stripes:
        return
    with _lock:
        stripes = max(_stripes, _FIRST_STRIPES)
        while stripes < needed:
            stripes *= 2
        stream = shake_128(b"kvdock checksum 1").digest(_NH_BYTES + _KEY_BYTES_PER_STRIPE * stripes)
        _core.set_checksum_keys(stream[:_NH_BYTES], stream[_NH_BYTES:])
        _stripes = stripes


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Checksum of one part, 0 <= x < 2**61 - 1. `data`: contiguous bytes of any length."""
    with memoryview(data) as view:
        ensure_keys(view.nbytes)
        return _core.checksum(view)


def chunk_checksum(parts: Sequence[int]) -> int:
    """One sum over a chunk's part checksums, in order: position counts."""
    stream = shake_128(b"kvdock checksum 1 parts").digest(8 * len(parts))
    total = 0
    for index, part in enumerate(parts):
        total += (int.from_bytes(stream[8 * index : 8 * index + 8], "little") & PRIME) * part
    return total % PRIME
