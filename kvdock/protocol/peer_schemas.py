"""The calls between nodes, by which one reads chunks in the pool of another (docs/operate/peers.md)."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvdock.protocol.wire_types import MAX_NAME, Answer, Body, Checksum, Key, StoreKeys

MAX_NOTES: Final = 256
MAX_LEASES: Final = 1024
MAX_WAIT_S: Final = 1.0
MAX_DEPTH: Final = 16
MAX_GENERATION: Final = (1 << 53) - 1
"""JSON readers hold no larger integers exactly."""
Generation = Annotated[int, msgspec.Meta(ge=0, le=MAX_GENERATION)]


class PeerNote(Body, array_like=True):
    """`[namespace, generation, deleted]`: what the caller knows about a namespace. `deleted`: chunks that were deleted
    at the caller, and have to be deleted here too."""

    namespace: Key
    generation: Generation
    deleted: StoreKeys = b""


class PeerNotes(Body, kw_only=True, omit_defaults=True):
    """The pool follows: it clears a namespace whose generation is lower here, and deletes what is named. `again`: the
    deletions were told before. Of those chunks, the ones that have come from other nodes since are deleted, and those
    that engines have stored since stay. It is only sent to a server that tells its `node` (PeerReadAnswer)."""

    notes: Annotated[list[PeerNote], msgspec.Meta(max_length=MAX_NOTES)]
    again: bool = False


class PeerNotesAnswer(Answer, kw_only=True):
    """The generation of each namespace in this pool, in their order; 0: the server does not know the namespace."""

    generations: list[int]


class PeerRead(Body, kw_only=True, omit_defaults=True):
    """Chunks of one namespace that the caller wants to read. `generation`: another one than the pool's finds nothing.
    `address`: of the caller's Transfer Engine, from which it reads; "": it only asks which parts are there. `releases`:
    earlier leases whose reads have ended. `wait_s`: while the pool lacks the first chunk and this node is loading it,
    the answer may come so much later. `claimer`: the name of the caller's node, which is about to load the chunks from
    a store, unless another node does; it reads nothing. `depth`: the caller's, among the nodes that want a prefix: it
    waits for what comes at nodes of a smaller depth alone, so no two wait for each other. The last three are only sent
    to a server that tells its `node`."""

    namespace: Key
    generation: Generation
    keys: StoreKeys
    address: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    releases: Annotated[list[int], msgspec.Meta(max_length=MAX_LEASES)] = msgspec.field(default_factory=list)
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0
    claimer: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    depth: Annotated[int, msgspec.Meta(ge=0, le=MAX_DEPTH)] = 1


class PeerPart(Answer, array_like=True, gc=False):
    """`[group, writer, address, length, checksum]`: where a part is in the registered memory of the Transfer Engine."""

    group: int
    writer: int
    address: int
    length: int
    checksum: Checksum


class PeerReadAnswer(Answer, kw_only=True):
    """`engine`: the name of the Transfer Engine that has the memory; "": there is none. `lease`: the chunks stay where
    they are until it is released, or for `lease_s` seconds; 0: nothing is leased. `chunks`: the parts of each key's
    chunk; an empty list where the pool lacks the chunk. `node`: the name of this node among its peers; "": it is not
    known yet. `coming`: how many of the first chunks this node is loading, and the caller may wait for. `source`,
    `depth`, `nodes`: where the call had a `claimer`, the name of the node from which it reads the chunks, "" for a
    store, its depth, and how many nodes want them so far."""

    engine: str = ""
    lease: int = 0
    lease_s: float = 0.0
    chunks: list[list[PeerPart]] = msgspec.field(default_factory=list)
    node: str = ""
    coming: int = 0
    source: str = ""
    depth: int = 0
    nodes: int = 1
