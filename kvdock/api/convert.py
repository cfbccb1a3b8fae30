"""Conversions between wire strings and the table's bytes and numbers. Invalid strings raise ApiError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvdock._core import TableError
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Manifest, PartDone
from kvdock.protocol.wire_types import KEY_BYTES

_HEX = frozenset("0123456789abcdef")


def grant_id(text: str) -> int:
    """The grant's number, from 16 hex digits. Any other text is refused as an unknown grant."""
    if len(text) != 16 or not _HEX.issuperset(text):
        raise ApiError("unknown_grant", "grant ids are 16 lower-case hex digits", found=text)
    return int(text, 16)


def grant_text(grant: int) -> str:
    return f"{grant:016x}"


def key_bytes(keys: list[str] | bytes) -> bytes:
    """The keys, concatenated. Hex keys are already known to have 64 characters each."""
    if isinstance(keys, bytes):
        if len(keys) % KEY_BYTES:
            wanted = f"a multiple of {KEY_BYTES} bytes"
            raise ApiError("invalid_body", f"keys are {KEY_BYTES} bytes each", found=len(keys), wanted=wanted)
        return keys
    joined = "".join(keys)
    try:
        raw = bytes.fromhex(joined)
    except ValueError as error:
        raise ApiError("invalid_body", "keys are 64 hex digits each", found=str(error), wanted="hex digits") from error
    if len(raw) * 2 != len(joined):  # fromhex skips spaces
        raise ApiError("invalid_body", "keys are 64 hex digits each", found="white space", wanted="hex digits")
    return raw


def committed_parts(parts: list[PartDone]) -> list[tuple[int, int, int]]:
    """(index, group, checksum) of each part, for the table."""
    texts = [part.checksum for part in parts if isinstance(part.checksum, str)]
    if not _HEX.issuperset("".join(texts)):
        bad = next(text for text in texts if not _HEX.issuperset(text))
        raise ApiError("invalid_body", "checksums are 16 lower-case hex digits", found=bad, wanted="hex digits")
    return [(part.index, part.group, part.checksum_value) for part in parts]


def group_indices(manifest: Manifest, groups: list[int] | None) -> list[int]:
    """The groups that a store has bytes of: all by default, otherwise those named, each once."""
    count = len(manifest.groups)
    if groups is None:
        return list(range(count))
    if not groups or len(set(groups)) != len(groups) or not all(0 <= group < count for group in groups):
        raise ApiError("bad_argument", "groups are indices into the manifest's", found=groups, wanted=f"0..{count - 1}")
    return groups


@contextmanager
def ignore_unknown_grant() -> Iterator[None]:
    """Ignores the refusal of a grant that has ended already, when a heartbeat names it: nothing is left to do."""
    try:
        yield
    except TableError as error:
        if error.code != "unknown_grant":
            raise
