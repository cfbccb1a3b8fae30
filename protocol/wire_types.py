"""The scalars and the three bases that every struct of schemas.py is made of."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# Checked for length here and for digits when they become bytes and numbers (convert.py): a regular
# expression per value would cost more than the whole lookup.
Hex64 = Annotated[
    str, msgspec.Meta(min_length=16, max_length=16, extra_json_schema={"pattern": "^[0-9a-f]{16}$"})
]
Key = Annotated[
    str, msgspec.Meta(min_length=64, max_length=64, extra_json_schema={"pattern": "^[0-9a-f]{64}$"})
]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
MAX_TOKENS = 1 << 20
"""Of one call."""
Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=127)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=128)]
MAX_KEYS = 4096
"""Of one call."""
MAX_GROUPS = 16
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_KEYS)]
KEY_BYTES = 32
Keys = (
    Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
    | Annotated[bytes, msgspec.Meta(
        max_length=KEY_BYTES * MAX_KEYS,
        description="All keys in a row, 32 bytes each: one bin in MessagePack, base64 in JSON.",
    )]
)
Checksum = Hex64 | Annotated[int, msgspec.Meta(ge=0, lt=(1 << 61) - 1)]
"""16 hex digits in JSON, as browsers round large numbers; an integer in MessagePack. Below 2⁶¹ - 1."""


def checksum_value(checksum: str | int) -> int:
    """The number, whichever form it came in."""
    return checksum if isinstance(checksum, int) else int(checksum, 16)


MAX_RELEASES = 256
"""Carried by one call."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request body: a field the server does not know is an error, not a silent no."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a request body that is compared and hashed, never changed."""


class Answer(msgspec.Struct):
    """A response body: clients ignore fields they do not know."""


class Released(Body, array_like=True):
    """`[lease, ranks]`: those reader ranks say done. Saying it again is harmless."""

    lease: Hex64
    ranks: list[Rank]


class ReleaseRefused(Answer, array_like=True):
    """`[lease, code]`: a carried release that was refused, and why."""

    lease: str
    code: str


class Carrier(Body, kw_only=True):
    """A call that may carry releases of its session's leases. They are handled before the call and never fail it."""

    releases: Annotated[list[Released], msgspec.Meta(max_length=MAX_RELEASES)] = msgspec.field(default_factory=list)


class Carried(Answer, kw_only=True):
    refused_releases: list[ReleaseRefused] = msgspec.field(default_factory=list)
    """Of the releases that the call carried; the others are done."""
