"""The hashes and tokens by which routers know a chunk of a vLLM request.

Plain functions of a request, without vLLM's own types: exports.py makes vLLM's events from what they return.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from kvdock.connectors.announcer import Chunk, ChunkOf, NameOf
from kvdock.connectors.vllm.request_tag import is_plain
from kvdock.protocol.kv_events import BlockNames

Cutter = Callable[[Any, int], Chunk | None]
"""Makes a chunk of a request from its number."""
Namer = Callable[[Any, int], BlockNames | None]
"""Makes the names by which routers know a chunk of a request, from its number; None: vLLM has not hashed all of it."""


def chunk_of(request: Any, at: int, *, hashes: int, chunk_tokens: int) -> Chunk | None:
    """The request's chunk number `at`. `hashes`: how many hashes a chunk has. None: vLLM has not hashed all of it."""
    first = at * hashes
    found = tuple(request.block_hashes[first : first + hashes])
    if len(found) < hashes:
        return None
    parent = request.block_hashes[first - 1] if first else None
    return Chunk(found, parent, array("I", request.all_token_ids[at * chunk_tokens : (at + 1) * chunk_tokens]))


def chunks_of(cutter: Cutter | None, request: Any) -> ChunkOf | None:
    """The chunks of a request whose KV depends on tokens alone."""
    return partial(cutter, request) if cutter is not None and is_plain(request) else None


def names_of(namer: Namer | None, request: Any) -> NameOf | None:
    """The names of the chunks of a request whose KV depends on tokens alone."""
    return partial(namer, request) if namer is not None and is_plain(request) else None
