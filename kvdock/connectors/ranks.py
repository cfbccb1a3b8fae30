"""Sends orders to the worker connectors of the other ranks, and combines their answers.

    rank 0      Peers.send ──► Order ─────► each rank …… Barrier.wait ◄── Answer ◄── each rank
    rank 1…     RankWorker.take ──► its own thread ──► WorkerConnector.load, store ──► Answer

The engine transports the messages, because it has connections to its ranks already. Invariants: every order that was
sent has one answer, or its rank is lost; a rank that answers "not started" has not touched the grant and never will,
because an order is sent once, so rank 0 may answer the server for that rank. If a rank is lost while it has an order,
no other rank answers for it: the server notices that its process is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdock.connectors.background import Background
from kvdock.connectors.plans import LoadPlan, StorePlan, valid_in_all
from kvdock.connectors.session import Attachment, EngineSession, ServerEpoch
from kvdock.connectors.worker import WorkerConnector


@dataclass(frozen=True)
class Order:
    """What rank 0 wants of a rank: a load, a store, or its end."""

    number: int
    epoch: ServerEpoch | None
    """The server epoch whose slots the plan names."""
    plan: LoadPlan | StorePlan | None
    """None: the rank is to leave the server."""


@dataclass(frozen=True)
class Answer:
    """What became of an order on one rank."""

    number: int
    rank: int
    is_started: bool
    valid_tokens: int = 0
    """How many tokens of a load are valid, from token 0 on; 0 for a store."""


class Barrier:
    """Collects the answers to one order."""

    def __init__(self, ranks: Sequence[int], ended: Callable[[], object]) -> None:
        self._forget = ended
        self._missing = set(ranks)
        self._ended = threading.Condition()
        self._not_started: list[int] = []
        self._valid_tokens: list[int] = []

    def take(self, rank: int, answer: Answer | None) -> None:
        """`answer` None: the rank is lost, and no token of its load is valid."""
        with self._ended:
            if rank not in self._missing:
                return
            self._missing.discard(rank)
            self._valid_tokens.append(answer.valid_tokens if answer is not None else 0)
            if answer is not None and not answer.is_started:
                self._not_started.append(rank)
            self._ended.notify_all()

    def wait(self) -> tuple[int | None, list[int]]:
        """Waits until every rank has answered. Returns how many tokens are valid on all of them (None: there are no
        other ranks), and the ranks that have not started."""
        with self._ended:
            # Without a limit: a rank that neither answers nor dies may still be writing blocks.
            self._ended.wait_for(lambda: not self._missing)
            self._forget()
            return valid_in_all(self._valid_tokens), sorted(self._not_started)


class Peers:
    """Rank 0's connections to the other ranks. `post(rank, order)`: sends an order, from any thread; returns False if
    the rank did not get it and never will. The code that receives the ranks' messages calls `answered` and `lost`."""

    def __init__(self, ranks: Sequence[int] = (), post: Callable[[int, Order], bool] = lambda rank, order: False):
        self._ranks, self._post = tuple(ranks), post
        self._lock = threading.Lock()
        self._barriers: dict[int, Barrier] = {}
        self._lost: set[int] = set()
        self._sent = 0

    def send(self, epoch: ServerEpoch | None, plan: LoadPlan | StorePlan | None, *, below: int) -> Barrier:
        """Sends the plan to the ranks below `below`."""
        ranks = [rank for rank in self._ranks if rank < below]
        with self._lock:
            self._sent += 1
            order, lost = Order(self._sent, epoch, plan), set(self._lost)
            barrier = Barrier(ranks, lambda: self._barriers.pop(order.number, None))
            self._barriers[order.number] = barrier
        for rank in ranks:
            if rank in lost or not self._post(rank, order):
                barrier.take(rank, Answer(order.number, rank, is_started=False))
        return barrier

    def answered(self, answer: Answer) -> None:
        """A rank has answered an order. From any thread; an answer that nobody waits for any more is dropped."""
        with self._lock:
            barrier = self._barriers.get(answer.number)
        if barrier is not None:
            barrier.take(answer.rank, answer)

    def lost(self, rank: int) -> None:
        """The process of that rank is known to be gone: nobody waits for its answers. From any thread."""
        with self._lock:
            self._lost.add(rank)
            barriers = list(self._barriers.values())
        for barrier in barriers:
            barrier.take(rank, None)

    def close(self) -> None:
        """The ranks leave the server, each after its copies."""
        self.send(None, None, below=len(self._ranks) + 1).wait()


class RankWorker:
    """Carries out the orders that a rank receives, loads in one thread and stores in another."""

    def __init__(self, session: EngineSession, worker: WorkerConnector, answer: Callable[[Answer], None]) -> None:
        self.session, self.worker, self._answer = session, worker, answer
        self._loading, self._storing = Background("kvdock-load"), Background("kvdock-store")

    def take(self, order: Order) -> None:
        """Carries out an order in the background, and answers it. It blocks only for the last one, which closes the
        rank."""
        if order.plan is None:
            self.close()
            self._answer(Answer(order.number, self.worker.rank, is_started=False))
        elif isinstance(order.plan, LoadPlan):
            self._loading.run(self._load, order, order.plan)
        else:
            self._storing.run(self._store, order, order.plan)

    def close(self) -> None:
        """Waits for the copies of this rank, then leaves the server."""
        for background in (self._loading, self._storing):
            background.close()
        self.worker.close()
        self.session.close()
        self.session.client.close()

    def _load(self, order: Order, plan: LoadPlan) -> None:
        attachment = self._attachment(order)
        if attachment is None:
            return
        valid = plan.local_tokens
        try:
            valid = self.worker.load(attachment, plan)
        finally:
            self._answer(Answer(order.number, self.worker.rank, is_started=True, valid_tokens=valid))
            self.worker.settle(attachment)
            attachment.release()

    def _store(self, order: Order, plan: StorePlan) -> None:
        attachment = self._attachment(order)
        if attachment is None:
            return
        try:
            self.worker.store(attachment, plan)
        finally:
            attachment.release()
            self._answer(Answer(order.number, self.worker.rank, is_started=True))

    def _attachment(self, order: Order) -> Attachment | None:
        """The attachment to the order's server epoch, acquired. None when this rank is not attached to it; then the
        order has been answered with "not started"."""
        attachment = self.session.attachment_to(order.epoch) if order.epoch is not None else None
        if attachment is None:
            self._answer(Answer(order.number, self.worker.rank, is_started=False))
        return attachment
