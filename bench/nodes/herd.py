"""Many nodes that want one prefix at the same time, in one process: how often the store that they share is read.

    python -m bench.nodes.herd --json [--nodes 8 16 24 32] [--chunks 64] [--rounds 3]

Each node has a pool of its own, with a server, and what its mover has: the tiers `peers` and Redis, the fetches, the
leases that it gives to others. Nodes call each other without a network, and read each other's pools by copying, because
all pools are mapped here; each sends 50 MB/s. So what is measured is who reads from where. For each number of nodes:

- store_reads_per_byte: bytes that all nodes together load from the store, for each byte of the prefix: the median.
- most_store_reads_per_byte: the most of the rounds.
- most_readers: from how many other nodes' fetches one pool was read, at most.
- hit_share: of the chunks, the least that a node has in the end; wrong: chunks that have other bytes than were stored.
- took_s: until all have it, the median.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench.serving import Engine as Attached, ServerProcess, chain, manifest
from bench.tiers.stores import opened, start
from kvdock.client.client import Client
from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.mover_schemas import Generation, PeerAnswer, PeerQuestion, ServedNamespace
from kvdock.protocol.peer_schemas import PeerNotes, PeerNotesAnswer, PeerRead, PeerReadAnswer
from kvdock.protocol.wire_types import KEY_BYTES
from kvdock.shm.checksum import checksum
from kvdock.tiers.mover.agreement import Agreement, AgreementObserver
from kvdock.tiers.mover.fetches import Fetch, Fetches, FetchObserver, Wanted
from kvdock.tiers.mover.namespaces import NamespaceSession, NamespaceSessions
from kvdock.tiers.mover.peer_leases import PeerLeases
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.record import Record
from kvdock.tiers.stores.peers.engine import Engine
from kvdock.tiers.stores.peers.tier import PeerServer, PeersTier
from kvdock.tiers.tier import Deadline, Outcome, ToStore

PART_BYTES = 64 << 10
RATE = 5e7
"""What the Transfer Engine sends over TCP in parts of this size, in bytes a second (bench/LOG.md, 2026-11-28)."""
WAIT_S, PATIENCE_S = 20.0, 60.0
TURN_S = 0.01


class Links:
    """What each node sends to others goes one part after the other, at a rate in bytes a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_s = rate, threading.Lock(), dict[str, float]()

    def send(self, node: str, length: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            free_s = self._free_s[node] = max(now_s, self._free_s.get(node, 0.0)) + length / self._rate
        time.sleep(free_s - now_s)  # as long as the link is busy with it


class Copying(Engine):
    """In place of the Transfer Engine: copies within this process."""

    def __init__(self, name: str, links: Links) -> None:
        self.name = self.address = name
        self._links = links

    def admit(self, address: str) -> None: ...

    def register(self, address: int, length: int) -> None: ...

    def unregister(self, address: int) -> None: ...

    def read(self, engine: str, address: int, there: int, length: int) -> bool:
        self._links.send(engine, length)
        ctypes.memmove(address, there, length)
        return True

    def close(self) -> None: ...


class Calls:
    """The calls of one node to another."""

    def __init__(self, of: Node) -> None:
        self._of = of

    def peer_notes(self, body: PeerNotes, *, timeout_s: float | None = None) -> PeerNotesAnswer:
        return PeerNotesAnswer(generations=[1] * len(body.notes))

    def peer_read(self, body: PeerRead, *, timeout_s: float | None = None) -> PeerReadAnswer:
        if self._of.is_cut_off:
            raise ServerUnavailable("it is cut off")
        try:
            return self._of.asked(body).result(timeout_s)
        except TimeoutError as error:
            raise ServerUnavailable("it does not answer in time") from error

    def close(self) -> None: ...


class Node:
    """`address`: of its server. `url`: of the store."""

    def __init__(self, name: str, address: str, url: str) -> None:
        self.name, self._client, self.is_cut_off = name, Client(address), False
        self._engine = Attached(self._client, name, PART_BYTES)
        self._numbers = itertools.count(1)
        self._lock, self._questions = threading.Lock(), dict[int, Future[PeerReadAnswer]]()
        self.read_by: dict[bytes, set[str]] = defaultdict(set)
        """The addresses to which leases were given, by the first key of the prompt."""
        self._ended: dict[int, Future[Fetch]] = {}
        self._sessions = NamespaceSessions(self._client, f"mover-{name}", lambda *_: None, time.monotonic)
        self.digest = bytes.fromhex(self._engine.namespace)
        self._sessions.follow([ServedNamespace(namespace=self.digest.hex(), manifest=manifest(PART_BYTES))])
        self.agreement = Agreement(
            lambda: [self.digest], AgreementObserver(lambda _: None, lambda _: None, lambda _: None)
        )
        self.agreement.follow([Generation(namespace=self.digest.hex(), generation=1, edition=0)])
        self.store = TierHandle(opened(url), clock=time.monotonic, lost=lambda _: None)
        self.others: list[PeerServer]
        self.peers: TierHandle
        self.fetches: Fetches
        self.leases: PeerLeases

    def meet(self, others: Sequence[Node], links: Links) -> None:
        self.others = [PeerServer(one.name, Calls(one), time.monotonic) for one in others]
        tier = PeersTier(self.others, Copying(self.name, links))
        for server in self.others:
            server.node = server.last_node = server.address
        self.peers = TierHandle(tier, clock=time.monotonic, lost=lambda _: None)
        handles = [self.peers, self.store]
        self.fetches = Fetches(
            handles, self._client, self.agreement, FetchObserver(
                promised=lambda _: None, ended=self._has_ended, loaded=lambda *_: None, lacked=lambda *_: None,
                progressed=lambda: self.leases.progressed(),
            ), pool_bytes=1 << 40,
        )
        self.leases = PeerLeases(
            self._sessions, self._client, self.agreement, self.fetches.coming, self._answered, lambda: None,
            time.monotonic,
        )
        self.leases.tier = tier
        for handle in handles:
            self.agreement.use(handle)

    # ------------------------------------------------------------------ for other nodes

    def asked(self, body: PeerRead) -> Future[PeerReadAnswer]:
        number, answered = next(self._numbers), Future[PeerReadAnswer]()
        with self._lock:
            self._questions[number] = answered
        if body.address:
            assert isinstance(body.keys, bytes)
            self.read_by[body.keys[:KEY_BYTES]].add(body.address)
        self.leases.ask(PeerQuestion(number, body))
        return answered

    def _answered(self, answer: PeerAnswer) -> None:
        with self._lock:
            asked = self._questions.pop(answer.number)
        asked.set_result(answer.answer)

    # ------------------------------------------------------------------ fetches

    def keep(self, keys: Sequence[bytes]) -> None:
        """Stores chunks in the store alone."""
        agreed = self.agreement.wait_for(self.store, self.digest, Deadline(PATIENCE_S))
        assert agreed is not None
        parts = []
        for key in keys:
            data = bytes_of(key)
            record = Record(agreed.note.name(self.digest, key, 0, 0), len(data), checksum(data))
            parts.append(ToStore(record, memoryview(bytearray(data))))
        assert set(self.store.store(parts, Deadline(PATIENCE_S))) == {Outcome.DONE}

    @property
    def space(self) -> NamespaceSession:
        space = self._sessions.of(self.digest)
        assert space is not None
        return space

    def begin(self, keys: Sequence[bytes]) -> Future[Fetch]:
        ticket = next(self._numbers)
        ended = self._ended[ticket] = Future[Fetch]()
        self.fetches.start(Fetch(Wanted(self.space, keys, 0, ticket), WAIT_S))
        return ended

    def _has_ended(self, fetch: Fetch) -> None:
        self._ended.pop(fetch.wanted.ticket).set_result(fetch)

    def has(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(chunks that the pool has, and how many of them have other bytes than were stored)."""
        answer = self.leases_of(keys)
        there = next((at for at, parts in enumerate(answer.chunks) if not parts), len(answer.chunks))
        wrong = sum(
            ctypes.string_at(part.address, part.length) != bytes_of(key)
            for key, (part,) in zip(keys, answer.chunks[:there], strict=False)
        )
        return there, wrong

    def leases_of(self, keys: Sequence[bytes]) -> PeerReadAnswer:
        return self.asked(PeerRead(namespace=self.digest.hex(), generation=1, keys=b"".join(keys))).result(PATIENCE_S)

    def close(self) -> None:
        self.agreement.close()
        self.fetches.close()
        self.leases.close()
        self._sessions.close()
        for handle in (self.peers, self.store):
            handle.close(Deadline(PATIENCE_S))
        self._engine.close()
        self._client.close()


class Herd:
    """`addresses`: of the nodes' servers. `rate`: as of Links."""

    def __init__(self, addresses: Sequence[str], url: str, rate: float = RATE) -> None:
        self.nodes = [Node(f"node-{at}", address, url) for at, address in enumerate(addresses)]
        links = Links(rate)
        for node in self.nodes:
            node.meet([other for other in self.nodes if other is not node], links)
        self._is_closed = threading.Event()
        self._turns = threading.Thread(target=self._turn)
        self._turns.start()
        self._seeds = itertools.count()

    def _turn(self) -> None:
        while not self._is_closed.wait(TURN_S):
            for node in self.nodes:
                node.leases.end_late()

    def stored(self, chunks: int) -> list[bytes]:
        """The keys of a prompt that the store has and no pool."""
        whole = chain(chunks, f"prompt-{next(self._seeds)}")
        keys = [whole[at : at + KEY_BYTES] for at in range(0, len(whole), KEY_BYTES)]
        self.nodes[0].keep(keys)
        return keys

    def load(self, keys: Sequence[bytes], nodes: Sequence[Node]) -> dict[str, float]:
        """All these nodes want the prompt at the same time."""
        before, began_s = self._store_bytes, time.monotonic()
        waits = [node.begin(keys) for node in random.sample(nodes, len(nodes))]
        for one in waits:
            one.result(WAIT_S + PATIENCE_S)
        took_s = time.monotonic() - began_s
        found = [node.has(keys) for node in nodes]
        return {
            "store_reads_per_byte": (self._store_bytes - before) / (len(keys) * PART_BYTES),
            "most_readers": max(len(set().union(*(node.read_by[key] for key in keys))) for node in nodes),
            "hit_share": min(there for there, _ in found) / len(keys),
            "wrong": sum(wrong for _, wrong in found), "took_s": took_s,
        }

    @property
    def _store_bytes(self) -> int:
        return sum(node.store.counters["loaded_bytes"] for node in self.nodes)

    def close(self) -> None:
        self._is_closed.set()
        self._turns.join()
        for node in self.nodes:
            node.close()


def bytes_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(PART_BYTES)


def measure(count: int, chunks: int, rounds: int) -> dict[str, float]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-bench-")))
        url = start("redis", folder, 64, stack)
        settings: dict[str, Any] = {
            "pool_bytes": 2 * (rounds + 1) * chunks * PART_BYTES, "missed_heartbeats": 1000, "session_cap": 1.0,
            "total_cap": 1.0,
        }
        servers = [stack.enter_context(ServerProcess("serve", **settings)) for _ in range(count)]
        herd = Herd([one.unix for one in servers], url)
        stack.callback(herd.close)
        herd.load(herd.stored(chunks), herd.nodes)  # threads start, and speeds are learned
        found = [herd.load(herd.stored(chunks), herd.nodes) for _ in range(rounds)]
    reads = [one["store_reads_per_byte"] for one in found]
    return {
        "store_reads_per_byte": median(reads), "most_store_reads_per_byte": max(reads),
        "most_readers": max(one["most_readers"] for one in found),
        "hit_share": min(one["hit_share"] for one in found), "wrong": sum(one["wrong"] for one in found),
        "took_s": median(one["took_s"] for one in found),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.herd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--chunks", type=int, default=64, help="of the prefix, each of 64 KiB (default 64)")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    figures = {
        f"{count}_{name}": round(figure, 3)
        for count in chosen.nodes for name, figure in measure(count, chosen.chunks, chosen.rounds).items()
    }
    print(json.dumps(figures) if chosen.json else "\n".join(f"{name:32} {one}" for name, one in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
