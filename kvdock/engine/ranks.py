"""The processes that compute one model together: rank 0's control of the other processes, and the code that runs in
them.

ProcessGroup, in rank 0, starts the other processes, sends them messages, watches and ends them; it owns the processes
and a pipe to each. Rank is the other end of a pipe: it handles the messages in the order in which they come. An Ask
runs a function in the rank's process (set up the model, attach to a server), a Step is computed by all ranks together,
and an Order of the connector runs in a thread. A Rank decides nothing. When rank 0 is gone, the pipe ends, and the Rank
ends its copies and leaves the server. If a Rank raises, its process ends, and rank 0 sees the pipe end.

One thread listens to all pipes. When one ends, its rank is lost, and so is the whole group: the others are ordered to
end, too. A rank that cannot read the order, because it waits for the dead rank inside a sum, is killed, which the
server handles like any death. Invariants: every rank gets Asks, Steps and Orders in the order in which they were
posted; GlooTeam adds in the order of the ranks, so every rank gets the same bits, every time. One engine at a time uses
a process group.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo

from kvdock.connectors.ranks import Answer, Order, RankWorker
from kvdock.datapath.threads import new_thread
from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.model import Runner, Step, Team

LOOPBACK = "127.0.0.1"
ENDING_S = 3.0
"""How long a rank may take to end: its copies end, and it leaves the server."""


class RankLost(RuntimeError):
    """A process of the group has ended or does not answer, so the model cannot be computed any more."""


class GlooTeam:
    """`size` processes of this machine that meet at `store`. Waits for all of them; raises RankLost if one does not
    come."""

    def __init__(self, store: TCPStore, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        # torch's type stubs know neither this class nor the collectives.
        options = vars(ProcessGroupGloo)["_Options"]()
        options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._gloo: Any = ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise RankLost(f"rank {rank} of {size} did not find the others: {error}") from error

    def total(self, part: Tensor) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        try:
            self._gloo.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size} cannot reach the others: {error}") from error
        return reduce(torch.add, parts)


# ------------------------------------------------------------------ rank 0


class ProcessGroup:
    """Starts ranks 1 to `size` - 1, and waits for all of them. Raises RankLost when one does not come within
    `timeout_s`. Later calls of its methods and of its team raise RankLost, too, when a rank has ended or does not
    answer for that long."""

    def __init__(self, size: int, *, timeout_s: float = 30.0) -> None:
        self.size, self._timeout_s = size, timeout_s
        self._news = threading.Condition()
        self._missing: set[int] = set()
        self._lost: list[int] = []
        self._answered: Callable[[Answer], None] = lambda answer: None
        self._on_lost: Callable[[int], None] = lambda rank: None
        self._sending = {rank: threading.Lock() for rank in range(1, size)}
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(["kvdock.engine.ranks"])  # importing torch takes most of a rank's start
        self.processes: dict[int, ForkServerProcess] = {}
        self._links: dict[int, Connection] = {}
        for rank in range(1, size):
            self._links[rank], theirs = forkserver.Pipe()
            process = forkserver.Process(target=main, args=(theirs, store.port, rank, size, timeout_s), daemon=True)
            process.start()
            theirs.close()
            self.processes[rank] = process
        self._listener = new_thread("kvdock-ranks", self._listen)
        self._listener.start()
        try:
            self.team = GlooTeam(store, 0, size, timeout_s)
        except RankLost:
            self.close()
            raise

    def runner(self, config: EngineConfig) -> ProcessGroupRunner:
        """Makes the model and new KV memory in every rank, in place of earlier ones. Raises RankLost."""
        self.ask(partial(set_up, config))
        return ProcessGroupRunner(self, config)

    def ask(self, what: Callable[[Rank], None]) -> None:
        """Runs a function, which must be picklable, in every other rank, and waits for all. Raises RankLost when one
        fails."""
        self._missing = set(self.processes)
        for rank in self.processes:
            self.post(rank, Ask(what))
        with self._news:
            answered = self._news.wait_for(lambda: self._lost or not self._missing, self._timeout_s)
        self.check()
        if not answered:
            raise RankLost(f"ranks {sorted(self._missing)} of {self.size} did not answer within {self._timeout_s} s")

    def post(self, rank: int, message: Ask | Step | Order | None) -> bool:
        """Sends a message; may be called from any thread. False: the rank is gone."""
        with self._sending[rank]:
            try:
                self._links[rank].send(message)
            except OSError:
                return False
        return True

    def listen(self, answered: Callable[[Answer], None], lost: Callable[[int], None]) -> None:
        """Sets the functions that the listening thread calls with the connector's answers, and with ranks that are
        lost."""
        with self._news:
            self._answered, self._on_lost = answered, lost
            for rank in self._lost:
                lost(rank)

    def check(self) -> None:
        """Raises RankLost when a rank is gone."""
        if self._lost:
            raise RankLost(f"ranks: found {self._lost} of {self.size} gone, wanted all")

    def close(self) -> None:
        """Ends the ranks: their copies end, and they leave the server. A rank that does not end is killed, which is
        safe."""
        for rank in self.processes:
            self.post(rank, None)
        for process in self.processes.values():
            process.join(ENDING_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._listener.join()
        for link in self._links.values():
            link.close()

    def _listen(self) -> None:
        links = {link: rank for rank, link in self._links.items()}
        while links:
            ready = wait(list(links), ENDING_S if self._lost else None)
            for rank in () if ready else links.values():
                self.processes[rank].kill()
            for link in ready:
                assert isinstance(link, Connection)
                try:
                    message: Answer | Done = link.recv()
                except Gone:
                    self._take_lost(links.pop(link))
                    continue
                if isinstance(message, Done):
                    with self._news:
                        self._missing.discard(message.rank)
                        self._news.notify_all()
                else:
                    self._answered(message)

    def _take_lost(self, rank: int) -> None:
        with self._news:
            first = not self._lost
            self._lost.append(rank)
            self._on_lost(rank)
            self._news.notify_all()
        for other in self.processes if first else ():
            self.post(other, None)


class ProcessGroupRunner(Runner):
    """Runs each step in all ranks."""

    def __init__(self, process_group: ProcessGroup, config: EngineConfig) -> None:
        super().__init__(config, team=process_group.team)
        self._process_group = process_group

    def check(self) -> None:
        self._process_group.check()

    def run(self, step: Step) -> Tensor:
        for rank in self._process_group.processes:
            if not self._process_group.post(rank, step):
                raise RankLost(f"rank {rank} of {self._process_group.size} is gone")
        return super().run(step)


# ------------------------------------------------------------------ the other ranks


Gone = (EOFError, OSError)
"""The errors of a pipe whose other end is closed."""


@dataclass(frozen=True)
class Ask:
    """An order to call `what` with the Rank, in its process, and to answer with Done."""

    what: Callable[[Rank], None]


@dataclass(frozen=True)
class Done:
    rank: int


class Rank:
    """What a process other than rank 0 runs. `runner` and `worker` are set by functions that rank 0 sends as Asks."""

    runner: Runner
    worker: RankWorker | None = None

    def __init__(self, team: Team, link: Connection) -> None:
        self.team, self._link = team, link
        self._sending = threading.Lock()

    def answer(self, message: Answer | Done) -> None:
        """Sends a message to rank 0; may be called from any thread. If rank 0 is gone the message is dropped."""
        with self._sending, suppress(*Gone):
            self._link.send(message)

    def serve(self) -> None:
        """Handles messages until rank 0 ends the rank or is gone. Raises RankLost."""
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
    """The main function of a rank's process. `port`: that of rank 0's store."""
    # Ctrl-C in the terminal is handled by rank 0, which ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    rank = Rank(GlooTeam(store, number, size, timeout_s), link)
    # Rank 0 reports that another rank is lost.
    with suppress(RankLost):
        try:
            rank.serve()
        finally:
            rank.close()
