"""The keys of the part checksum (docs/understand/lifetime_protocol.md#checksum).

The keys are a SHAKE-128 stream, so a longer table begins with the shorter one: a longer table changes no checksum.
Tables grow by powers of two, and the native core replaces them whole; a copy under way keeps the table that it started
with.
"""

from __future__ import annotations

import threading
from hashlib import shake_128
from typing import Final

from kvdock import _core

STRIPE_BYTES: Final = _core.CHECKSUM_STRIPE_BYTES
_NH_BYTES: Final = 2 * _core.CHECKSUM_STRIPE_BYTES
_KEY_BYTES_PER_STRIPE: Final = 32
_FIRST_STRIPES: Final = 1024  # parts of up to 4 MiB; made in about a millisecond

_lock = threading.Lock()
_stripes = 0


def ensure_keys(part_bytes: int) -> None:
    """Gives the native core keys for parts of up to `part_bytes` bytes. Cheap when it has them already."""
    global _stripes
    needed = -(-part_bytes // _core.CHECKSUM_STRIPE_BYTES)
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
    """The checksum of one part, below CHECKSUM_PRIME. `data`: contiguous bytes of any length."""
    with memoryview(data) as view:
        ensure_keys(view.nbytes)
        return _core.checksum(view)


def copy_hashed(to: memoryview, data: memoryview, at: int = 0) -> int:
    """Copies `data` to `to`, which is as long, and hashes it in the same pass, without the interpreter's lock. Returns
    its share of the checksum of a part in which it begins at the byte `at`, a multiple of STRIPE_BYTES, and ends at
    such a multiple or at the part's end. The sum of all shares, modulo CHECKSUM_PRIME, is the part's checksum."""
    ensure_keys(at + data.nbytes)
    return _core.copy_hashed(to, data, first=at // STRIPE_BYTES)


def share_of(data: memoryview, at: int) -> int:
    """As copy_hashed(), of bytes that stay where they are."""
    ensure_keys(at + data.nbytes)
    return _core.share_of_checksum(data, first=at // STRIPE_BYTES)
