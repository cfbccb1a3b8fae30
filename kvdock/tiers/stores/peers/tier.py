"""The pools of other nodes as a tier: a peer's server leases chunks to this node, whose engine reads them from there
into slots of this pool (docs/operate/peers.md). Nothing is stored in it.

The note of a namespace is kept here in memory. Its generation is the highest that a peer or this pool has, and a peer
is asked for chunks of that generation alone. So a peer whose pool has not followed a clear yet gives nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Final, Protocol, TypeVar

from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.peer_schemas import (
    MAX_GENERATION,
    MAX_NOTES,
    MAX_WAIT_S,
    PeerNote,
    PeerNotes,
    PeerNotesAnswer,
    PeerRead,
    PeerReadAnswer,
)
from kvdock.protocol.wire_types import MAX_STORE_KEYS, checksum_value
from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName
from kvdock.tiers.stores.peers.claims import Claims, keeper_of, rank
from kvdock.tiers.stores.peers.engine import INSTALL, TIER, Engine, PeersSettings
from kvdock.tiers.tier import (
    AT_STORE,
    Coming,
    Deadline,
    Loaded,
    NotEverywhere,
    NotInstalled,
    Outcome,
    Place,
    ReadOnly,
    Store,
    TierError,
    ToLoad,
    ToStore,
    Usage,
    address_of,
)

A = TypeVar("A")
ASK_S: Final = 1.0
"""How long a peer may take to answer."""
BUSY: Final = ("not_ready", "too_busy")
"""The refusals of a node that works, and has no time for the call."""
CALL_S: Final = 0.1
"""How much sooner than its caller gives up a peer answers that waits for a chunk."""
LAG_KEPT: Final = 0.8
"""With each answer that is quicker, so much of what is known of a peer's lag is kept."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
"""For how long a peer that has failed is not asked: at first, and at most. It doubles with each failure in a row."""
READERS: Final = 4
"""How many parts are read at once."""
FEW: Final = 8
"""With more other nodes than these, one is asked who loads before all are asked what they have."""
ASKERS: Final = 16
"""How many calls wait for peers at once, or two to each of them if that is more."""
MOST_HOLDERS: Final = 1 << 16
"""How many chunks are remembered with the peer that has them."""


class PeerCalls(Protocol):
    """The calls to another node's server. They raise ServerUnavailable, ApiError."""

    def peer_notes(self, body: PeerNotes, *, timeout_s: float | None = None) -> PeerNotesAnswer: ...

    def peer_read(self, body: PeerRead, *, timeout_s: float | None = None) -> PeerReadAnswer: ...

    def close(self) -> None: ...


