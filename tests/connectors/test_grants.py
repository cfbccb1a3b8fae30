"""Promises: what a connector has said done of is never begun, and every question of the server is answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from api_helpers import ServerProcess, eventually, unique
from connector_helpers import CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.plans import LoadPiece, LoadPlan, StorePiece, StorePlan
from kvdock.connectors.session import Attachment, GrantBook, PoolHold, SessionObserver
from kvdock.datapath.liveness import MemberLiveness
from kvdock.datapath.segments import AttachedSegments
from kvdock.protocol import schemas as s
from kvdock.protocol.keys import HashedChain, chunk_keys
from kvdock.protocol.reports import LeaseView
from kvdock.protocol.schemas import listed_id
from kvdock.shm.segment import SegmentInfo

ASK_S = 1.0
"""What is asserted before the server asks has so long."""


@pytest.fixture(scope="module")
def curious() -> Iterator[ServerProcess]:
    """A server that asks about leases soon."""
    with ServerProcess(ask_s=ASK_S, heartbeat_s=0.03) as process:
        yield process


@pytest.fixture
def rig(curious: ServerProcess) -> Iterator[Rig]:
    with Rig(curious.unix) as one:
        yield one


@pytest.fixture
def asking(curious: ServerProcess) -> Iterator[Client]:
    with Client(curious.unix) as client:
        yield client


def keys_of(rig: Rig, tokens: list[int]) -> list[str]:
    return [key.hex() for key in chunk_keys(rig.attachment.namespace, tokens, CHUNK)]


def lost_lookup(rig: Rig, client: Client, tokens: list[int]) -> s.LookupAnswer:
    """A lookup in the connector's name whose answer never reaches it."""
    here = rig.attachment
    return client.lookup(s.Lookup(
        session=here.session, member=here.member, request=unique("lost"), epoch=1, keys=keys_of(rig, tokens),
    ))


def leases_of(client: Client, rig: Rig) -> list[LeaseView]:
    return [lease for lease in client.leases().leases if lease.session == listed_id(rig.attachment.session)]


def test_what_an_engine_has_not_hashed_yet_is_neither_stored_nor_looked_up(curious: ServerProcess) -> None:
    tokens, hashes = tokens_of(40, 4), [unique("hash").encode() for _ in range(4)]
    with Rig(curious.unix) as rig:
        known = hashes[:2]
        requests = rig.connector.scheduler._requests
        requests.callbacks = replace(
            requests.callbacks,
            chain_of=lambda request_id, namespace, chunk_tokens: HashedChain(namespace, chunk_tokens, known, CHUNK),
        )
        first = rig.connector.begin_store("s", tokens, [range(16)], 4 * CHUNK)
        assert first == (tuple(range(8)),)
        rig.wait_store("s", first)
        assert rig.lookup("a", tokens) == 2 * CHUNK
        known += hashes[2:]
        rest = rig.connector.begin_store("s", tokens, [range(16)], 4 * CHUNK)
        assert rest == (tuple(range(8, 16)),)
        rig.wait_store("s", rest)
        assert rig.lookup("a", tokens) == 4 * CHUNK, "asked again, with more keys"
        assert rig.load("a", range(64, 80), 0, 4 * CHUNK).valid_tokens == 4 * CHUNK
        assert torch.equal(rig.blocks(range(64, 80)), rig.blocks(range(16)))


# ---------------------------------------------------------------------- the book


def test_a_refused_grant_is_never_begun() -> None:
    book = GrantBook()
    assert book.refuse("a")
    assert not book.start("a")
    assert book.refuse("a"), "the same question gets the same answer"
    assert not book.start("a")
    assert book.start("b"), "another grant is another matter"


def test_a_grant_at_work_is_not_answered_for_until_all_its_copies_ended() -> None:
    book = GrantBook()
    assert book.start("a") and book.start("a")
    assert not book.refuse("a")
    book.stop("a")
    assert not book.refuse("a"), "one copy is still under way"
    book.stop("a")
    assert book.refuse("a")
    assert not book.start("a")


