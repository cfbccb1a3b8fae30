"""The scalars and base structs of all bodies."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from kvdock import _core

API_VERSION = 1
"""The version of the HTTP API, which the server names on every answer. A request may name the version it was written
for; one that the server does not speak is refused before anything is done. A request that names none gets the
server's own."""
VERSION_HEADER = "Kvdock-Api"
SUPPORTED_VERSIONS = (API_VERSION,)
MAX_KEYS: Final = _core.MAX_KEYS
"""The most keys in one lookup."""
MAX_STORE_KEYS: Final = _core.MAX_STORE_KEYS
"""The most keys in one reservation, which takes several times as long as a lookup."""
MAX_GROUPS: Final = _core.MAX_GROUPS
MAX_RANKS: Final = _core.MAX_RANKS
KEY_BYTES: Final = _core.KEY_BYTES

MAX_NAME: Final = 256
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Label = Annotated[str, msgspec.Meta(max_length=256)]
Tenant = Annotated[str, msgspec.Meta(pattern=r"^([a-z0-9][a-z0-9._-]{0,63})?$(?!\n)")]
"""The tenant whose sessions and chunks are meant."""
OWN_TENANT: Final = ""
"""The tenant of the server's own user and of root."""
Scope = Literal["health", "read", "engine", "admin", "peer"]
"""What a caller may do: kvdock/protocol/calls.py says which calls each includes."""
Text = Annotated[str, msgspec.Meta(max_length=1024)]
MAX_WEIGHTS: Final = 128
Weights = Annotated[str, msgspec.Meta(max_length=MAX_WEIGHTS)]
"""A name of the weights that an engine runs; "": those that it started with."""
# The length is checked here and the digits in kvdock/api/convert.py: a regular expression per value would cost more
# than the whole lookup.
Hex64 = Annotated[
    str, msgspec.Meta(min_length=16, max_length=16, extra_json_schema={"pattern": "^[0-9a-f]{16}$"})
]
Key = Annotated[
    str, msgspec.Meta(min_length=64, max_length=64, extra_json_schema={"pattern": "^[0-9a-f]{64}$"})
]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
MAX_TOKENS = 1 << 20
"""The most tokens in one call."""
Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[list[Rank], msgspec.Meta(max_length=MAX_RANKS)]
Readers = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_KEYS)]
_IN_A_ROW = "All keys in a row, 32 bytes each: one bin in MessagePack, base64 in JSON."
Keys = (
    Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
    | Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_KEYS, description=_IN_A_ROW)]
)
StoreKeys = (
    Annotated[list[Key], msgspec.Meta(max_length=MAX_STORE_KEYS)]
    | Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_STORE_KEYS, description=_IN_A_ROW)]
)
Checksum = Hex64 | Annotated[int, msgspec.Meta(ge=0, lt=_core.CHECKSUM_PRIME)]
"""16 hex digits in JSON, because browsers round large numbers; an integer in MessagePack. Below 2⁶¹ - 1."""


def checksum_value(checksum: str | int) -> int:
    """The number, from either form."""
    return checksum if isinstance(checksum, int) else int(checksum, 16)


MAX_RELEASES = 256
"""The most releases in one call."""
MAX_ENTRIES: Final = 1024
"""The most parts of a commit, chunks of a report of mismatches, or changes of an answer: each takes the server 1 to 2
µs."""
MOST_PRIORITY: Final = _core.MOST_PRIORITY
"""The highest priority that a hint may give; the lowest is its negative."""
MAX_HINT_S: Final = 86_400.0
"""How long a hint may last, at most."""
MAX_ANSWERS: Final = 1024
"""The most entries that a heartbeat has in `done`, and in `keep`. Its answer asks fewer questions than that."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request body: a field that the server does not know is refused, not ignored."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a request body that is compared and hashed, never changed."""


class Answer(msgspec.Struct):
    """A response body: clients ignore fields they do not know."""


class Released(Body, array_like=True):
    """`[lease, ranks]`: those reader ranks are done with the lease. Repeating it is harmless."""

    lease: Hex64
    ranks: Ranks


class RefusedRelease(Answer, array_like=True):
    """`[lease, code]`: a carried release that was refused, and why."""

    lease: str
    code: str


class Carrier(Body, kw_only=True):
    """A call that may carry releases of its session's leases. The server handles them before the call, and a release
    that it refuses does not make the call fail."""

    releases: Annotated[list[Released], msgspec.Meta(max_length=MAX_RELEASES)] = msgspec.field(default_factory=list)


class Carried(Answer, kw_only=True):
    refused_releases: list[RefusedRelease] = msgspec.field(default_factory=list)
    """The carried releases that were refused; all others took effect."""


# --------------------------------------------------------------------------- traces

MAX_TRACEPARENT = 256
"""The longest traceparent. Version 00 has 55 characters; later versions may add to it."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Traced(Carrier, kw_only=True):
    """A call for a request of an engine."""

    traceparent: Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT)] | msgspec.UnsetType = msgspec.UNSET
    """The W3C trace context of the request: as the engine got it, or that of the engine's own span of it. A text that
    is none is ignored."""
    beginnings: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16}){1,5}$(?!\n)")] | msgspec.UnsetType = msgspec.UNSET
    """Digests of the prompt's first tokens that name no namespace, as beginnings_of() in kvdock/protocol/keys.py makes
    them."""


class TraceContext(NamedTuple):
    trace_id: int
    span_id: int
    is_sampled: bool


def trace_context(traceparent: str) -> TraceContext | None:
    """Reads a `traceparent` of W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/). None: it is none. As
    that document asks, such a text makes no call fail: a span that would have been its child begins a trace of its
    own."""
    found = _FORM.fullmatch(traceparent) if len(traceparent) <= MAX_TRACEPARENT else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    made = TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
    return made if made.trace_id and made.span_id else None


def traceparent_or_none(text: object) -> str:
    """The text, if it is a traceparent, else an empty one."""
    return text if isinstance(text, str) and trace_context(text) is not None else ""


# --------------------------------------------------------------------------- names that people read

# Names that people and programs choose for others to read.

UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python calls printable, and that show nothing, or a blank: fillers, joiners and variation selectors.
"""
MAX_LABEL: Final = 64
"""The most characters of the label of a prefix."""
PrefixLabel = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL)]


def is_label(text: object) -> bool:
    """Whether a prefix may have that label: 1 to MAX_LABEL characters that can all be seen, with no space at an end. So
    no label looks like another one."""
    return (
        isinstance(text, str) and 1 <= len(text) <= MAX_LABEL and text == text.strip() and text.isprintable()
        and UNSEEN.search(text) is None
    )
