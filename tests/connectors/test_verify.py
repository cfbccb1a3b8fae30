"""Where a load must not fail, only verified chunks are promised: what is damaged or cannot be hashed is a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from api_helpers import PATIENCE_S, ServerProcess, eventually
from connector_helpers import PER_CHUNK, Rig, Spectator, tokens_of

from kvdock.client.client import Client
from kvdock.connectors.interface import Hit, LookupResult, Miss, Pending
from kvdock.connectors.lookups import Verification
from kvdock.connectors.scheduler import SchedulerConnector
from kvdock.connectors.verify import ChecksumVerifier, HashAhead, Trust
from kvdock.engine.config import preset
from kvdock.engine.kv_cache import KVCache
from kvdock.protocol.schemas import Part

TOKENS = tokens_of(1, 2)
HIT = Hit(len(TOKENS))


@pytest.fixture
def rig(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With TOKENS stored, in a namespace of the test's own."""
    with Rig(server.unix, salt=request.node.name) as one:
        one.store("stored", TOKENS, range(2 * PER_CHUNK))
        yield one


@pytest.fixture
def connector(rig: Rig) -> Iterator[SchedulerConnector]:
    session = rig.connector.session
    made = SchedulerConnector(session, verification=Verification(ChecksumVerifier(session)))
    yield made
    made.close()


def asked(connector: SchedulerConnector, request: str, tokens: Sequence[int] = TOKENS) -> LookupResult:
    while isinstance(found := connector.lookups.lookup(request, tokens, 0), Pending):
        connector.lookups.wait_for_answer(PATIENCE_S)
    return found


def verified(connector: SchedulerConnector, request: str, tokens: Sequence[int] = TOKENS) -> LookupResult:
    """What is promised in the end."""
    while isinstance(found := asked(connector, request, tokens), Hit) and not connector.lookups.is_verified(request):
        connector.lookups.wait_for_answer(PATIENCE_S)
    return found


@contextmanager
def held_back(connector: SchedulerConnector) -> Iterator[None]:
    """Verifications in the background wait for the end of the context."""
    go = threading.Event()

    def hold() -> None:
        go.wait(PATIENCE_S)

    connector.lookups._verifying.run(hold)
    try:
        yield
    finally:
        go.set()


def cannot_hash(length: int) -> None:
    raise MemoryError(f"no keys for {length} bytes")


def test_what_is_whole_is_promised_once_it_is_verified(rig: Rig, client: Client, connector: SchedulerConnector) -> None:
    for lease in ("the first", "another lease is verified anew"):
        with held_back(connector):
            assert asked(connector, "r") == HIT and not connector.lookups.is_verified("r"), lease
        assert verified(connector, "r") == HIT and rig.leases(client) == 1
        connector.finished("r")


def test_an_answer_that_is_always_verified_is_promised_by_the_next_lookup(rig: Rig) -> None:
    """Each further lookup would cost its request a step of the engine."""
    session = rig.connector.session
    connector = SchedulerConnector(session, verification=Verification(ChecksumVerifier(session), is_eager=True))
    assert connector.lookups.lookup("r", TOKENS, 0) == Pending()
    connector.lookups.wait_for_answer(PATIENCE_S)
    assert connector.lookups.lookup("r", TOKENS, 0) == HIT and connector.lookups.is_verified("r")
    connector.close()


def test_what_is_being_verified_is_known_until_the_verification_ends(rig: Rig, connector: SchedulerConnector) -> None:
    assert asked(connector, "r") == HIT and not connector.lookups.is_verifying("r")
    with held_back(connector):
        assert not connector.lookups.is_verified("r")
        assert connector.lookups.is_verifying("r"), "it waits behind another question"
    assert verified(connector, "r") == HIT and not connector.lookups.is_verifying("r")