def test_a_question_does_not_slip_between_the_check_and_the_beginning() -> None:
    """Staged: the question is asked at the very moment the book has looked whether the grant is refused."""
    book = GrantBook()
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(book.refuse("a")))

    class Interrupted(set[str]):
        def __contains__(self, grant: object) -> bool:
            found = super().__contains__(grant)
            asking.start()
            asking.join(0.2)  # it must be waiting for the book
            return found

    book._refused = Interrupted()
    assert book.start("a")
    asking.join()
    assert answers == [False]


def test_a_copy_does_not_begin_between_the_check_and_the_promise() -> None:
    book = GrantBook()
    begun: list[bool] = []
    beginning = threading.Thread(target=lambda: begun.append(book.start("a")))

    class Interrupted(Counter[str]):
        def __getitem__(self, grant: str) -> int:
            found = super().__getitem__(grant)
            if not beginning.ident:
                beginning.start()
                beginning.join(0.2)
            return found

    book._active = Interrupted()
    assert book.refuse("a")
    beginning.join()
    assert begun == [False]


# ---------------------------------------------------------------------- questions of a real server


def test_a_lease_that_waits_for_admission_is_kept_however_old(rig: Rig, asking: Client) -> None:
    tokens = tokens_of(1, 2)
    rig.store("s", tokens, range(8))
    assert rig.lookup("r", tokens) == 128
    eventually(lambda: leases_of(asking, rig)[0].age_s > 5 * ASK_S)
    assert rig.lookup("r", tokens) == 128
    assert rig.load("r", range(8, 16), 0, 128).valid_tokens == 128, "the lease was answered for while it was wanted"
    eventually(lambda: leases_of(asking, rig) == [])


def test_a_lease_nobody_remembers_is_said_done_of_and_refused_for_ever(rig: Rig, asking: Client) -> None:
    tokens = tokens_of(2, 2)
    rig.store("s", tokens, range(8))
    found = lost_lookup(rig, asking, tokens)
    assert found.lease is not None and len(leases_of(asking, rig)) == 1
    eventually(lambda: leases_of(asking, rig) == [])

    before = rig.blocks(range(128))
    chunks = [
        LoadPiece(index, 0, tuple(parts), tuple(range(64 + 4 * index, 68 + 4 * index)), 0)
        for index, parts in enumerate(found.chunks)
    ]
    late = LoadPlan("late", found.lease, 16, 128, CHUNK, tuple(chunks))
    assert rig.connector.worker.load(rig.attachment, late) == 16
    assert torch.equal(rig.blocks(range(128)), before), "a refused load wrote blocks"


def test_a_reservation_whose_answer_was_lost_is_asked_about_and_its_memory_comes_back(
    rig: Rig, asking: Client
) -> None:
    here = rig.attachment
    tokens = tokens_of(3, 2)
    granted = asking.reserve(s.Reserve(
        session=here.session, member=here.member, store=unique("lost"), keys=keys_of(rig, tokens), deadline_s=ASK_S,
    ))
    assert granted.reservation is not None and asking.status().chunks.reserved == 2
    eventually(lambda: asking.status().chunks.reserved == 0)
    eventually(lambda: asking.status().chunks.quarantined == 0)

    rig.store("again", tokens, range(8))
    mapping = here.segments.mapping(granted.chunks[0].parts[0].segment)
    with memoryview(mapping) as memory:
        before = bytes(memory)
        chunks = [StorePiece(c.index, 0, tuple(c.parts), (60, 61, 62, 63)) for c in granted.chunks]
        assert rig.connector.worker.store(here, StorePlan("late", granted.reservation, 128, tuple(chunks))) == 0
        assert bytes(memory) == before, "a refused store wrote into memory that is somebody else's by now"
    assert rig.lookup("r", tokens) == 128