class PeerServer:
    """Another node's server. `client`: it closes it. Thread-safe."""

    def __init__(self, address: str, client: PeerCalls, clock: Callable[[], float]) -> None:
        self.address, self._client, self._clock = address, client, clock
        self._lock = threading.Lock()
        self._rest_s, self._until_s = FIRST_REST_S, 0.0
        """How long it rests the next time, and until when it rests."""
        self._silent_s, self._answered_s = math.inf, -math.inf
        """Since when it has left calls without an answer, and when it has answered last."""
        self.why = ""
        """Why its last call or read has failed."""
        self._owed: dict[str, set[bytes]] = {}
        """By namespace, deleted keys of which it has not been told."""
        self.lag_s = 0.0
        """How long its last answers took at most, without the time for which it was asked to wait."""
        self.node = self.last_node = ""
        """Its name among its peers; "": it has not told it since it has failed last, or is of an earlier release.
        `last_node`: the name that it has told last, however often it has failed since."""

    @property
    def is_resting(self) -> bool:
        return self._clock() < self._until_s

    def notes(self, notes: Sequence[PeerNote], deadline: Deadline, *, again: bool = False) -> list[int] | None:
        """The generations there; None: it does not answer. `again`: as in PeerNotes."""
        body = PeerNotes(notes=list(notes), again=again and bool(self.last_node))
        answer = self._ask(deadline, partial(self._client.peer_notes, body))
        if answer is None:
            return None
        self.works()
        return answer.generations if len(answer.generations) == len(notes) else None

    def tell_deleted(
        self, namespace: str, generation: int, keys: Sequence[bytes], deadline: Deadline, *, again: bool = False
    ) -> bool:
        """Whether it knows now that these chunks were deleted. Until then nothing of the namespace is read there. It is
        not called while it rests. `again`: as in PeerNotes."""
        with self._lock:
            self._owed.setdefault(namespace, set()).update(keys)
        for begin in range(0, len(keys), MAX_STORE_KEYS):
            note = PeerNote(namespace, generation, b"".join(keys[begin : begin + MAX_STORE_KEYS]))
            if self.is_resting or self.notes([note], deadline, again=again) is None:
                return False
        with self._lock:
            self._owed.get(namespace, set()).difference_update(keys)
        return True

    def owed(self, namespace: str) -> frozenset[bytes]:
        """Deleted keys of which it has not been told."""
        with self._lock:
            return frozenset(self._owed.get(namespace, ()))

    def forget_owed(self, namespace: str) -> None:
        """The generation was raised, and nothing of an earlier one is read."""
        with self._lock:
            self._owed.pop(namespace, None)

    def read(self, body: PeerRead, deadline: Deadline) -> PeerReadAnswer:
        """What it leases, or only has; nothing if it does not answer."""
        return self.answer(body, deadline) or PeerReadAnswer()

    def answer(self, body: PeerRead, deadline: Deadline) -> PeerReadAnswer | None:
        """None: it does not answer, or must not be read."""
        if self._owed.get(body.namespace) and not body.claimer:
            return None
        began_s = self._clock()
        answer = self._ask(deadline, partial(self._client.peer_read, body))
        if answer is not None:
            self.lag_s = max(LAG_KEPT * self.lag_s, self._clock() - began_s - body.wait_s)
        if answer is not None and answer.node:
            self.node = self.last_node = answer.node
        return answer

    def _ask(self, deadline: Deadline, call: Callable[..., A]) -> A | None:
        """None: it does not answer. A node that is busy or not ready has not failed, nor has one that is late, unless
        it has answered nothing for ASK_S."""
        began_s, patience_s = self._clock(), _patience_s(deadline)
        try:
            answer = call(timeout_s=patience_s)
        except ServerUnavailable as error:
            now_s, self._silent_s = self._clock(), min(self._silent_s, max(began_s, self._answered_s))
            if now_s - began_s < patience_s or now_s - self._silent_s >= ASK_S:
                self.failed(str(error))
            return None
        except ApiError as error:
            self._silent_s, self._answered_s = math.inf, self._clock()
            if error.code not in BUSY:
                self.failed(str(error))
            return None
        self._silent_s, self._answered_s = math.inf, self._clock()
        return answer

    def release(self, lease: int, body: PeerRead) -> None:
        """Its reads have ended. If the peer does not answer, the lease ends by itself."""
        done = PeerRead(namespace=body.namespace, generation=body.generation, keys=b"", releases=[lease])
        self.read(done, Deadline(ASK_S))

    def works(self) -> None:
        with self._lock:
            self._rest_s, self._until_s, self.why = FIRST_REST_S, 0.0, ""

    def failed(self, why: str) -> None:
        with self._lock:
            self.why, self.node = f"{self.address}: {why}", ""
            if self._clock() >= self._until_s:
                self._until_s = self._clock() + self._rest_s
                self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def close(self) -> None:
        self._client.close()


