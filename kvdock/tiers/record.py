"""Records, in which lower tiers keep parts of chunks. A record is a header that describes the part, and the part's
bytes.

A part is one writer's bytes of one KV group of one chunk. The header has the part's name (PartName), its length and
its checksum. So an index can be rebuilt from the records and the notes (kvdock/tiers/notes.py), and a record that is
under a wrong name, cut short or damaged is not taken for another record.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

VERSION: Final = 2
"""Names and headers contain it, so a tier never finds parts that another version has written."""
HEADER_BYTES: Final = 128
ALL_WRITERS: Final = 255
"""In place of a writer, in the name of a record that has the parts of all writers (kvdock/tiers/mover/bundles.py)."""
_NAMESPACE_BYTES: Final = 32
_MAGIC: Final = b"kvdock\x00\x02"
_FIELDS: Final = struct.Struct("<8sHBBI32s32sQQQQ")
# magic, version, group, writer, deletion, namespace, key, length, checksum, birth, generation
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = HEADER_BYTES - _CRC.size


class RecordError(ValueError):
    """The bytes are not the header of a record, or are the header of another record than the one wanted."""


def folder_of(namespace: bytes) -> str:
    """The prefix of all names in a namespace."""
    return f"kvdock/{VERSION}/{namespace.hex()}/"


def namespace_of(name: str) -> bytes | None:
    """The namespace of a folder with this name; None: it is something else, which others have put there."""
    try:
        namespace = bytes.fromhex(name)
    except ValueError:
        return None
    return namespace if len(namespace) == _NAMESPACE_BYTES and namespace.hex() == name else None


@dataclass(frozen=True, slots=True)
class PartName:
    """`namespace`, `key`: 32 bytes each. `group`, `writer`: 0 to 255. `birth`, `generation`, `deletion`: from the
    tier's note of the namespace when the part was stored (Note.name)."""

    namespace: bytes
    key: bytes
    group: int
    writer: int
    birth: int = 0
    generation: int = 0
    deletion: int = 0

    def text(self) -> str:
        """For stores whose names are text: 'kvdock/2/NAMESPACE/BIRTH.GENERATION/KEY/GROUP.WRITER', with digests in hex.
        The writer is 'all' where the record has the parts of all. If the key was deleted before, '.DELETION'
        follows."""
        writer = "all" if self.writer == ALL_WRITERS else self.writer
        part = f"{self.group}.{writer}" + (f".{self.deletion}" if self.deletion else "")
        return f"{folder_of(self.namespace)}{self.birth:016x}.{self.generation}/{self.key.hex()}/{part}"


@dataclass(frozen=True, slots=True)
class Record:
    """`length`: the part's bytes. `checksum`: that of these bytes (docs/understand/lifetime_protocol.md#checksum)."""

    name: PartName
    length: int
    checksum: int

    def header(self) -> bytes:
        """HEADER_BYTES bytes; their last four are the CRC-32 of the others."""
        name = self.name
        fields = _FIELDS.pack(
            _MAGIC, VERSION, name.group, name.writer, name.deletion, name.namespace, name.key, self.length,
            self.checksum, name.birth, name.generation,
        )
        body = fields.ljust(_CRC_AT, b"\0")
        return body + _CRC.pack(crc32(body))

    @staticmethod
    def read(header: bytes | memoryview) -> Record:
        """Reads a header. Raises RecordError, whose message names the value found."""
        if len(header) < HEADER_BYTES:
            raise RecordError(f"found a header of {len(header)} bytes, wanted {HEADER_BYTES}")
        body = bytes(header[:_CRC_AT])
        magic, version, group, writer, deletion, namespace, key, length, checksum, birth, generation = (
            _FIELDS.unpack_from(body)
        )
        if magic != _MAGIC:
            raise RecordError(f"found {magic!r} at the start of a record, wanted {_MAGIC!r}")
        if version != VERSION:
            raise RecordError(f"found a record of version {version}, wanted {VERSION}")
        if (found := crc32(body)) != (wanted := _CRC.unpack(header[_CRC_AT:HEADER_BYTES])[0]):
            raise RecordError(f"found a header whose CRC is {found:08x}, wanted {wanted:08x}")
        return Record(PartName(namespace, key, group, writer, birth, generation, deletion), length, checksum)

    @staticmethod
    def read_of(header: bytes | memoryview, name: PartName, length: int) -> Record:
        """Reads the header of this part with this length. Raises RecordError for any other."""
        record = Record.read(header)
        if record.name != name:
            raise RecordError(f"found a record of {record.name.text()}, wanted {name.text()}")
        if record.length != length:
            raise RecordError(f"{name.text()}: found {record.length} bytes, wanted {length}")
        return record