def test_a_load_under_way_is_not_answered_for(rig: Rig, asking: Client) -> None:
    """A plan handed to the worker and begun, seen by the server as old: it is asked about and not given up."""
    tokens = tokens_of(4, 2)
    rig.store("s", tokens, range(8))
    assert rig.lookup("r", tokens) == 128
    [lease] = leases_of(asking, rig)
    begun = rig.connector.scheduler.lookups.begin_load("r", [range(8, 16)], 0, 128)
    assert begun is not None
    attachment, plan = begun
    assert attachment.grants.start(plan.lease)
    eventually(lambda: leases_of(asking, rig)[0].age_s > lease.age_s + 4 * ASK_S)
    assert leases_of(asking, rig)[0].remaining == [0]
    attachment.grants.stop(plan.lease)
    eventually(lambda: leases_of(asking, rig) == [])
    assert rig.connector.worker.load(attachment, plan) == 0
    attachment.release()


def handed_out(rig: Rig, seed: int) -> tuple[Attachment, LoadPlan]:
    """A plan that has left, and that no rank has begun."""
    tokens = tokens_of(seed, 2)
    rig.store("s", tokens, range(8))
    assert rig.lookup("r", tokens) == 128
    begun = rig.connector.scheduler.lookups.begin_load("r", [range(8, 16)], 0, 128)
    assert begun is not None
    return begun


def test_a_plan_on_its_way_to_its_rank_is_not_refused_when_the_lease_is_asked_about(rig: Rig) -> None:
    """The lease is old, its plan has left, and the rank has not begun: as behind a long step of the engine."""
    attachment, plan = handed_out(rig, 6)
    asked, keeps = threading.Event(), rig.connector.scheduler.lookups.keeps_lease

    def noted(lease: str) -> bool:
        asked.set()
        return keeps(lease)

    rig.connector.session._observer = SessionObserver(noted)
    assert asked.wait(20)
    time.sleep(ASK_S / 4)  # some eight heartbeats: the rank would have been asked by now, and is not asked again yet
    assert rig.connector.worker.load(attachment, plan) == 128
    attachment.release()


def test_a_plan_that_never_reaches_its_rank_does_not_hold_its_lease_for_ever(rig: Rig, asking: Client) -> None:
    handed_out(rig, 7)[0].release()
    assert len(leases_of(asking, rig)) == 1
    eventually(lambda: leases_of(asking, rig) == [])


# ---------------------------------------------------------------------- memory of a server life


def test_memory_and_lock_of_an_attachment_stay_while_somebody_uses_it(curious: ServerProcess, rig: Rig) -> None:
    with Client(curious.unix) as client:
        pool = client.segments()
    segments = AttachedSegments(int(pool.pool_id, 16))
    found = pool.segments[0]
    segments.attach(SegmentInfo(found.id, found.name, found.bytes, found.data_offset))
    liveness = MemberLiveness(pool.lock_file, source=Random(1))
    one = PoolHold(segments, liveness)
    assert one.acquire()
    one.release()
    assert segments.segments, "unmapped under a copy"
    one.release()
    assert not segments.segments
    assert not one.acquire(), "memory that is gone was given out"


def test_copies_are_cut_into_the_right_blocks_for_every_local_hit(rig: Rig) -> None:
    tokens = tokens_of(5, 4)
    rig.store("s", tokens, range(16))
    wanted = rig.blocks(range(16))
    for local in range(0, 4 * CHUNK, 16):
        request = f"local-{local}"
        assert rig.lookup(request, tokens, local) == 4 * CHUNK
        begun = rig.connector.scheduler.lookups.begin_load(request, [range(32, 48)], local, 4 * CHUNK)
        assert begun is not None
        attachment, plan = begun
        assert [piece.chunk for piece in plan.pieces] == list(range(local // CHUNK, 4))
        assert [piece.skip_blocks for piece in plan.pieces] == [local % CHUNK // 16] + [0] * (3 - local // CHUNK)
        rig.kv.k[0][32:48] = float("nan")
        assert rig.connector.worker.load(attachment, plan) == 4 * CHUNK
        attachment.release()
        first = local // 16
        assert torch.equal(rig.blocks(range(32 + first, 48)), wanted[:, first:])
        assert rig.kv.k[0][32 : 32 + first].isnan().all()
        assert len(plan.pieces) * PER_CHUNK >= 16 - first