class PeersTier:
    """It owns the engine and the peers, and closes them."""

    name = TIER
    poll_s = 1.0
    recheck_s = 3600.0  # nothing is stored, so nothing is asked for again

    def __init__(
        self, peers: Sequence[PeerServer], engine: Engine, clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: a monotonic clock, `wall_s`: Unix time, both in seconds."""
        self._engine, self._wall_s, self._lock = engine, wall_s, threading.Lock()
        self.node, self._claims = engine.name, Claims(clock)
        self._peers = sorted(peers, key=lambda peer: rank(peer.address, self.node.encode()))
        """In another order at each node: where several have a chunk, not all read it from the same one."""
        self.are_many = len(peers) > FEW
        self._notes: dict[bytes, Note] = {}
        self._deleting: dict[bytes, frozenset[bytes]] = {}
        """By namespace, deleted keys of which the peers are being told."""
        self._holders: OrderedDict[tuple[bytes, bytes], PeerServer] = OrderedDict()
        self._askers = ThreadPoolExecutor(max(ASKERS, 2 * len(self._peers)), "kvdock-peers")
        self._readers = ThreadPoolExecutor(READERS, "kvdock-peers-read")

    # -------------------------------------------------------------------------------------------------- the pool

    def register(self, address: int, length: int) -> None:
        """A segment of this node's pool: peers that were admitted read it. Raises TierError."""
        self._engine.register(address, length)

    def unregister(self, address: int) -> None:
        """See Registers."""
        self._engine.unregister(address)

    def admit(self, address: str) -> str:
        """See SharesPool."""
        self._engine.admit(address)
        return self._engine.name

    # -------------------------------------------------------------------------------------------------- who loads

    def claimed(self, namespace: bytes, generation: int, key: bytes, claimer: str) -> Place:
        """See SharesPool."""
        return self._claims.claim(namespace, generation, key, claimer)

    def claim(self, name: PartName, deadline: Deadline) -> Place:
        """See SharesPool."""
        known = {peer.node: peer for peer in self._peers if peer.node and not peer.is_resting}
        keeper = keeper_of(name.key, [*known, self.node])
        if keeper == self.node:
            place = self.claimed(name.namespace, name.generation, name.key, self.node)
        else:
            (body,) = _reads_of([name])
            body.claimer = self.node
            answer = known[keeper].answer(body, deadline)
            place = Place(answer.source, answer.depth, answer.nodes) if answer is not None else AT_STORE
        return place if place.source in known else AT_STORE

    def coming(self, at: Place, names: Sequence[PartName], lease: int, deadline: Deadline) -> Coming | None:
        """See SharesPool."""
        peer = next((peer for peer in self._peers if peer.node == at.source), None)
        if peer is None or peer.is_resting:
            return None
        body = _reads_of(names)[0]
        margin_s = max(CALL_S, 2 * peer.lag_s)
        body.address, body.wait_s = self._engine.address, max(0.0, min(MAX_WAIT_S, _patience_s(deadline) - margin_s))
        body.depth, body.releases = at.depth, [lease] if lease else []
        answer = peer.answer(body, deadline)
        if answer is None:
            return None
        keys, gone = _keys_of(body), self._gone(names[0].namespace)
        there = next(
            (at for at, (key, parts) in enumerate(zip(keys, answer.chunks, strict=False)) if not parts or key in gone),
            min(len(keys), len(answer.chunks)),
        )
        for key in keys[:there]:
            self._remember(bytes.fromhex(body.namespace), key, peer)
        return Coming(there, answer.coming, answer.lease)

    def lag_s(self, node: str) -> float:
        """See SharesPool."""
        return max((peer.lag_s for peer in self._peers if peer.last_node == node), default=0.0)

    def release(self, node: str, lease: int, name: PartName) -> None:
        """See SharesPool."""
        peer = next((peer for peer in self._peers if peer.last_node == node), None)
        if peer is not None:
            self._askers.submit(peer.release, lease, _reads_of([name])[0])

    # -------------------------------------------------------------------------------------------------- verbs

    def exists(self, names: Sequence[PartName], deadline: Deadline) -> list[bool]:
        has: set[tuple[bytes, int, int]] = set()
        for body in _reads_of(names):
            keys, gone = _keys_of(body), self._gone(bytes.fromhex(body.namespace))
            for peer, answer in self._ask_all(body, deadline):
                for key, parts in zip(keys, answer.chunks, strict=False):
                    if key in gone:
                        continue
                    has |= {(key, part.group, part.writer) for part in parts}
                    if parts:
                        self._remember(bytes.fromhex(body.namespace), key, peer)
        return [not name.deletion and (name.key, name.group, name.writer) in has for name in names]

    def load(self, parts: Sequence[ToLoad], deadline: Deadline) -> list[Loaded]:
        found = [Loaded(Outcome.MISSING)] * len(parts)
        for peer, indices in self._by_holder(parts):
            wanted = [at for at in indices if found[at].outcome is not Outcome.DONE]
            for body in _reads_of([parts[at].name for at in wanted]):
                keys = set(_keys_of(body))
                some = [at for at in wanted if parts[at].name.key in keys]
                self._load_from(peer, body, {at: parts[at] for at in some}, found, deadline)
        return found

    def store(self, parts: Sequence[ToStore], deadline: Deadline) -> list[Outcome]:
        raise ReadOnly(TIER, "the pools of other nodes are only read")

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        """Deletes nothing: a key that was deleted is not read from peers any more, and change() tells them."""
        return [Outcome.MISSING] * len(names)

    def _by_holder(self, parts: Sequence[ToLoad]) -> list[tuple[PeerServer, list[int]]]:
        """Who is asked for which parts: first each part's last known holder, then everybody for what is still missing.
        """
        first: dict[PeerServer, list[int]] = {}
        gone = {namespace: self._gone(namespace) for namespace in {part.name.namespace for part in parts}}
        rest = [
            at for at, part in enumerate(parts)
            if not part.name.deletion and part.name.key not in gone[part.name.namespace]
        ]
        with self._lock:
            for at in rest:
                holder = self._holders.get((parts[at].name.namespace, parts[at].name.key))
                if holder is not None:
                    first.setdefault(holder, []).append(at)
        return [*first.items(), *((peer, rest) for peer in self._peers)]

    def _load_from(
        self, peer: PeerServer, body: PeerRead, parts: dict[int, ToLoad], found: list[Loaded], deadline: Deadline
    ) -> None:
        if deadline.is_over or peer.is_resting:
            found_now = Outcome.LATE if deadline.is_over else Outcome.FAILED
            for at in parts:
                if found[at].outcome is Outcome.MISSING:
                    found[at] = Loaded(found_now)
            return
        body.address = self._engine.address
        answer = peer.read(body, deadline)
        there = {
            (key, part.group, part.writer): part
            for key, some in zip(_keys_of(body), answer.chunks, strict=False) for part in some
        }

        def read(at: int) -> None:
            part = parts[at]
            at_peer = there.get((part.name.key, part.name.group, part.name.writer))
            if at_peer is None or at_peer.length != part.length:
                return
            if deadline.is_over or peer.is_resting:
                found[at] = Loaded(Outcome.LATE if deadline.is_over else Outcome.FAILED)
            elif self._engine.read(answer.engine, address_of(part.pages), at_peer.address, part.length):
                found[at] = Loaded(Outcome.DONE, checksum_value(at_peer.checksum))
            else:
                found[at] = Loaded(Outcome.FAILED)
                peer.failed("a read by the Transfer Engine has failed")

        try:
            if answer.lease:
                list(self._readers.map(read, parts))
        finally:
            if answer.lease:
                peer.release(answer.lease, body)

    def _ask_all(self, body: PeerRead, deadline: Deadline) -> list[tuple[PeerServer, PeerReadAnswer]]:
        """Raises TierError: no peer answers."""
        peers = self._awake()
        asked = [self._askers.submit(peer.read, body, deadline) for peer in peers]
        return [(peer, one.result()) for peer, one in zip(peers, asked, strict=True)]

    def _awake(self) -> list[PeerServer]:
        """Raises TierError: all rest."""
        awake = [peer for peer in self._peers if not peer.is_resting]
        if not awake:
            raise TierError(TIER, f"no other node answers: {self._peers[0].why}")
        return awake

    def _remember(self, namespace: bytes, key: bytes, peer: PeerServer) -> None:
        with self._lock:
            self._holders[namespace, key] = peer
            self._holders.move_to_end((namespace, key))
            if len(self._holders) > MOST_HOLDERS:
                self._holders.popitem(last=False)

    # -------------------------------------------------------------------------------------------------- notes

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        """Peers whose pools are behind follow. Those that do not answer are left out."""
        with self._lock:
            known = [self._notes.get(namespace) for namespace in namespaces]
        told = [
            PeerNote(namespace.hex(), note.generation if note is not None else 0)
            for namespace, note in zip(namespaces, known, strict=True)
        ]
        peers = self._awake()
        asked = [self._askers.submit(peer.notes, told[:MAX_NOTES], deadline) for peer in peers]
        for peer in peers if namespaces else ():
            if not peer.node:
                self._askers.submit(peer.read, PeerRead(namespace=told[0].namespace, generation=0, keys=b""), deadline)
        answers = [answer for one in asked if (answer := one.result()) is not None]
        if not answers:
            raise TierError(TIER, f"no other node answers: {peers[0].why}")
        with self._lock:
            for at, namespace in enumerate(namespaces[:MAX_NOTES]):
                highest = max(generations[at] for generations in answers)
                note = self._notes.get(namespace)
                if note is not None or highest:
                    self._notes[namespace] = (note or Note.new(highest)).at_least(highest)
            return [self._notes.get(namespace) for namespace in namespaces]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        """A clear gets a generation that no pool has had: it is made from the time, so two nodes that clear while they
        are cut off from each other get different ones. All peers are told of deleted keys; those that do not answer
        are not read until they have. Raises NotEverywhere, which asks for another try."""
        with self._lock:
            before = self._notes.get(namespace) or Note.new(0)
        after = change(before)
        if change(Note(before.birth, MAX_GENERATION)).generation > MAX_GENERATION:
            after = Note(before.birth, max(after.generation, int(1000 * self._wall_s())))
        gone = [key for key, number in after.deleted.items() if before.deleted.get(key) != number]
        if after.generation > before.generation:
            for peer in self._peers:
                peer.forget_owed(namespace.hex())
        self._deleting[namespace] = frozenset(gone)
        try:
            if gone:
                self._tell_deleted(namespace.hex(), after.generation, gone, deadline)
            with self._lock:
                self._notes[namespace] = after
        finally:
            self._deleting.pop(namespace, None)
        return after

    def _tell_deleted(self, namespace: str, generation: int, keys: Sequence[bytes], deadline: Deadline) -> None:
        """Tells those that have not been told of all of it. Each one that is told may have given the chunks to others
        meanwhile, which are told once more. Raises NotEverywhere: a peer does not answer."""
        owed = {peer: peer.owed(namespace) for peer in self._peers}
        is_again = frozenset(keys) <= frozenset().union(*owed.values())
        first = [peer for peer in self._peers if not is_again or not owed[peer].isdisjoint(keys)]
        others = [peer for peer in self._peers if peer not in first]
        untold: set[PeerServer] = set()
        for peers in (first, others):
            asked = [
                self._askers.submit(peer.tell_deleted, namespace, generation, keys, deadline, again=peers is others)
                for peer in peers
            ]
            untold |= {peer for peer, one in zip(peers, asked, strict=True) if not one.result()}
            if len(untold) == len(first):
                break  # nobody was told
        if untold:
            names = ", ".join(sorted(peer.address for peer in untold))
            raise NotEverywhere(TIER, f"a deletion is not known yet at {names}")

    def _gone(self, namespace: bytes) -> frozenset[bytes]:
        """Deleted keys that some peer may still have, and others may have read there again."""
        owed = (peer.owed(namespace.hex()) for peer in self._peers)
        return self._deleting.get(namespace, frozenset()).union(*owed)

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        """Returns an empty list: peers are asked about namespaces that this node serves."""
        return []

    def usage(self) -> Usage:
        return Usage(0, 0, 0, 0)

    def close(self, deadline: Deadline) -> None:
        for threads in (self._askers, self._readers):
            threads.shutdown(cancel_futures=True)
        for peer in self._peers:
            peer.close()
        self._engine.close()


def open_tier(url: str, deadline: Deadline) -> PeersTier:
    """`url`: docs/operate/peers.md. Raises TierUrlError, and TierError where the engine cannot be used."""
    settings = PeersSettings.parse(url)
    engine, token_file = Engine.open(settings), str(settings.token_file)
    return PeersTier([
        PeerServer(one, Client(f"http://{one}", timeout_s=ASK_S, access_token_file=token_file), time.monotonic)
        for one in settings.servers
    ], engine)


def registers_memory(url: str) -> bool:
    """Raises TierUrlError."""
    PeersSettings.parse(url)
    return True


def check(url: str) -> None:
    """Raises TierUrlError, NotInstalled."""
    PeersSettings.parse(url)
    if find_spec("mooncake") is None:
        raise NotInstalled(TIER, f"the Transfer Engine is not installed, wanted: {INSTALL}")


STORE: Final = Store(open_tier, registers_memory, check)


def _reads_of(names: Sequence[PartName]) -> list[PeerRead]:
    """The calls that ask for these parts, each of one namespace and generation."""
    keys: dict[tuple[bytes, int], dict[bytes, None]] = {}
    for name in names:
        keys.setdefault((name.namespace, name.generation), {})[name.key] = None
    return [
        PeerRead(namespace=namespace.hex(), generation=generation, keys=b"".join(some[at : at + MAX_STORE_KEYS]))
        for (namespace, generation), wanted in keys.items() for some in [list(wanted)]
        for at in range(0, len(some), MAX_STORE_KEYS)
    ]


def _keys_of(body: PeerRead) -> list[bytes]:
    assert isinstance(body.keys, bytes), "made here"
    return [body.keys[at : at + 32] for at in range(0, len(body.keys), 32)]


def _patience_s(deadline: Deadline) -> float:
    return max(0.01, min(ASK_S, deadline.left_s))
