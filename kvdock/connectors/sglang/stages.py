"""Messages between the stages of a pipeline. Each stage has a scheduler of SGLang's, and all plan the same batches.

    stage 0 ── decisions, in the order of SGLang's calls ──► stage 1 ──► stage 2
    every rank ── notes ──► a store that all ranks read

The first stage is ahead of the others: it plans the next batch while the last stage still plans the one before. So it
decides, and a later stage receives its decisions and follows them. The first stage does not wait for the later ones,
because they need what it sends after that. What it needs to know of them is in notes: each rank notes the session to
which it is attached, and the outcomes of its loads and stores. Rank 0 reads the notes of sessions and stores when they
are made, in a thread of its own, so lookups do not ask the store once all ranks are attached.

Invariant: whether a stage passes a decision on follows from SGLang's calls and earlier decisions alone, so every stage
receives as many as the one before it has sent.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from kvdock.datapath.threads import new_thread

log = logging.getLogger("kvdock.sglang")

T = TypeVar("T")

TAG = 0x6B76
"""The tag of kvdock's messages in SGLang's process group, which uses others."""
STEPS_BEHIND = 2
"""After this many steps of the scheduler's loop, the next stage has received a message of kvdock's: it receives
SGLang's messages of a later step only after it."""
KEPT_OUTCOMES = 256
"""How many outcomes of loads a rank leaves in the store. No rank reads one that is so many batches old."""
PATIENCE_S = 60.0
CLOSE_S = 5.0
CATCH_UP_S = 1.0
"""How long rank 0 waits for its thread to take out messages that are in the store."""
LISTEN_S = 3600.0
"""How long one wait for a message lasts: a wait needs an end, and an engine may be idle for weeks."""


class Decisions:
    """Passes decisions from each stage to the next one. `group`: a torch.distributed process group with one rank of
    each stage, in the order of the stages."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as distributed

        self._distributed, self._group = distributed, group
        self.stage, self.stages = distributed.get_rank(group=group), distributed.get_world_size(group=group)
        self._sent: deque[list[Any]] = deque([[]])
        """By step, the messages in transit, which must stay in memory."""

    def passed_on(self, value: T) -> T:
        """Returns the first stage's `value` in every stage."""
        if self.stage > 0:
            value = self._receive()
        if self.stage + 1 < self.stages:
            self._send(value)
        return value

    def step(self) -> None:
        """A step of the scheduler's loop begins."""
        self._sent.append([])
        while len(self._sent) > STEPS_BEHIND + 1:
            for work, _ in self._sent.popleft():
                work.wait()

    def delivered(self) -> None:
        """Waits until the next stage has received all. Only at the start."""
        for work, _ in itertools.chain.from_iterable(self._sent):
            work.wait()
        self._sent = deque([[]])

    def _send(self, value: object) -> None:
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        for message in (torch.tensor([len(data)]), data):
            work = self._distributed.isend(message, group=self._group, group_dst=self.stage + 1, tag=TAG)
            self._sent[-1].append((work, message))

    def _receive(self) -> Any:
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self._distributed.recv(length, group=self._group, group_src=self.stage - 1, tag=TAG)
        data = torch.zeros(int(length.item()), dtype=torch.uint8)
        self._distributed.recv(data, group=self._group, group_src=self.stage - 1, tag=TAG)
        return pickle.loads(data.numpy().tobytes())


