"""A rank beside the first: a process that does what rank 0 tells it, in the order it is told.

Messages come through one pipe: Asks (set up, join a server), Steps to compute with the whole team, Orders of the
connector, which run in threads. It decides nothing and keeps nothing when rank 0 is gone: the pipe ends, copies
in flight end, it leaves the server. An error of its own ends it, and rank 0 sees the pipe end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from torch._C._distributed_c10d import TCPStore

from kvdock.connectors.ranks import Answer, Order, RankWorker
from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.runner import Runner, Step
from kvdock.engine.team import LOOPBACK, GlooTeam, RankLost, Team

Gone = (EOFError, OSError)
"""What a pipe raises when the other end is not there any more."""


@dataclass(frozen=True)
class Ask:
    """Do something and say when it is done: with this rank, in its process."""

    what: Callable[[Rank], None]


@dataclass(frozen=True)
class Done:
    rank: int


class Rank:
    """`runner` and `worker` are set by what rank 0 asks."""

    runner: Runner
    worker: RankWorker | None = None

    def __init__(self, team: Team, link: Connection) -> None:
        self.team, self._link = team, link
        self._sending = threading.Lock()

    def answer(self, message: Answer | Done) -> None:
        """From any thread. Nobody needs it once rank 0 is gone."""
        with self._sending, suppress(*Gone):
            self._link.send(message)

    def serve(self) -> None:
        """Until rank 0 says nothing more. RankLost."""
        while True:
            try:
                message: Ask | Order | Step | None = self._link.recv()
            except Gone:
                return
            if message is None:
                return
            if isinstance(message, Step):
                self.runner.run(message)
            elif isinstance(message, Ask):
                message.what(self)
                self.answer(Done(self.team.rank))
            else:
                self._take(message)

    def _take(self, order: Order) -> None:
        if self.worker is not None:
            self.worker.take(order)
        else:
            self.answer(Answer(order.number, self.team.rank, is_started=False))
        if order.plan is None:
            self.worker = None

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def set_up(config: EngineConfig, rank: Rank) -> None:
    rank.close()
    rank.runner = Runner(config, KVCache(config), rank.team)


def main(link: Connection, port: int, number: int, size: int, timeout_s: float) -> None:
    """The whole process. `port`: of rank 0's store."""
    # An interrupt of the terminal is for rank 0, which ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    rank = Rank(GlooTeam(store, number, size, timeout_s), link)
    # That another rank is lost is for rank 0 to tell.
    with suppress(RankLost):
        try:
            rank.serve()
        finally:
            rank.close()
