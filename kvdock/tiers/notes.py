"""What a tier keeps of a namespace beside its parts: the generation, and which keys were deleted in it.

Both are part of the names of parts (record.py), so raising the generation makes all older parts unreachable at once,
and deleting a key all older parts of that key, whoever stored them and whoever stores them late. A generation only
rises. A note that a store has lost is begun anew with another birth, so what was stored under the lost one is never
found again.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from kvdock.tiers.record import VERSION, PartName, folder_of

MOST_DELETED: Final = 4096
"""A note names so many deleted keys; one more raises the generation instead."""
_MAGIC: Final = b"kvdock n"
_HEAD: Final = struct.Struct("<8sIQQII")  # magic, version, birth, generation, deletions, keys
_DELETED: Final = struct.Struct("<32sI")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
"""The head has a CRC of its own, and says how much follows."""


class NoteError(ValueError):
    """Bytes are no note."""


@dataclass(frozen=True, slots=True)
class Note:
    """`birth`: drawn when the note was begun. `deletions`: how often keys were deleted in this generation. `deleted`:
    the deletion that each of those keys was deleted by last, from 1 on."""

    birth: int
    generation: int
    deletions: int = 0
    deleted: Mapping[bytes, int] = field(default_factory=dict)

    @staticmethod
    def begun(generation: int) -> Note:
        return Note(secrets.randbits(64), generation)

    def name(self, namespace: bytes, key: bytes, group: int, writer: int) -> PartName:
        """The part's name, as long as the note is this."""
        return PartName(namespace, key, group, writer, self.birth, self.generation, self.deleted.get(key, 0))

    def names(self, part: PartName) -> bool:
        """Whether the part, one of the note's namespace, can be found by this note."""
        return (part.birth, part.generation, part.deletion) == (
            self.birth, self.generation, self.deleted.get(part.key, 0)
        )

    def at_least(self, generation: int) -> Note:
        return self if self.generation >= generation else Note(self.birth, generation)

    def without(self, keys: Iterable[bytes]) -> Note:
        """These keys are deleted. Where the note cannot name them all, its generation is raised."""
        number = self.deletions + 1
        deleted = {**self.deleted, **dict.fromkeys(keys, number)}
        if len(deleted) > MOST_DELETED:
            return Note(self.birth, self.generation + 1)
        return Note(self.birth, self.generation, number, deleted)

    def deleted_since(self, other: Note) -> list[bytes]:
        """The keys that were deleted after `other`, a note of the same birth and generation."""
        return [key for key, number in self.deleted.items() if number > other.deletions]

    def packed(self) -> bytes:
        head = _HEAD.pack(_MAGIC, VERSION, self.birth, self.generation, self.deletions, len(self.deleted))
        body = b"".join(_DELETED.pack(key, number) for key, number in self.deleted.items())
        return head + _CRC.pack(crc32(head)) + body + _CRC.pack(crc32(body))

    @staticmethod
    def length(head: bytes | memoryview) -> int:
        """The size of the whole note, in bytes. `head`: its first HEAD_BYTES. Raises NoteError."""
        head = bytes(head[:HEAD_BYTES])
        if len(head) < HEAD_BYTES or crc32(head[: _HEAD.size]) != _CRC.unpack_from(head, _HEAD.size)[0]:
            raise NoteError(f"a note begins with a head of {HEAD_BYTES} bytes and its CRC, found {head[:16]!r}")
        magic, version, *_, keys = _HEAD.unpack_from(head)
        if (magic, version) != (_MAGIC, VERSION) or keys > MOST_DELETED:
            raise NoteError(f"a note of version {VERSION} was wanted, found {magic!r}, version {version}, {keys} keys")
        return int(HEAD_BYTES + keys * _DELETED.size + _CRC.size)

    @staticmethod
    def read(packed: bytes | memoryview) -> Note:
        """Raises NoteError, which says what was found."""
        packed = bytes(packed)
        if (wanted := Note.length(packed)) != len(packed):
            raise NoteError(f"a note of {wanted} bytes was wanted, found {len(packed)}")
        body = packed[HEAD_BYTES : -_CRC.size]
        if crc32(body) != _CRC.unpack_from(packed, len(packed) - _CRC.size)[0]:
            raise NoteError("the keys of a note do not match their CRC")
        _, _, birth, generation, deletions, _ = _HEAD.unpack_from(packed)
        return Note(birth, generation, deletions, dict(_DELETED.iter_unpack(body)))


Change = Callable[[Note | None], Note]
"""What becomes of a note; None: there is none. May be called more than once."""


def begins(generation: int) -> Change:
    """A note that has at least this generation."""
    return lambda note: Note.begun(generation) if note is None else note.at_least(generation)


def raises(least: int) -> Change:
    """The next generation, and at least this one."""
    return lambda note: Note.begun(least) if note is None else Note(note.birth, max(note.generation + 1, least))


def deletes(keys: Iterable[bytes], least: int) -> Change:
    """`least`: the generation that the server has."""
    wanted = list(keys)
    return lambda note: Note.begun(least) if note is None else note.at_least(least).without(wanted)


def name_of_note(namespace: bytes) -> str:
    """For stores whose names are text."""
    return folder_of(namespace) + "generation"
