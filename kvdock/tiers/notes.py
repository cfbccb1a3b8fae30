"""Notes: for each namespace a tier keeps, beside its parts, the generation and the keys that were deleted in it.

The name of a part contains the generation and the number of the last deletion of its key (record.py). So raising the
generation makes all older parts unreachable at once, and deleting a key makes all older parts of that key unreachable,
including those that are stored late. A generation only rises. If a store loses a note, the next one has another birth,
so parts that were stored under the lost note are never found again.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from zlib import crc32

from kvdock.tiers.record import VERSION, PartName, folder_of

LEASE: Final = sha256(b"kvdock lease").digest()
"""A namespace that nobody serves. Its note says who keeps the limits of a shared store
(kvdock/tiers/mover/owner.py)."""
MOST_DELETED: Final = 4096
"""The most deleted keys in a note. One more raises the generation instead."""
_MAGIC: Final = b"kvdock n"
_HEAD: Final = struct.Struct("<8sIQQII")  # magic, version, birth, generation, deletions, keys
_DELETED: Final = struct.Struct("<32sI")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
"""The head has a CRC of its own, and the number of keys, from which the length of the rest follows."""


class NoteError(ValueError):
    """The bytes are not a note."""


@dataclass(frozen=True, slots=True)
class Note:
    """`birth`: a random number, drawn when the note is created. `deletions`: how many deletions there were in this
    generation. `deleted`: by key, the number of the last deletion that deleted it, from 1 on."""

    birth: int
    generation: int
    deletions: int = 0
    deleted: Mapping[bytes, int] = field(default_factory=dict)

    @staticmethod
    def new(generation: int) -> Note:
        return Note(secrets.randbits(64), generation)

    def name(self, namespace: bytes, key: bytes, group: int, writer: int) -> PartName:
        """The name of a part that is stored or loaded under this note."""
        return PartName(namespace, key, group, writer, self.birth, self.generation, self.deleted.get(key, 0))

    def names(self, part: PartName) -> bool:
        """Whether a part of the note's namespace can be found under this note."""
        return (part.birth, part.generation, part.deletion) == (
            self.birth, self.generation, self.deleted.get(part.key, 0)
        )

    def at_least(self, generation: int) -> Note:
        return self if self.generation >= generation else Note(self.birth, generation)

    def without(self, keys: Iterable[bytes]) -> Note:
        """The note after these keys were deleted. If it cannot name them all, its generation is raised instead."""
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
        """The size of the whole packed note, in bytes. `head`: its first HEAD_BYTES. Raises NoteError."""
        head = bytes(head[:HEAD_BYTES])
        if len(head) < HEAD_BYTES or crc32(head[: _HEAD.size]) != _CRC.unpack_from(head, _HEAD.size)[0]:
            raise NoteError(f"found {head[:16]!r}, wanted the head of a note, {HEAD_BYTES} bytes with a CRC")
        magic, version, *_, keys = _HEAD.unpack_from(head)
        if (magic, version) != (_MAGIC, VERSION) or keys > MOST_DELETED:
            raise NoteError(f"found {magic!r}, version {version} and {keys} keys, wanted a note of version {VERSION}")
        return int(HEAD_BYTES + keys * _DELETED.size + _CRC.size)

    @staticmethod
    def read(packed: bytes | memoryview) -> Note:
        """Unpacks a note. Raises NoteError, which names what was found."""
        packed = bytes(packed)
        if (wanted := Note.length(packed)) != len(packed):
            raise NoteError(f"found a note of {len(packed)} bytes, wanted {wanted}")
        body = packed[HEAD_BYTES : -_CRC.size]
        if crc32(body) != _CRC.unpack_from(packed, len(packed) - _CRC.size)[0]:
            raise NoteError("the keys of a note do not match their CRC")
        _, _, birth, generation, deletions, _ = _HEAD.unpack_from(packed)
        return Note(birth, generation, deletions, dict(_DELETED.iter_unpack(body)))


Change = Callable[[Note | None], Note]
"""Makes the new note from the present one; None: there is no note. May be called more than once."""


def begins(generation: int) -> Change:
    """Makes a note where there is none, and raises the generation to at least this one."""
    return lambda note: Note.new(generation) if note is None else note.at_least(generation)


def raises(least: int) -> Change:
    """Raises the generation by one, or to `least` if that is more."""
    return lambda note: Note.new(least) if note is None else Note(note.birth, max(note.generation + 1, least))


def deletes(keys: Iterable[bytes], least: int) -> Change:
    """Deletes keys. `least`: the pool's generation; the note's generation is at least this afterwards."""
    wanted = list(keys)
    return lambda note: Note.new(least) if note is None else note.at_least(least).without(wanted)


def name_of_note(namespace: bytes) -> str:
    """The name of a namespace's note, for stores whose names are text."""
    return folder_of(namespace) + "generation"
