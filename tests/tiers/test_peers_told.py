"""Which nodes are told of a deletion, how often, and what is read meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvdock.protocol.errors import ServerUnavailable
from kvdock.protocol.peer_schemas import PeerNotes, PeerNotesAnswer, PeerPart, PeerRead, PeerReadAnswer
from kvdock.protocol.wire_types import MAX_STORE_KEYS
from kvdock.tiers.notes import MOST_DELETED, Note, deletes
from kvdock.tiers.record import PartName
from kvdock.tiers.stores.peers.engine import Engine
from kvdock.tiers.stores.peers.tier import ASK_S, PeerServer, PeersTier
from kvdock.tiers.tier import Deadline, NotEverywhere, Outcome, Place, ToLoad

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(60)]

SPACE = b"\1" * 32
GONE, KEPT = b"\2" * 32, b"\3" * 32


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Node:
    """A node that has some chunks, as the calls to it show it. While it is away, a call costs all of its time."""

    def __init__(self, clock: Clock, *has: bytes) -> None:
        self._clock, self.has, self.is_away = clock, set(has), False
        self.calls, self.told, self.again = 0, list[bytes](), list[bool]()

    def peer_notes(self, body: PeerNotes, *, timeout_s: float | None = None) -> PeerNotesAnswer:
        self._answer(timeout_s)
        for note in body.notes:
            assert isinstance(note.deleted, bytes)
            self.told += [note.deleted] if note.deleted else []
            self.again += [body.again] if note.deleted else []
            self.has -= {note.deleted[at : at + 32] for at in range(0, len(note.deleted), 32)}
        return PeerNotesAnswer(generations=[1] * len(body.notes))

    def peer_read(self, body: PeerRead, *, timeout_s: float | None = None) -> PeerReadAnswer:
        self._answer(timeout_s)
        assert isinstance(body.keys, bytes)
        keys = [body.keys[at : at + 32] for at in range(0, len(body.keys), 32)]
        part = PeerPart(group=0, writer=0, address=0, length=1, checksum=0)
        return PeerReadAnswer(chunks=[[part] if key in self.has else [] for key in keys], node=f"node-{id(self)}")

    def _answer(self, timeout_s: float | None) -> None:
        self.calls += 1
        if self.is_away:
            self._clock.now_s += timeout_s or 0.0
            raise ServerUnavailable("it swallows packets")

    def close(self) -> None: ...


class Rig:
    """A node and its peers B and C, which have both chunks. B is away."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.b, self.c = Node(self.clock, GONE, KEPT), Node(self.clock, GONE, KEPT)
        self.servers = [PeerServer(name, node, self.clock) for name, node in (("b", self.b), ("c", self.c))]
        engine = Engine(SimpleNamespace(get_rpc_port=lambda: 1), "127.0.0.1", [])
        self.tier = PeersTier(self.servers, engine, self.clock)
        self.tier.notes([SPACE], Deadline(5.0))
        self.b.is_away = True

    def delete(self, *keys: bytes) -> None:
        self.tier.change(SPACE, deletes(keys, 1), Deadline(5.0))

    def found(self) -> list[bool]:
        return self.tier.exists([name(GONE), name(KEPT)], Deadline(5.0))


def name(key: bytes) -> PartName:
    return Note(1, 1).name(SPACE, key, 0, 0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.tier.close(Deadline(1.0))


def test_a_deleted_chunk_is_not_read_while_some_peer_is_not_told(rig: Rig) -> None:
    assert rig.found() == [True, True]
    with pytest.raises(NotEverywhere, match="not known yet at b"):
        rig.delete(GONE)
    rig.c.has.add(GONE)  # it has read the chunk at B
    assert rig.found() == [False, True]
    pages = memoryview(bytearray(4096))
    calls = rig.c.calls
    (loaded,) = rig.tier.load([ToLoad(name(GONE), 1, pages)], Deadline(5.0))
    assert loaded.outcome is Outcome.MISSING and rig.c.calls == calls
    for server in rig.servers:
        server.read(PeerRead(namespace=SPACE.hex(), generation=1, keys=KEPT), Deadline(5.0))
    there = Place(rig.servers[1].node, 1, 2)
    for names, count in (([name(KEPT), name(GONE)], 1), ([name(GONE)], 0)):
        coming = rig.tier.coming(there, names, 0, Deadline(5.0))
        assert coming is not None and coming.there == count


def test_only_a_peer_that_waits_is_told_again_and_then_the_others_once_more(rig: Rig) -> None:
    for _ in range(3):
        with pytest.raises(NotEverywhere):
            rig.delete(GONE)
        rig.clock.now_s += 60.0
    assert rig.c.told == [GONE]
    rig.servers[1].read(PeerRead(namespace=SPACE.hex(), generation=1, keys=KEPT), Deadline(5.0))
    rig.b.is_away = False
    rig.c.has.add(GONE)  # it has read the chunk at B
    rig.delete(GONE)
    assert rig.b.told == [GONE] and rig.c.told == [GONE, GONE] and GONE not in rig.c.has
    rig.delete(KEPT)
    assert rig.b.told[1:] == rig.c.told[2:] == [KEPT]
    assert rig.b.again == [False, False] and rig.c.again == [False, True, False]


def test_a_peer_that_rests_costs_an_order_no_time_and_the_others_get_all_of_it(rig: Rig) -> None:
    keys = [bytes([at % 256, at // 256]) * 16 for at in range(3 * MAX_STORE_KEYS)]
    began_s = rig.clock.now_s
    with pytest.raises(NotEverywhere):
        rig.delete(*keys)
    assert rig.clock.now_s - began_s <= ASK_S and len(b"".join(rig.c.told)) == 32 * len(keys)
    calls = rig.b.calls
    with pytest.raises(NotEverywhere):
        rig.delete(GONE)
    assert rig.b.calls == calls


def test_a_peer_is_read_again_once_a_clear_follows_a_deletion_that_it_was_not_told(rig: Rig) -> None:
    with pytest.raises(NotEverywhere):
        rig.delete(GONE)
    rig.delete(*(at.to_bytes(32, "big") for at in range(MOST_DELETED + 1)))
    rig.b.is_away = False
    rig.clock.now_s += 60.0
    read = PeerRead(namespace=SPACE.hex(), generation=2, keys=KEPT)
    assert all(server.answer(read, Deadline(1.0)) is not None for server in rig.servers)


def test_a_peer_that_has_answered_a_moment_ago_has_not_failed() -> None:
    clock = Clock()
    node = Node(clock)
    peer = PeerServer("b", node, clock)
    read = PeerRead(namespace=SPACE.hex(), generation=1, keys=b"")

    def late(body: PeerRead, *, timeout_s: float | None = None) -> PeerReadAnswer:
        """Meanwhile another call is answered, 0.1 s before this one ends."""
        clock.now_s += ASK_S - 0.1
        node.peer_read = answers  # type: ignore[method-assign]  # of this node alone
        assert peer.answer(read, Deadline(ASK_S)) is not None
        clock.now_s += 0.1
        raise ServerUnavailable("it is late")

    answers, node.peer_read = node.peer_read, late  # type: ignore[method-assign]  # of this node alone
    assert peer.answer(read, Deadline(5.0)) is None and not peer.is_resting
    node.is_away = True
    assert peer.answer(read, Deadline(5.0)) is None and peer.is_resting