class Told:
    """What rank 0 knows of the `ranks` of the engine, itself among them. Thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._lock, self._messages, self._is_lost = threading.Condition(), 0, False
        self._sessions: list[str | None] = [None] * ranks
        self._stored: dict[int, list[bool]] = {}
        """By the number of an offer, the outcomes on the other ranks that have ended it."""

    def hear(self, rank: int, value: str | tuple[int, bool], messages: int = 0) -> None:
        """`value`: the rank's session, or (number, ok) of an offer that it has ended. `messages`: how many have come
        with this one."""
        with self._lock:
            self._messages = max(self._messages, messages)
            self._lock.notify_all()
            if isinstance(value, str):
                self._sessions[rank] = value
            else:
                self._stored.setdefault(value[0], []).append(value[1])

    def wait_for(self, messages: int, timeout_s: float) -> None:
        """Waits until that many messages have come."""
        with self._lock:
            self._lock.wait_for(lambda: self._messages >= messages or self._is_lost, timeout_s)

    def lose(self) -> None:
        """No message comes any more: no rank counts as attached, and no offer as stored."""
        with self._lock:
            self._is_lost = True
            self._lock.notify_all()

    def all_attached(self, session: str) -> bool:
        with self._lock:
            return not self._is_lost and set(self._sessions) == {session}

    def forget_before(self, number: int) -> None:
        """The offers before that number have been answered to SGLang, or SGLang has dropped them."""
        with self._lock:
            for passed in [one for one in self._stored if one < number]:
                del self._stored[passed]

    def all_stored(self, number: int) -> bool | None:
        """See Notes."""
        with self._lock:
            outcomes = self._stored.get(number, [])
            if len(outcomes) + 1 == len(self._sessions):
                return all(outcomes)
            return False if self._is_lost else None


class Notes:
    """What the ranks of an engine note for each other. `store`: a torch.distributed Store that all of them reach; it
    has no other notes. `rank`: this rank, of `ranks`. Thread-safe."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._reads, self._writes = store, store.clone()  # a connection that waits serves nothing else
        self._rank, self._ranks = rank, range(ranks)
        self._session: str | None = None
        self._told = Told(ranks)
        """Only rank 0 reads it."""
        self._listening: threading.Thread | None = None

    def attached(self, session: str) -> None:
        """This rank takes part in loads of this session from now on; empty: in none. Called in SGLang's thread."""
        if self._rank == 0:
            self._listen()
        if session != self._session:
            self._session = session
            self._tell(session)

    def all_attached(self, session: str) -> bool:
        """Rank 0: whether all ranks have noted this session last. Asks the store only if one has not, as far as this
        rank knows."""
        if not self._told.all_attached(session):
            self._told.wait_for(self._reads.add("messages", 0), CATCH_UP_S)
        return self._told.all_attached(session)

    def stored(self, number: int, ok: bool) -> None:
        """This rank, which is not rank 0, has ended its part of the offer of that number. From any thread."""
        self._tell((number, ok))

    def forget_before(self, number: int) -> None:
        """Rank 0: nobody asks for the offers before that number any more."""
        self._told.forget_before(number)

    def all_stored(self, number: int) -> bool | None:
        """Rank 0: whether all others have stored their parts of the offer; None: some have not ended it."""
        return self._told.all_stored(number)

    def close(self) -> None:
        if self._listening is not None:
            with suppress(RuntimeError):  # the store may be gone, and then the thread ends by itself
                self._post(None)
            self._listening.join(CLOSE_S)

    def _tell(self, value: str | tuple[int, bool]) -> None:
        """Tells rank 0 this rank's session, or (number, ok) of an offer."""
        if self._rank == 0:
            self._told.hear(0, value)
        else:
            self._post((self._rank, value))

    def _post(self, message: tuple[int, str | tuple[int, bool]] | None) -> None:
        """Puts a message for rank 0 into the store. None ends its thread."""
        number = self._writes.add("messages", 1)
        self._writes.set(f"message {number}", pickle.dumps(message))

    def _listen(self) -> None:
        if self._listening is None:
            self._listening = new_thread("kvdock-notes", partial(self._receive, self._reads.clone()))
            self._listening.start()

    def _receive(self, store: Any) -> None:
        """In a thread of rank 0: takes the messages out of the store, in their order."""
        import torch.distributed as distributed

        for number in itertools.count(1):
            key = f"message {number}"
            try:
                while not _waited(store, [key], LISTEN_S):
                    """Nobody has had anything to tell."""
                message = pickle.loads(store.get(key))
                store.delete_key(key)
            except distributed.DistError as error:
                log.warning("nothing is loaded or stored any more: notes of other ranks cannot be read: %s", error)
                self._told.lose()
                return
            if message is None:
                return
            rank, value = message
            self._told.hear(rank, value, number)

    def landed(self, number: int, ok: bool) -> None:
        """This rank's loads of the batch of that number have ended. From any thread; in the order of the batches."""
        self._writes.set(f"landed {number} {self._rank}", "1" if ok else "0")
        if number >= KEPT_OUTCOMES:
            self._writes.delete_key(f"landed {number - KEPT_OUTCOMES} {self._rank}")

    def all_landed(self, number: int) -> bool:
        """Waits until the loads of the batch have ended on all ranks. Returns whether all are complete."""
        keys = [f"landed {number} {rank}" for rank in self._ranks]
        while not _waited(self._reads, keys, PATIENCE_S):
            missing = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._reads.check([key])]
            log.warning("loads of batch %s have not ended on ranks %s within %g s", number, missing, PATIENCE_S)
        return set(self._reads.multi_get(keys)) == {b"1"}


def _waited(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Waits until the keys are in the store. False: the time is over."""
    import torch.distributed as distributed

    try:
        store.wait(keys, timedelta(seconds=seconds))
    except distributed.DistStoreError:  # a store that is gone raises DistNetworkError
        return False
    return True
