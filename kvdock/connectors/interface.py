"""The interface between an engine and a KV connector: a few methods, most of them in pairs.

An engine's scheduler needs only this module of kvdock. Ranges are half-open and in tokens, counted from the start of
the request. Block ids are the engine's own, with one list for each KV group, in the order of the manifest: entry i of a
list is the block that holds tokens [i * size, (i + 1) * size) of that group, where size is its block size, or None
where the group holds none, because a window has left these tokens behind.

    lookup ─► begin_load ─► poll: LoadDone ─► (compute) ─► begin_store ─► poll: StoreDone ─► finished
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

GroupBlocks: TypeAlias = Sequence[Sequence[int | None]]
BlocksRead: TypeAlias = tuple[tuple[int, ...], ...]
"""For each group, the ids of the blocks that a store reads; (): there is no store."""


@dataclass(frozen=True)
class Hit:
    """KV for tokens [0, tokens) can be loaded, which is more than the engine has itself. It covers every KV group; for
    a group with a window, the tokens of the window that ends at `tokens`."""

    tokens: int


@dataclass(frozen=True)
class Miss:
    """There is nothing to load beyond the engine's own tokens."""


@dataclass(frozen=True)
class Pending:
    """The result is not known yet: call `lookup` again."""


LookupResult: TypeAlias = Hit | Miss | Pending


@dataclass(frozen=True)
class LoadDone:
    """A load ended. The KV of tokens [0, valid_tokens) may be used; later tokens were not loaded.

    `valid_tokens` includes the tokens that the engine already had. It is below the length of the hit when a chunk
    failed its checksum or the server was lost.
    """

    request_id: str
    valid_tokens: int


@dataclass(frozen=True)
class StoreDone:
    """A store no longer reads `block_ids` (those that `begin_store` returned), whether their chunks were stored or
    not."""

    request_id: str
    block_ids: BlocksRead


@dataclass(frozen=True)
class Progress:
    """What has ended since the last poll."""

    loads: tuple[LoadDone, ...] = ()
    stores: tuple[StoreDone, ...] = ()


class Connector(Protocol):
    """No method raises because the server is lost or refuses a call: the lookup is then a miss."""

    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        """Which prefix of `token_ids` can be loaded.

        `local_tokens`: how many tokens the engine's own prefix cache holds, a multiple of the manifest's block_tokens:
        whole blocks in every group. Another call with the same arguments is cheap and changes nothing. After a LoadDone
        that fell short, a hit has at most its valid_tokens, until `finished`. `traceparent`: the W3C trace context that
        the request came with.
        """

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        """Fill tokens [local_tokens, hit_tokens) of the request's blocks; blocks before are never written.

        Each list covers [0, hit_tokens); where it has None, nothing is loaded. `hit_tokens`: the length that the Hit
        named, because another length needs other parts of a window. The engine neither reads nor frees the blocks of
        [local_tokens, hit_tokens) until `poll` returns the LoadDone of this request: exactly one comes.
        """

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        """Offer the KV of [0, computed_tokens): call it after each step that computed tokens.

        Returns the blocks that are being read from now on: the engine must not free or rewrite them
        until a StoreDone names them. () when there is nothing new to store.
        """

    def poll(self, timeout_s: float = 0.0) -> Progress:
        """The loads and stores that ended since the last call; waits up to `timeout_s` for one to end."""

    def finished(self, request_id: str, *, comes_back: bool = False) -> None:
        """The request finished, was aborted or was preempted: forget its lookup. `comes_back`: it was preempted, and
        will be looked up again under the same id. A load or store in flight still reports."""

    def close(self) -> None:
        """Waits for copies in flight, then leaves the server."""
