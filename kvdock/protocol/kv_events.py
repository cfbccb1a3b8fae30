"""What routers learn about the cache: vLLM's KV cache events, and the names by which routers know a chunk.

A router that sends each request to an engine with its prefix knows blocks by the engine's hashes, and computes the same
hashes from the tokens. The server knows keys alone, so engines send with their reservations the names by which routers
know the chunks. docs/operate/routers.md explains the forms.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from kvdock.protocol.wire_types import MAX_STORE_KEYS, Identity, Traced

MAX_HASHES = 4096
BlockHash = Annotated[int, msgspec.Meta(ge=0)]
"""The last 64 bits of the engine's hash, as in vLLM's own events: not all routers read more."""
HASH_BITS = 64
TOKEN_BYTES = 4
MEDIUM, TIER_MEDIUM = "CPU", "STORAGE"
"""A chunk is in the pool, or on a tier."""
EARLY_FIELDS = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""How many fields an event has in the form of vLLM before 0.24."""


class BlockNames(Identity, array_like=True, frozen=True, gc=False):
    """`[parent, hashes, tokens]`: the names by which routers know a chunk."""

    parent: BlockHash | None
    """The hash of the block before the chunk; None: the chunk starts a sequence, or has no hashes."""
    hashes: Annotated[tuple[BlockHash, ...], msgspec.Meta(max_length=MAX_HASHES)]
    """The hashes of the chunk's blocks, which are of equal size. Empty: the engine has none, and the chunk's key is
    used."""
    tokens: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES << 16)]
    """The chunk's tokens: unsigned 32-bit integers, little-endian."""

    def fault(self, chunk_tokens: int) -> str:
        """Why these names are not valid; "": they are."""
        if len(self.tokens) != TOKEN_BYTES * chunk_tokens:
            return f"{len(self.tokens)} bytes of tokens"
        if self.hashes and chunk_tokens % len(self.hashes):
            return f"{len(self.hashes)} hashes"
        if max(self.parent or 0, *self.hashes, 0) >> HASH_BITS:
            return f"a hash of more than {HASH_BITS} bits"
        return ""


def block_hash(whole: bytes | int) -> int:
    """The last 64 bits of an engine's hash or a chunk's key, which is all that routers read."""
    return whole if isinstance(whole, int) else int.from_bytes(whole[-HASH_BITS // 8 :], "big")


def named(parent: bytes | int | None, hashes: Sequence[bytes | int], tokens: Sequence[int]) -> BlockNames:
    """The names made from an engine's hashes: whole ones, or their last 64 bits."""
    before = None if parent is None else block_hash(parent)
    return BlockNames(before, tuple(map(block_hash, hashes)), struct.pack(f"<{len(tokens)}I", *tokens))


class Naming(Traced, kw_only=True):
    """A call that may give the names by which routers know its chunks."""

    blocks: Annotated[list[BlockNames], msgspec.Meta(max_length=MAX_STORE_KEYS)] | msgspec.UnsetType = msgspec.UNSET
    """The names of each key's chunk, in order, if SessionAttached.wants_blocks."""


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    """The fields have vLLM's names, in vLLM's order."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    locality: str | msgspec.UnsetType = msgspec.UNSET
    """LOCAL or REMOTE, of a chunk on a tier."""
    ownership: str | msgspec.UnsetType = msgspec.UNSET
    """The name of the tier."""


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: tuple[int, ...]
    medium: str | None = MEDIUM
    locality: str | msgspec.UnsetType = msgspec.UNSET
    ownership: str | msgspec.UnsetType = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    """All earlier events are void. Events for all present blocks follow."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
OfCopy = TypeVar("OfCopy", BlockStored, BlockRemoved)
LOCAL_TIER = "disk"
"""The tier that no other machine reads."""


def on_tier(event: OfCopy, tier: str) -> OfCopy:
    """The event, which has just been made, of the copy on this tier."""
    event.medium, event.ownership = TIER_MEDIUM, tier
    event.locality = "LOCAL" if tier == LOCAL_TIER else "REMOTE"
    return event


class KvBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """`[ts, events]`, as vLLM's `KVEventBatch`."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def positional(event: KvEvent) -> list[Any]:
    """The form of vLLM before 0.24: `["BlockStored", block_hashes, …]`."""
    name = type(event).__name__
    return [name, *msgspec.structs.astuple(event)[: EARLY_FIELDS[name]]]


def in_hex(event: KvEvent) -> dict[str, Any]:
    """For JSON, whose readers round large numbers: hashes as 16 hexadecimal digits."""
    made: dict[str, Any] = msgspec.to_builtins(event)
    if "block_hashes" in made:
        made["block_hashes"] = [f"{one:016x}" for one in made["block_hashes"]]
    if made.get("parent_block_hash") is not None:
        made["parent_block_hash"] = f"{made['parent_block_hash']:016x}"
    return made