@pytest.mark.parametrize("group", [0, 1])
def test_one_damaged_part_makes_its_chunk_a_miss_that_goes(
    server: ServerProcess, client: Client, group: int
) -> None:
    """Every part of a chunk counts: with two groups a chunk has two."""
    kv = KVCache(preset("tiny-hybrid2"))
    with Rig(server.unix, salt=f"damaged {group}", kv=kv) as rig:
        session = rig.connector.session
        columns = [list(range(2 * PER_CHUNK)), list(range(2 * PER_CHUNK, 4 * PER_CHUNK))]
        rig.wait_store("w", rig.connector.begin_store("w", TOKENS, columns, len(TOKENS)))
        rig.connector.finished("w")
        connector = SchedulerConnector(session, verification=Verification(ChecksumVerifier(session)))
        with Spectator(client, session.manifest) as spectator:
            whole = spectator.slots(TOKENS)
            spectator.flip([part for part in whole if part.group == group][-1], 5)
            assert asked(connector, "r") == HIT
            assert verified(connector, "r") == Miss()
            connector.close()
            assert rig.leases(client) == 0
            assert len(spectator.slots(TOKENS)) < len(whole), "the server has taken the chunk out of use"


def test_what_cannot_be_hashed_is_a_miss_whatever_was_raised(
    rig: Rig, client: Client, connector: SchedulerConnector, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "kvdock.connector")
    with monkeypatch.context() as broken:
        broken.setattr("kvdock.connectors.verify.ensure_keys", cannot_hash)
        assert asked(connector, "r") == HIT and rig.leases(client) == 1
        assert verified(connector, "r") == Miss()
    eventually(lambda: rig.leases(client) == 0)
    eventually(lambda: "background call failed" in caplog.text and "no keys for" in caplog.text)
    connector.finished("r")
    assert verified(connector, "r") == HIT, "it stays at the server"


