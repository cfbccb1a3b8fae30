"""A rank's stores: nodes of SGLang's tree, from their offer until no copy reads their pages and all ranks may go on.

    offer ──► "kvdock-offer": reserve (rank 0) ──► plans ──► each writer copies, commits ──► ended, in order

SGLang locks a node until its offer has ended, and asks for the outcomes in the order in which it made the offers. Rank
0 reserves slots at the server; where other ranks write too, they get the plans with SGLang's next call to all of them.
A rank that writes nothing (MLA) is done at once.

An offer belongs to the weights that the engine ran when it was made. When the weights change, offers that have not
started are dropped, so that a flush of SGLang's cache waits only for copies in progress.

Pages that were loaded a moment ago are not offered to the server again: SGLang offers the pages of a load once their
request is in its tree. An offer succeeds if the server has all of its pages; SGLang repeats an offer that fails. In a
pipeline the first stage tells the outcome, once all ranks have noted theirs (stages.py).

Invariant: each offer ends exactly once, after its last copy; each reservation is carried out or aborted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

from kvdock.connectors.background import Background
from kvdock.connectors.plans import StorePlan
from kvdock.connectors.ranks import Order
from kvdock.connectors.running_weights import RunningWeights
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.session import Attachment
from kvdock.connectors.sglang.figures import Figures
from kvdock.connectors.sglang.page_names import NOTHING, About
from kvdock.connectors.sglang.pools import STATES, RankPools
from kvdock.connectors.sglang.rank_zero import RankZero, known_of
from kvdock.connectors.sglang.ranks import Ranks
from kvdock.connectors.stores import StoreBatch
from kvdock.protocol.errors import ApiError, ServerUnavailable

log = logging.getLogger("kvdock.sglang")

@dataclass
class _Offer:
    """`number`: counted on each rank alike; `pages`: the hashes of the pages; `indices`: SGLang's indices, by the name
    of the transfer; `counts`: how many of the last pages each transfer has; `ready`: waits until the GPU has computed
    the pages; `epoch`: the epoch of the weights that computed them; `may_store`: whether this rank may store them."""

    number: int
    pages: tuple[str, ...]
    indices: Mapping[str, Any]
    counts: Mapping[str, int]
    ready: Callable[[], object]
    epoch: int
    may_store: bool
    known: int = 0
    """How many pages, counted from the first, are known to be at the server."""
    plans: list[tuple[Attachment, StorePlan]] = field(default_factory=list)
    """Plans with the numbers of the offer's pages in place of blocks."""
    reserved: Future[bool] = field(default_factory=Future)
    """Whether the server has all pages, or will have them when the plans are carried out. Set by rank 0."""
    takes_part: bool = True
    """Whether this rank got all plans."""
    ended: Future[bool] = field(default_factory=Future)

    @property
    def name(self) -> str:
        return f"offer-{self.number}"

    @property
    def outcome(self) -> int:
        """See Offloads._agreed."""
        if not self.ended.done():
            return _RUNS
        return _IS_STORED if self.ended.exception() is None and self.ended.result() else _FAILED


_RUNS, _FAILED, _IS_STORED = range(3)


