"""Reports of damaged chunks: the server judges the bytes itself, so a liar or bad memory takes no good chunk away."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest
from api_helpers import ServerProcess, eventually, small_pool, unique
from server_fixtures import fresh_server
from table_helpers import Client as Asker, chain
from tier_engine import TierEngine, manifest

from kvdock.api.pool.damage import CALLER_MOST, SESSION_MOST, WINDOW_S, DamageReports
from kvdock.api.pool.pool import open_pool
from kvdock.api.pool.registry import NamespaceRecord, NamespaceUse, SessionRecord
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Group, LookupAnswer, Manifest, MismatchAnswer, ReportMismatch
from kvdock.shm.checksum import checksum

pytestmark = pytest.mark.security
PART = 4096
server = fresh_server()


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[TierEngine]:
    made = TierEngine(server.unix, manifest(PART, writers=2))
    yield made
    made.close()


def report(engine: TierEngine, found: LookupAnswer, *chunks: int) -> MismatchAnswer:
    assert found.lease is not None
    return engine.client.mismatch(
        ReportMismatch(session=engine.attachment.session, lease=found.lease, chunks=list(chunks))
    )


def found_chunks(engine: TierEngine, stored: list[bytes]) -> int:
    found = engine.lookup(stored, unique("again"))
    if found.lease:
        engine.release(found)
    return found.hit_tokens // engine.manifest.chunk_tokens


def test_chunks_that_are_whole_stay_whoever_reports_them(engine: TierEngine) -> None:
    stored = engine.chain(8)
    engine.store(stored)
    found = engine.lookup(stored)
    answer = report(engine, found, *range(8))
    assert (answer.quarantined, answer.whole) == (0, 8)
    assert found_chunks(engine, stored) == 8
    engine.read(stored, found)


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("at", [0, PART // 2, PART - 1])
def test_one_flipped_bit_in_any_part_takes_the_chunk_out_at_once(engine: TierEngine, writer: int, at: int) -> None:
    stored = engine.chain(4)
    engine.store(stored)
    found = engine.lookup(stored)
    (part,) = (part for part in found.chunks[2] if part.writer == writer)
    engine.damage(part, at)
    answer = report(engine, found, 1, 2, 3)
    assert (answer.quarantined, answer.whole) == (1, 2)
    assert found_chunks(engine, stored) == 2
    again = report(engine, found, 2)
    assert (again.quarantined, again.whole) == (0, 0), "it is out of use already"


def test_who_reports_whole_chunks_again_and_again_is_refused_and_said_to_be_bad(
    server: ServerProcess, engine: TierEngine
) -> None:
    stored = engine.chain(SESSION_MOST + 8)
    engine.store(stored)
    liar = TierEngine(server.unix, manifest(PART, writers=2), "liar")
    found = liar.lookup(stored)
    answer = report(liar, found, *range(len(stored)))
    assert (answer.quarantined, answer.whole) == (0, SESSION_MOST), "the rest is not even looked at"
    with pytest.raises(ApiError) as refused:
        report(liar, found, 0)
    assert (refused.value.code, refused.value.status) == ("reports_refused", 429)
    assert found_chunks(engine, stored) == len(stored)
    with Client(server.unix) as client:
        (finding,) = (one for one in client.verdict().findings if one.code == "engine_misreads")
        assert finding.severity == "bad" and liar.attachment.session.rpartition("-")[0] in finding.text
        assert client.status().counters["refuted_mismatches"] == SESSION_MOST
        assert client.status().counters["mismatches"] == 0
        assert client.acknowledge().troubles == 1, "one for each engine, however often it reports"
    eventually(lambda: "its reports are refused for an hour" in server.log_text())
    assert "their bytes are right" in server.log_text()
    engine.damage(found.chunks[3][0], 7)
    assert report(engine, engine.lookup(stored, "own"), 3).quarantined == 1, "others are believed, when it is true"
    liar.close()


def test_attaching_again_gives_no_more_than_what_the_caller_has_left(server: ServerProcess, engine: TierEngine) -> None:
    stored = engine.chain(SESSION_MOST)
    engine.store(stored)
    left = CALLER_MOST
    for number in range(CALLER_MOST // SESSION_MOST):
        liar = TierEngine(server.unix, manifest(PART, writers=2), f"liar {number}")
        left -= report(liar, liar.lookup(stored), *range(SESSION_MOST)).whole
        liar.close()
    assert left == 0
    with pytest.raises(ApiError, match="the caller reported chunks"):
        report(engine, engine.lookup(stored), 0)
    assert found_chunks(engine, stored) == SESSION_MOST


def test_a_lease_that_has_ended_proves_nothing(engine: TierEngine) -> None:
    stored = engine.chain(2)
    engine.store(stored)
    found = engine.lookup(stored)
    engine.damage(found.chunks[1][0], 0)
    engine.release(found)
    answer = report(engine, found, 0, 1)
    assert (answer.quarantined, answer.whole) == (0, 0)


def test_what_was_reported_an_hour_ago_is_forgotten() -> None:
    settings, now_s = Settings.load(small_pool()), [1000.0]
    pool = open_pool(settings, secrets.randbits)
    try:
        asyncio.run(pool.grow_first())
        asker, right = Asker(pool.table, PART), checksum(bytes(PART))
        granted = asker.reserve(chain("whole", SESSION_MOST))
        pool.table.commit(asker.session, granted.grant, 0, [(at, 0, right) for at in range(SESSION_MOST)], 0)
        found = asker.lookup(chain("whole", SESSION_MOST))
        described = Manifest(model="m", kv_dtype="u8", layers=1, kv_heads=1, head_size=1, chunk_tokens=16,
                             block_tokens=4, groups=(Group(part_bytes=PART),))
        space = NamespaceRecord(asker.space, bytes(32), described, "", bytes(32), NamespaceUse())
        session = SessionRecord("s", "s-secret", asker.session, "i", "", space, 1, "")
        damage = DamageReports(pool, lambda: now_s[0], lambda space, keys: None)

        def judged(*chunks: int) -> int:
            return asyncio.run(damage.judge(session, "user", found.lease, chunks)).whole

        assert judged(*range(10)) == 10
        now_s[0] += WINDOW_S - 1
        assert judged(*range(SESSION_MOST)) == SESSION_MOST - 10
        with pytest.raises(ApiError, match="reported chunks as damaged"):
            judged(0)
        now_s[0] += 1
        assert judged(*range(SESSION_MOST)) == 10, "the first ten are an hour old"
        assert damage.is_refused(session)
    finally:
        pool.close()


def test_a_connector_goes_on_when_its_reports_are_refused(
    engine: TierEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stored = engine.chain(SESSION_MOST)
    engine.store(stored)
    found, attachment = engine.lookup(stored), engine.attachment
    assert found.lease is not None
    for _ in range(2):
        engine.session.report(attachment, found.lease, range(SESSION_MOST))
    assert engine.session.attachment is attachment, "the server is not lost"
    assert f"{SESSION_MOST} of {SESSION_MOST} chunks" in caplog.text and "reports_refused" in caplog.text