def test_a_request_that_was_given_a_miss_may_ask_for_more_later(
    rig: Rig, connector: SchedulerConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("kvdock.connectors.verify.ensure_keys", cannot_hash)
        half = TOKENS[: len(TOKENS) // 2]
        assert asked(connector, "r", half) == Hit(len(half))
        assert verified(connector, "r", half) == Miss()
    assert verified(connector, "r") == HIT, "its cancelled lease was asked for again"


# ---------------------------------------------------------------------- trust


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def part(offset: int, checksum: str = "aa") -> Part:
    return Part(group=0, writer=0, segment=1, offset=offset, length=4096, checksum=checksum.rjust(16, "0"))


def test_a_part_is_trusted_for_a_while_where_it_lies_and_for_what_it_holds() -> None:
    clock = Clock()
    trust = Trust(60.0, clock)
    trust.add("one", [part(0)])
    assert trust.has("one", part(0))
    assert not trust.has("one", part(4096)), "another place"
    assert not trust.has("one", part(0, "bb")), "another content at the same place"
    assert not trust.has("two", part(0)), "another life of the server"
    clock.now_s += 59.9
    assert trust.has("one", part(0))
    clock.now_s += 0.2
    assert not trust.has("one", part(0))


def test_trust_ends_with_damage_and_with_the_servers_life_and_has_a_bound() -> None:
    trust = Trust(60.0, Clock(), most_bytes=2 * 4096)
    trust.add("one", [part(0), part(1), part(2)])
    assert [trust.has("one", part(at)) for at in range(3)] == [False, True, True]
    trust.add("two", [part(3)])
    assert not trust.has("one", part(2)) and not trust.has("two", part(2)) and trust.has("two", part(3))
    trust.clear()
    assert not trust.has("two", part(3))
    none = Trust(0.0, Clock())
    none.add("one", [part(0)])
    assert not none.has("one", part(0))


def test_what_was_verified_is_not_hashed_again_until_trust_ends(rig: Rig, client: Client) -> None:
    """A byte that is damaged meanwhile is found when trust has ended: until then the load's own hash would find it."""
    session, clock = rig.connector.session, Clock()
    verifier = ChecksumVerifier(session, trust=Trust(60.0, clock))
    connector = SchedulerConnector(session, verification=Verification(verifier))
    try:
        assert verified(connector, "first") == HIT
        with Spectator(client, session.manifest) as spectator:
            spectator.flip(spectator.slots(TOKENS)[1], 77)
        assert verified(connector, "second") == HIT
        clock.now_s += 61.0
        assert verified(connector, "third") == Miss()
    finally:
        connector.close()


class CountingTrust(Trust):
    """Counts how often parts are made Python objects."""

    made = 0

    def others(self, epoch: str, chunks: Sequence[Sequence[Part]]) -> list[tuple[int, Part]]:
        self.made += 1
        return super().others(epoch, chunks)


def test_parts_become_objects_once_if_they_must_be_hashed_and_never_if_they_are_trusted(rig: Rig) -> None:
    session, trust = rig.connector.session, CountingTrust(60.0)
    connector = SchedulerConnector(session, verification=Verification(ChecksumVerifier(session, trust=trust)))
    try:
        assert verified(connector, "first") == HIT and trust.made == 1
        assert verified(connector, "second") == HIT and trust.made == 1
    finally:
        connector.close()


# ---------------------------------------------------------------------- hashed ahead


def stored(rig: Rig, client: Client) -> list[Part]:
    with Spectator(client, rig.connector.session.manifest) as spectator:
        return spectator.slots(TOKENS)


def test_what_was_stored_is_hashed_where_it_lies_and_trusted_if_it_is_right(rig: Rig, client: Client) -> None:
    session, trust = rig.connector.session, Trust(60.0)
    epoch, parts = rig.attachment.session, stored(rig, client)
    with Spectator(client, session.manifest) as spectator:
        spectator.flip(parts[1], 77)
    ahead = HashAhead(trust)
    ahead.add(rig.attachment, parts)
    ahead.close()
    assert [trust.has(epoch, part) for part in parts] == [True, False, *[True] * (len(parts) - 2)]


def test_what_waits_to_be_hashed_has_a_bound_and_makes_room_once_it_is_done(rig: Rig, client: Client) -> None:
    trust = Trust(60.0)
    epoch, parts = rig.attachment.session, stored(rig, client)
    ahead, go = HashAhead(trust, most_bytes=parts[0].length), threading.Event()

    def hold() -> None:
        go.wait(PATIENCE_S)

    ahead._hashing.run(hold)
    ahead.add(rig.attachment, parts[:1])
    ahead.add(rig.attachment, parts[1:2])
    go.set()
    eventually(lambda: trust.has(epoch, parts[0]))
    assert not trust.has(epoch, parts[1])
    eventually(lambda: ahead._waiting_bytes == 0)
    ahead.add(rig.attachment, parts[1:2])
    ahead.close()
    assert trust.has(epoch, parts[1])


def test_memory_that_has_gone_is_not_hashed_ahead(rig: Rig, client: Client) -> None:
    attachment = rig.attachment
    parts, trust = stored(rig, client), Trust(60.0)
    ahead = HashAhead(trust)
    ahead.add(attachment, parts[:1])
    eventually(lambda: ahead._waiting_bytes == 0)
    rig.close()
    assert not attachment.acquire(), "nothing holds the memory of an epoch that has ended"
    ahead.add(attachment, parts[1:])
    ahead.close()
    assert [trust.has(attachment.session, part) for part in parts[:2]] == [True, False]


def test_a_segment_that_leaves_while_it_is_hashed_stays_mapped_until_then(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is made smaller gives memory back in which nobody has a lease."""
    parts, trust, segments = stored(rig, client), Trust(60.0), rig.attachment.segments
    one = segments.mapping(parts[0].segment)

    def detach(length: int) -> None:
        segments.detach(parts[0].segment)
        with memoryview(one):
            """It is still mapped."""

    with monkeypatch.context() as slow:
        slow.setattr("kvdock.connectors.verify.AHEAD_SLICE_BYTES", 1)
        slow.setattr("kvdock.connectors.verify.ensure_keys", detach)
        ahead = HashAhead(trust)
        ahead.add(rig.attachment, parts)
        ahead.close()
    assert [trust.has(rig.attachment.session, part) for part in parts] == [True] + [False] * (len(parts) - 1)
    with pytest.raises(ValueError, match="the mapping is closed"):
        memoryview(one)


def test_a_segment_that_leaves_before_it_is_hashed_is_no_error(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdock.connector")
    parts, trust, segments = stored(rig, client), Trust(60.0), rig.attachment.segments
    monkeypatch.setattr(segments, "require_whole", segments.detach)
    ahead = HashAhead(trust)
    ahead.add(rig.attachment, parts)
    ahead.close()
    assert "are not hashed ahead" in caplog.text and "background call failed" not in caplog.text
    assert not any(trust.has(rig.attachment.session, part) for part in parts) and ahead._waiting_bytes == 0