class Offloads:
    """`zero`: the state of rank 0; None in other ranks."""

    def __init__(
        self, pools: RankPools, ranks: Ranks, weights: RunningWeights, figures: Figures, zero: RankZero | None
    ) -> None:
        self._pools, self._worker, self._ranks = pools, pools.worker, ranks
        self._weights, self._figures, self._zero = weights, figures, zero
        self._offering, self._writing = Background("kvdock-offer"), Background("kvdock-write")
        self._offers: deque[_Offer] = deque()
        self._unshared: deque[_Offer] = deque()
        """Offers whose plans were not passed to all writers yet. Always empty if the engine has one writer."""
        self._agreed: deque[int] = deque()
        """In a pipeline, the outcomes of the oldest offers on all ranks, as the first stage has told them: SGLang must
        do the same with its tree on each stage."""
        self._count = 0

    def offer(
        self, pages: Sequence[str], parent: str | None, indices: Mapping[str, Any], counts: Mapping[str, int],
        ready: Callable[[], object], *, may_store: bool, about: About = NOTHING,
    ) -> None:
        """The pages must not change until the offer has ended. `parent`: see Chains.named. `may_store` False: no rank
        stores the pages; in a rank that is no writer it has no effect, unless it is rank 0."""
        self._count += 1
        made = _Offer(self._count, tuple(pages), indices, counts, ready, self._weights.epoch, may_store)
        self._offers.append(made)
        writers = min(self._ranks.size, self._worker.session.manifest.writers)
        if self._zero is not None:
            self._start(self._zero, made, parent, about)
        if writers > 1:
            self._unshared.append(made)
        elif self._zero is not None:
            made.reserved.add_done_callback(lambda _: self._writing.run(self._write, made))
        else:
            made.ended.set_result(True)

    def _start(self, zero: RankZero, made: _Offer, parent: str | None, about: About) -> None:
        attachment = zero.connector.session.attachment
        if attachment is None or not made.may_store:
            made.reserved.set_result(False)
            return
        of = known_of(attachment.session, made.epoch)
        made.known = zero.known.take(made.pages, of, has_state=STATES in made.counts)
        if made.known == len(made.pages):
            self._figures.add("stores_known")
            made.reserved.set_result(True)
            return
        above = made.pages[made.known - 1] if made.known else parent
        zero.chains.named(made.name, made.pages[made.known :], above, about.behind(made.pages[: made.known]))
        self._offering.run(self._reserve, zero, made)

    def count_ended(self) -> int:
        """How many offers have ended, counted from the oldest up to one that has not. All ranks call this in each
        step."""
        if self._unshared:
            self._share()
        if self._ranks.stages > 1:
            return self._count_in_stages()
        count = 0
        for offer in self._offers:
            if not offer.ended.done():
                break
            count += 1
        return count

    def take_ended(self) -> bool:
        """Removes the oldest offer, which must have ended. Returns whether the server has all of its pages."""
        offer = self._offers.popleft()
        ok = (self._agreed.popleft() if self._ranks.stages > 1 else offer.outcome) == _IS_STORED
        if self._zero is not None:
            failed = "stores_failed" if offer.may_store and self._is_current(offer) else "stores_outdated"
            self._figures.add("store_tokens" if ok else failed, self._tokens(offer) if ok else 1)
        return ok

    def _count_in_stages(self) -> int:
        """As many offers as have ended on all ranks, as far as the first stage knows. A later stage waits until its own
        copies have ended."""
        if self._offers:
            outcomes = self._ranks.least(self._outcomes())
            self._agreed = deque(takewhile(lambda outcome: outcome != _RUNS, outcomes))
        for offer in islice(self._offers, len(self._agreed)):
            offer.ended.exception()
        return len(self._agreed)

    def _outcomes(self) -> list[int]:
        """How the offers have ended on this rank; on rank 0, on all ranks: those behind one that runs count as running
        there."""
        outcomes, notes = [offer.outcome for offer in self._offers], self._ranks.notes
        if self._zero is None or notes is None:
            return outcomes
        notes.forget_before(self._offers[0].number)
        for at, offer in enumerate(self._offers):
            others = notes.all_stored(offer.number) if outcomes[at] != _RUNS else None
            if others is None:
                return outcomes[:at] + [_RUNS] * (len(outcomes) - at)
            outcomes[at] = outcomes[at] if others else _FAILED
        return outcomes

    def _is_current(self, offer: _Offer) -> bool:
        """Whether the weights of the offer are the present ones. May be called from any thread."""
        return offer.epoch == self._weights.epoch

    def then(self, call: Callable[..., None], *args: object) -> None:
        """Rank 0: runs a call to the server in the background, once slots are reserved for the offers so far."""
        self._offering.run(call, *args)

    def reset(self) -> None:
        """Waits until no copy reads a page. Called after SGLang has dropped its offers on all ranks."""
        if self._zero is not None:
            for offer in self._unshared:
                offer.reserved.exception()
                for attachment, plan in offer.plans:
                    self._zero.connector.stores.abort(attachment, plan)
                    attachment.release()
        for offer in self._offers:
            if offer not in self._unshared:
                offer.ended.exception()
        self._offers.clear()
        self._unshared.clear()
        self._agreed.clear()

    def close(self) -> None:
        self.reset()
        self._offering.close()
        self._writing.close()

    def _tokens(self, offer: _Offer) -> int:
        return len(offer.pages) * self._pools.page_tokens

    # ------------------------------------------------------------------ rank 0, background

    def _reserve(self, zero: RankZero, offer: _Offer) -> None:
        ok = False
        try:
            ok = self._reserved(zero.connector, offer)
        finally:
            if not offer.reserved.done():
                offer.reserved.set_result(ok)
            zero.connector.finished(offer.name)
            zero.chains.forget(offer.name)

    def _reserved(self, connector: SchedulerConnector, offer: _Offer) -> bool:
        if not self._is_current(offer):
            return False
        attachment = connector.session.attachment
        if attachment is not None:  # else the offer might be filed with the weights of before, where nobody looks
            with suppress(ServerUnavailable, ApiError):  # heartbeats report it again
                connector.session.report_weights(attachment)
        wanted = len(offer.pages) - offer.known
        tokens = range(wanted * self._pools.page_tokens)
        made = connector.stores.begin_store(offer.name, tokens, self._columns(offer), len(tokens))
        if made is None:
            return False

        def carry_out(batch: StoreBatch, plan: StorePlan | None) -> None:
            if plan is not None and made.attachment.acquire():
                offer.plans.append((made.attachment, plan))

        connector.stores.store(made, carry_out).result()
        return made.request.store.reserved >= wanted

    def _columns(self, offer: _Offer) -> list[list[int | None]]:
        """For each group, the numbers of the pages that SGLang offers for it and that are not known to be at the
        server."""
        columns: list[list[int | None]] = []
        for group in self._pools.groups:
            first = len(offer.pages) - offer.counts.get(group.transfer, 0)
            columns.append([at if at >= first else None for at in range(offer.known, len(offer.pages))])
        return columns

    # ------------------------------------------------------------------ all writers

    def _share(self) -> None:
        """Passes the plans that rank 0 has reserved by now to all writers, in the order of the offers."""
        ready: list[tuple[bool, list[Order]]] = []
        for offer in self._unshared if self._zero is not None else ():
            if not offer.reserved.done():
                break
            orders = [Order(0, attachment.epoch, plan) for attachment, plan in offer.plans]
            ready.append((offer.reserved.result(), orders))
        for ok, orders in self._ranks.share(ready):
            offer = self._unshared.popleft()
            if self._zero is None:
                takes_part = offer.may_store or self._ranks.stages > 1  # where no rank hears of another's refusal
                offer.plans = self._attached(orders) if takes_part else []
                offer.takes_part = len(offer.plans) == len(orders)
                offer.reserved.set_result(ok)
            if not orders or self._ranks.stages > 1 or self._ranks.node_agrees(len(offer.plans) == len(orders)):
                self._writing.run(self._write, offer)
                continue
            for attachment, plan in offer.plans:  # a rank does not take part: no rank writes
                if self._zero is not None:
                    self._zero.connector.stores.abort(attachment, plan)
                attachment.release()
            offer.ended.set_result(False)

    def _attached(self, orders: Sequence[Order]) -> list[tuple[Attachment, StorePlan]]:
        """The plans that are for the server epoch to which this rank is attached."""
        found = []
        for order in orders:
            assert order.epoch is not None and isinstance(order.plan, StorePlan)
            attachment = self._worker.session.attachment_to(order.epoch)
            if attachment is not None:
                found.append((attachment, order.plan))
        return found

    def _write(self, offer: _Offer) -> None:
        """Background: copies and commits this rank's parts of the offer, and ends the offer."""
        ok = False
        try:
            if offer.plans:
                offer.ready()
            pages = self._pages(offer) if offer.plans else {}
            are_stored = offer.takes_part
            for attachment, plan in offer.plans:
                try:
                    if not self._worker.writes:
                        continue  # another rank has the same heads, and stores them
                    if self._is_current(offer) and offer.may_store:
                        are_stored = self._store(attachment, _placed(plan, pages)) and are_stored
                    else:
                        are_stored = False
                        self._worker.session.abort(attachment, plan.reservation, self._worker.ranks)
                finally:
                    attachment.release()
            ok = are_stored and offer.reserved.result() and self._is_current(offer)
        finally:
            offer.ended.set_result(ok)
            if self._ranks.notes is not None and self._zero is None:
                self._ranks.notes.stored(offer.number, ok)

    def _store(self, attachment: Attachment, plan: StorePlan) -> bool:
        """Whether all of this rank's parts were committed."""
        storing = self._worker.submit_store(attachment, plan)
        self._worker.finish_store(storing)
        ahead = self._zero.ahead if self._zero is not None else None
        if ahead is not None and storing.committed:
            ahead.add(attachment, storing.committed)
        return len(storing.committed) == len(plan.pieces) * len(self._worker.ranks)

    def _pages(self, offer: _Offer) -> dict[int, list[int]]:
        """By group, the block ids of this rank's pages. A group with windows has only the last pages: -1 stands for the
        others, which no piece names."""
        found = {}
        for group, about in enumerate(self._pools.groups):
            if about.transfer in offer.indices:
                pages = about.pages_of(offer.indices[about.transfer])
                found[group] = [-1] * (len(offer.pages) - len(pages)) + pages
        return found


def _placed(plan: StorePlan, pages: Mapping[int, Sequence[int]]) -> StorePlan:
    """The plan with block ids in place of page numbers."""
    pieces = tuple(
        replace(piece, block_ids=tuple(pages[piece.group][number] for number in piece.block_ids))
        for piece in plan.pieces
    )
    return replace(plan, pieces=pieces)
