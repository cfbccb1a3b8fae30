"""The stores that the scheduler's side has started, from their offer until no worker reads their blocks any more.

A store's slots are reserved in the background, and its plan is sent to the workers with a later step. vLLM may free the
blocks at any time. If a step gives blocks of a store to another request, the store is fenced: the step writes only
after the store has read. A store whose slots are not reserved yet is dropped instead. If a load is the first to write
to the blocks, only that load, and the step in which its request runs, come after the store.

A step may compute KV from a load of another connector, and only the step's outcome shows whether that load failed.
Workers publish all stores that they get, so with other connectors a store is held back until its steps have ended.

Invariant: every store that may still read its blocks is known here.

Threads: vLLM's scheduler thread calls everything; `_lock` guards the results of background calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvdock.connectors.plans import StorePlan
from kvdock.connectors.session import Attachment
from kvdock.connectors.stores import StoreBatch, StoreOffer, Stores
from kvdock.connectors.vllm.steps import StoreOrder


@dataclass
class _Store:
    """`step`: the number of the step that computes the last of its tokens."""

    request_id: str
    blocks: frozenset[int]
    ranks_left: int
    step: int
    holds: bool = False
    """Whether the store is held back until its tokens are computed."""
    is_sent: bool = False
    is_dropped: bool = False


class OpenStores:
    """`ranks`: how many workers report the end of each store. `count_dropped`: called for each dropped store.
    `steps_ahead`: how many steps are in progress when vLLM plans another one. `holds`: every store is held back until
    its tokens are computed. `step`: the number of the newest step, from 1.
    """

    def __init__(
        self, stores: Stores, ranks: int, count_dropped: Callable[[], None], *, steps_ahead: int, holds: bool
    ) -> None:
        self._offered, self._ranks, self._count_dropped = stores, ranks, count_dropped
        self._steps_ahead, self._holds, self.step = steps_ahead, holds, 0
        self._stores: dict[str, _Store] = {}
        self._lock = threading.Lock()
        self._reserved: list[tuple[str, Attachment, StorePlan | None]] = []
        self.last: Future[None] | None = None
        """Done when slots are reserved for the last stores of the requests that ended since the last step was
        planned."""

    def __bool__(self) -> bool:
        return bool(self._stores)

    def __iter__(self) -> Iterator[frozenset[int]]:
        """For each store, the blocks that it may still read."""
        return (store.blocks for store in self._stores.values())

    def start(
        self, offer: StoreOffer | None, computed_in: Callable[[int], int | None] = lambda chunks: None, *,
        holds: bool = False, is_last: bool = False,
    ) -> None:
        """Reserves the offer's slots in the background. `computed_in(n)`: the number of the step that computes the last
        of the request's first n chunks; None: the newest step. `holds`: this store is held back until its tokens are
        computed, as all are with the constructor's `holds`. `is_last`: its request has ended."""
        if offer is None:
            return
        for batch in offer.batches:
            blocks = frozenset(block for chunk in batch.block_ids for part in chunk for block in part)
            step = computed_in(batch.first + len(batch.keys))
            self._stores[batch.store_id] = _Store(
                offer.request_id, blocks, self._ranks, self.step if step is None else step, holds or self._holds
            )
        reserved = self._offered.store(
            offer, partial(self._take_reserved, offer.attachment),
            is_wanted=lambda batch: not self._stores[batch.store_id].is_dropped,
        )
        if is_last:
            self.last = reserved

    def _take_reserved(self, attachment: Attachment, batch: StoreBatch, plan: StorePlan | None) -> None:
        """Background: passes the plan of a batch to send()."""
        with self._lock:
            self._reserved.append((batch.store_id, attachment, plan))

    def guard(self, given: Set[int] | None) -> list[str]:
        """Called with the blocks that this step, or a load, may overwrite; None: any block. Returns the stores to
        fence, which are those that read one of the blocks and were sent, and drops those that were not sent."""
        fences = []
        for store_id, store in self._stores.items():
            if given is None or not store.blocks.isdisjoint(given):
                if store.is_sent:
                    fences.append(store_id)
                store.is_dropped = True
        return fences

    def drop_unsent(self, request_id: str | None = None) -> None:
        """Drops the stores of one request, or of all, that were not sent to the workers."""
        for store in self._stores.values():
            store.is_dropped |= not store.is_sent and request_id in (None, store.request_id)

    def send(self) -> list[StoreOrder]:
        """A step is planned. Returns orders for the stores whose slots are reserved and that are not held back any
        more."""
        self.step += 1
        with self._lock:
            reserved, self._reserved = self._reserved, []
        orders, held = [], []
        for store_id, attachment, plan in reserved:
            store = self._stores[store_id]
            if plan is None or store.is_dropped:
                del self._stores[store_id]
                if store.is_dropped:
                    self._count_dropped()
                if plan is not None:
                    self._offered.abort(attachment, plan)
                continue
            waits = self.step - store.step <= self._steps_ahead
            if waits and store.holds:
                held.append((store_id, attachment, plan))
            else:
                store.is_sent = True
                orders.append(StoreOrder(store_id, attachment.epoch, plan, waits))
        with self._lock:
            self._reserved[:0] = held
        return orders

    def read(self, ranks: Mapping[str, int]) -> None:
        """`ranks`: by store, how many more ranks have stopped reading its blocks."""
        for store_id, count in ranks.items():
            store = self._stores[store_id]
            store.ranks_left -= count
            if store.ranks_left <= 0:
                del self._stores[store_id]
