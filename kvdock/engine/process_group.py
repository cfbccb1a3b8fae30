"""The processes of the other ranks, as rank 0 sees them: started, told what to do, watched, ended.

Owns the processes and a pipe to each. One thread listens to all pipes; one that ends says at once that its rank is
lost. Then the team is lost: the others are told to end too, and one that cannot hear, for it waits for the dead inside
a sum, is killed, which the server takes as it takes any death. Invariant: every rank gets Asks, Steps and Orders in the
order they were posted. One engine at a time uses a process group.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from kvdock.connectors.ranks import Answer, Order
from kvdock.datapath.threads import new_thread
from kvdock.engine.config import EngineConfig
from kvdock.engine.rank import Ask, Done, Gone, Rank, main, set_up
from kvdock.engine.runner import Runner, Step
from kvdock.engine.team import LOOPBACK, GlooTeam, RankLost

ENDING_S = 3.0
"""What a rank that is to end gets for copies in flight and a word to the server."""


class ProcessGroup:
    """Starts ranks 1 to `size` - 1; returns when all are there. RankLost when one does not come, or ever stays away
    from the others for `timeout_s`."""

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
        forkserver.set_forkserver_preload(["kvdock.engine.rank"])  # importing torch takes most of a rank's start
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
        """The model and fresh KV memory in every rank; what the ranks had before is gone. RankLost."""
        self.ask(partial(set_up, config))
        return ProcessGroupRunner(self, config)

    def ask(self, what: Callable[[Rank], None]) -> None:
        """Runs a function that can be pickled in every other rank, and waits for all. RankLost when one fails."""
        self._missing = set(self.processes)
        for rank in self.processes:
            self.post(rank, Ask(what))
        with self._news:
            answered = self._news.wait_for(lambda: self._lost or not self._missing, self._timeout_s)
        self.check()
        if not answered:
            raise RankLost(f"ranks {sorted(self._missing)} of {self.size} did not answer within {self._timeout_s} s")

    def post(self, rank: int, message: Ask | Step | Order | None) -> bool:
        """From any thread; False when the rank is not there any more."""
        with self._sending[rank]:
            try:
                self._links[rank].send(message)
            except OSError:
                return False
        return True

    def listen(self, answered: Callable[[Answer], None], lost: Callable[[int], None]) -> None:
        """Who gets the connector's answers and the news of lost ranks, in the listening thread."""
        with self._news:
            self._answered, self._on_lost = answered, lost
            for rank in self._lost:
                lost(rank)

    def check(self) -> None:
        """RankLost when a rank is gone."""
        if self._lost:
            raise RankLost(f"ranks: found {self._lost} of {self.size} gone, wanted all")

    def close(self) -> None:
        """Ends the ranks: their copies end and they leave the server. One that does not is killed, which is safe."""
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
    """Runs a step in all ranks."""

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
