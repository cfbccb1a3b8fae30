"""The journal and the event stream: what a real server publishes of real engines, and what both do under pressure."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from api_helpers import MIB, OPERATOR, ServerProcess, access_file, attach, eventually, http_connection, keys, raw
from server_fixtures import fresh_server

from kvdock.api.access.access_file import entry
from kvdock.api.feeds.log import EventLog
from kvdock.api.feeds.sse import EventStream
from kvdock.api.record.journal import Journal
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import DeleteChunks, PatchConfig
from kvdock.protocol.errors import ApiError
from kvdock.protocol.events import (
    EVENTS,
    KINDS,
    Draining,
    Event,
    Evicted,
    Freed,
    Gap,
    Grown,
    Left,
    Refused,
    kind_of,
)
from kvdock.protocol.outcomes import Outcome

Read = list[dict[str, Any]]

server = fresh_server()


def parsed(body: bytes) -> Read:
    """The events of a stream, each with its id as the stream has it."""
    found = []
    for piece in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in piece.splitlines() if line and line[0] != ":")
        if "data" in fields:
            event = json.loads(fields["data"])
            assert fields["event"] == event["kind"] and fields["id"].endswith(f"-{event['seq']}")
            found.append({"id": fields["id"], **event})
    return found


def told(server: ServerProcess, query: str = "", last_id: str = "", token: str = OPERATOR) -> Read:
    headers = {"Authorization": f"Bearer {token}", **({"Last-Event-ID": last_id} if last_id else {})}
    status, found, body = raw(server.http, "GET", f"/v1/events{query}", headers=headers)
    assert (status, found["content-type"]) == (200, "text/event-stream; charset=utf-8"), body
    return parsed(body)


def kinds(server: ServerProcess, **found: Any) -> list[str]:
    return [event["kind"] for event in told(server, **found)]


# ------------------------------------------------------------------ what is told


def test_a_request_is_told_of_from_the_lookup_to_its_end(server: ServerProcess, client: Client) -> None:
    engine = attach(client, label="engine A")
    chain = keys(4)
    granted = engine.store(chain, store="s1")
    found = engine.lookup(chain, "r1")
    assert engine.release(found.lease, 0) == []
    events = {event["kind"]: event for event in told(server)}
    mine: dict[str, object] = {"session": engine.listed, "label": "engine A", "tenant": ""}
    wanted: dict[str, dict[str, object]] = {
        "attached": {"member": engine.member, "model": "test-model", "ranks": [0]},
        "reserved": {"store": "s1", "tokens": 64, "present_tokens": 0, "chunks": 4, "bytes": 4 * 16384},
        "stored": {"store": "s1", "reservation": granted.reservation, "chunks": 4},
        "committed": {"store": "s1", "chunks": 4, "bytes": 4 * 16384},
        "looked_up": {"request": "r1", "tokens": 64, "hit_tokens": 64},
        "leased": {"request": "r1", "lease": found.lease, "chunks": 4, "bytes": 4 * 16384},
        "loaded": {"request": "r1", "lease": found.lease, "chunks": 4, "bytes": 4 * 16384},
    }
    for kind, fields in wanted.items():
        assert events[kind].items() >= {**mine, **fields}.items(), kind
    before = told(server)[-1]
    assert engine.release(found.lease, 0) == []
    attach_again = client.attach(engine.body)
    assert attach_again.session == engine.session
    assert told(server, last_id=before["id"]) == [], "a call that is repeated causes no second event"
    engine.close()


def test_what_is_given_up_is_told_of(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    engine.store(keys(2, "a"))
    found, granted = engine.lookup(keys(2, "a"), "r"), engine.reserve(keys(2, "b"), store="b")
    assert found.lease and granted.reservation
    client.cancel(found.lease, engine.session, engine.member)
    client.abort(granted.reservation, s.Abort(session=engine.session, ranks=[0]))
    again = engine.lookup(keys(2, "a"), "again")
    assert again.lease
    client.mismatch(s.ReportMismatch(session=engine.session, lease=again.lease, chunks=[1]))
    with pytest.raises(ApiError):
        engine.lookup(keys(1), "x" * 2000)
    given = {event["kind"]: event for event in told(server, "?kinds=cancelled,aborted,mismatched,refused")}
    assert given["cancelled"]["grant"] == found.lease and given["cancelled"]["name"] == "r"
    assert given["aborted"].items() >= {"reservation": granted.reservation, "store": "b", "ranks": [0]}.items()
    assert given["mismatched"]["chunks"] == 1
    assert given["refused"].items() >= {"code": "invalid_body", "route": "POST /v1/lookups", "tenant": None}.items()
    engine.close()


def test_members_that_fall_silent_come_back_die_and_leave_are_told_of() -> None:
    with ServerProcess(heartbeat_s=0.05, missed_heartbeats=1, watch_s=0.02) as server, Client(server.unix) as client:
        engine, leaving = attach(client), attach(client)
        client.leave(leaving.session, leaving.member)

        def of_engine() -> list[str]:
            wanted = ("suspect", "recovered", "dead")
            return [one["kind"] for one in told(server)
                    if one["kind"] in wanted and one["session"] == engine.listed]

        eventually(lambda: of_engine() == ["suspect"])
        engine.heartbeat()
        eventually(lambda: of_engine()[:2] == ["suspect", "recovered"])
        engine.close()
        eventually(lambda: of_engine()[-1] == "dead")
        left = [one["session"] for one in told(server, "?kinds=left")]
        assert left == [leaving.listed]
        leaving.close()


def test_what_memory_does_is_told_of() -> None:
    with ServerProcess(pool_bytes=8 * MIB, segment_bytes=4 * MIB) as server, Client(server.unix) as client:
        engine = attach(client, groups=(s.Group(part_bytes=MIB),))
        for number in range(12):
            engine.store(keys(1, f"chain {number}"))
        eventually(lambda: "evicted" in kinds(server))
        (evicted, *_) = told(server, query="?kinds=evicted")
        assert evicted["chunks"] > 0 and evicted["total"] >= evicted["chunks"]
        last = keys(1, "chain 11")
        found = engine.lookup(last, "r")
        client.delete(DeleteChunks(namespace=engine.attached.namespace, keys=last))
        eventually(lambda: told(server, "?kinds=quarantined,freed")[-1:] != [])
        assert told(server, "?kinds=quarantined,freed")[-1].items() >= {"kind": "quarantined", "bytes": MIB}.items()
        engine.release(found.lease, 0)
        eventually(lambda: told(server, "?kinds=quarantined,freed")[-1]["kind"] == "freed")
        client.configure(PatchConfig(pool_bytes=4 * MIB, eviction="lru"))
        eventually(lambda: "shrunk" in kinds(server))
        (changed,) = told(server, "?kinds=limits_changed")
        assert changed["changed"] == {"pool_bytes": [8 * MIB, 4 * MIB], "eviction": ["adaptive", "lru"]}
        assert changed["source"] == "call"
        assert [one["allocated_bytes"] for one in told(server, "?kinds=grown")] == [4 * MIB, 8 * MIB]
        engine.close()


def test_a_server_that_takes_over_says_what_it_found(tmp_path: Path) -> None:
    settings = {"socket_path": str(tmp_path / "kvdock.sock")}
    with ServerProcess(**settings) as first:
        with Client(first.unix) as client:
            engine = attach(client)
            engine.store(keys(3))
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(10.0)
        with ServerProcess(**settings) as second:
            (adopted,) = told(second, "?kinds=adopted")
            assert adopted.items() >= {"pool": f"{first.pool_id:016x}", "chunks": 3, "sessions": 1}.items()
        engine.close()


def test_every_kind_has_its_row_and_its_fields_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs/operate/events.md").read_text()
    rows = {row[0]: re.findall(r"`(\w+)`", row[1]) for row in re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", text, re.M)}
    documented: list[type[Event]] = [*EVENTS, Gap]
    assert list(rows) == [kind_of(event) for event in documented]
    for event in documented:
        own = [name for name in event.__struct_fields__ if name not in Event.__struct_fields__]
        assert rows[kind_of(event)] == own


# ------------------------------------------------------------------ who gets what


def test_a_tenant_sees_its_own_and_what_concerns_all(tmp_path: Path) -> None:
    tokens = {name: f"{name}-" + "t" * 40 for name in ("a", "b")}
    entries = [entry(name, token, ["engine"], f"tenant-{name}") for name, token in tokens.items()]
    with ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server:
        for token in tokens.values():
            with Client(server.unix, access_token=token) as client:
                attach(client).close()
        tenants = {event["tenant"] for event in told(server, token=tokens["a"])}
        assert tenants == {"tenant-a", None}
        assert {event["tenant"] for event in told(server)} >= {"tenant-a", "tenant-b", None}


def test_a_reader_that_comes_back_misses_nothing(server: ServerProcess, client: Client) -> None:
    first = told(server)
    attach(client).close()
    eventually(lambda: "dead" in kinds(server))
    after = told(server, last_id=first[-1]["id"])
    assert [event["kind"] for event in after] == ["attached", "dead"]
    assert after[0]["seq"] == first[-1]["seq"] + 1
    (gap, *rest) = told(server, last_id="77-1")
    assert (gap["kind"], gap["why"]) == ("gap", "another_server") and rest == told(server)


async def nothing() -> None:
    """No event waits."""


def test_a_reader_of_some_kinds_misses_nothing_that_it_did_not_ask_for() -> None:
    stream = EventStream(3, nothing, keep=4)

    def told_of(last_id: str) -> bytes:
        pieces = stream.read(last_id, [Draining], "", lambda tenant: True, lambda: True, follows=False)
        return asyncio.run(whole(pieces))

    async def whole(pieces: AsyncIterator[bytes]) -> bytes:
        return b"".join([piece async for piece in pieces])

    stream.take(Draining(seq=1, is_takeover=False, leases=0, reservations=0))
    for number in range(2, 12):
        stream.take(Freed(seq=number, bytes=0))
    first = told_of("")
    assert [event["seq"] for event in parsed(first)] == [1] and first.endswith(b"id: 3-11\n\n")
    stream.take(Freed(seq=12, bytes=0))
    assert told_of("3-11") == b"retry: 1000\n\nid: 3-12\n\n"
    assert parsed(told_of("3-1"))[0]["lost"] == 7


def test_who_follows_gets_what_comes_until_the_server_drains(server: ServerProcess, client: Client) -> None:
    with closing(http_connection(server.unix)) as connection:
        connection.request("GET", "/v1/events?follow=1&kinds=attached,draining")
        answer = connection.getresponse()
        eventually(lambda: client.status().status == "ok")
        engine = attach(client, label="late")
        line = next(line for line in iter(answer.readline, b"") if line.startswith(b"data"))
        assert json.loads(line.removeprefix(b"data: "))["label"] == "late"
        engine.close()
        server.process.send_signal(signal.SIGTERM)
        rest = answer.read()
    assert [event["kind"] for event in parsed(rest)] == ["draining"]
    assert server.process.wait(10.0) == 0


def test_unknown_kinds_are_refused_by_name(server: ServerProcess) -> None:
    status, _, body = raw(server.http, "GET", "/v1/events?kinds=attached,gone")
    assert status == 422 and json.loads(body).items() >= {"found": ["gone"], "wanted": list(KINDS)}.items()


def test_nobody_reads_what_is_switched_off() -> None:
    with ServerProcess(observe="") as server, Client(server.unix) as client:
        attach(client).close()
        status, _, body = raw(server.http, "GET", "/v1/events")
        assert status == 404 and json.loads(body)["found"] == "observe"
        assert raw(server.http, "GET", "/v1/curve")[0] == 404
        assert "attached" not in server.log_text()


def test_so_many_may_follow(server: ServerProcess) -> None:
    opened = []
    try:
        for _ in range(64):
            connection = http_connection(server.unix)
            opened.append(connection)
            connection.request("GET", "/v1/events?follow=1")
            assert connection.getresponse().readline() == b"retry: 1000\n"
        assert raw(server.http, "GET", "/v1/events")[0] == 503
    finally:
        for connection in opened:
            connection.close()
    eventually(lambda: raw(server.http, "GET", "/v1/events")[0] == 200)


# ------------------------------------------------------------------ under pressure


class Collects:
    name = "collects"

    def __init__(self, *wanted: type[Event], fails: bool = False) -> None:
        self.kinds, self.fails = frozenset(wanted), fails
        self.got: list[Event] = []

    def take(self, event: Event) -> None:
        self.got.append(event)
        if self.fails:
            raise RuntimeError("broken on purpose")


def test_a_full_queue_drops_and_counts_and_publishing_never_waits() -> None:
    journal, all_of_it = Journal(lambda: 5.0, most=10), Collects(Freed)
    journal.subscribe(all_of_it)
    journal.open()
    for number in range(25):
        journal.publish(Freed(bytes=number))
    assert (journal.dropped, journal.last) == (15, 10)
    journal.flush()
    assert [event.seq for event in all_of_it.got] == list(range(1, 11)) and all_of_it.got[0].at == 5.0
    assert journal.published == {Freed: 10}


def test_an_event_that_is_made_later_has_its_place_and_time_and_nobody_makes_what_nobody_takes() -> None:
    now, made = [5.0], list[int]()

    def make(number: int) -> Freed:
        made.append(number)
        return Freed(bytes=number)

    journal, taker = Journal(lambda: now[0], most=3), Collects(Freed)
    journal.subscribe(taker)
    journal.open()
    journal.publish_later(Freed, make, 1)
    now[0] = 6.0
    journal.publish(Freed(bytes=2))
    journal.publish_later(Freed, make, 3)
    journal.publish_later(Freed, make, 4)
    journal.publish_later(Left, make, 5)
    assert made == [] and journal.dropped == 1
    now[0] = 7.0
    journal.flush()
    assert taker.got == [Freed(seq=1, at=5.0, bytes=1), Freed(seq=2, at=6.0, bytes=2), Freed(seq=3, at=6.0, bytes=3)]
    assert made == [1, 3] and journal.published == {Freed: 3}


def test_a_subscriber_that_fails_takes_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    journal, broken, whole = Journal(lambda: 0.0), Collects(Freed, fails=True), Collects(Freed, Left)
    journal.subscribe(broken)
    journal.subscribe(whole)
    journal.open()
    journal.publish(Freed(bytes=1))
    journal.publish(Freed(bytes=2))
    journal.flush()
    assert len(whole.got) == len(broken.got) == 2 and "collects" in caplog.text
    journal.unsubscribe(whole)
    assert journal.wants(Freed) and not journal.wants(Left)
    journal.publish(Refused(code="x", route="", detail=""))
    assert journal.last == 2, "what nobody takes has no number"


def test_a_slow_reader_is_told_what_it_missed() -> None:
    async def scenario() -> list[bytes]:
        stream = EventStream(3, nothing, keep=4)

        def take(*numbers: int) -> None:
            for number in numbers:
                stream.take(Freed(seq=number, bytes=0))

        reading = stream.read("", EVENTS, "", lambda tenant: True, lambda: True, follows=True)
        take(1, 2)  # after the call, before its first piece is asked for
        found = [await anext(reading)]
        take(3)
        found.append(await anext(reading))
        take(*range(4, 12))
        found.append(await anext(reading))
        stream.take(Draining(seq=12, is_takeover=False, leases=0, reservations=0))
        found += [piece async for piece in reading]
        assert len(stream.readers) == 0
        return found

    found = parsed(b"".join(asyncio.run(scenario())))
    assert [event["seq"] for event in found] == [1, 2, 3, 7, 8, 9, 10, 11, 12]
    assert found[3].items() >= {"kind": "gap", "lost": 4, "why": "too_slow"}.items()


def test_the_log_has_a_sentence_for_what_operators_want_to_know(server: ServerProcess, client: Client) -> None:
    engine = attach(client, label="engine B")
    engine.leave()
    client.configure(PatchConfig(eviction="lru"))
    for _ in range(60):
        raw(server.http, "GET", "/v1/nothing")
    eventually(lambda: "eviction adaptive → lru" in server.log_text())
    assert server.stop() == 0
    text = server.log_text()
    who = f"session {engine.listed} ('engine B'): member '{engine.member}'"
    assert f"{who} has attached with ranks [0] of the model 'test-model'" in text
    assert f"{who} has left" in text and "the server drains: 0 leases and 0 reservations are open" in text
    assert f"the server has ended, and pool {server.pool_id:016x} is removed" in text
    assert text.count("a call was refused: not_found (no route)") == 20 and "40 more like this" in text, "folded"


def test_a_full_pool_in_a_steady_state_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    with caplog.at_level(logging.INFO, "kvdock.events"):
        for at in (0.0, 1.0, 3000.0, 6000.0, 9000.0, 12600.0):
            log.take(Evicted(chunks=1, by_operator=0, total=7, at=at))
            log.take(Evicted(chunks=2, by_operator=2, total=9, at=at + 0.5))
    full = "chunks are evicted from now on, for room in the pool or in a tenant's quota: 7 since the start"
    asked = "an operator has evicted 2 chunks"
    assert [one.getMessage() for one in caplog.records] == [full, *[asked] * 5, full, asked]


def test_segments_are_told_of_in_words() -> None:
    from kvdock.api.feeds.log import SENTENCES

    for kind, sentence in SENTENCES.items():
        assert not kind.of_requests or kind in (Refused, KINDS["evicted"]), "not for what happens all the time"
        assert sentence.template[0].islower()
    said = SENTENCES[Grown]
    assert said.template % said.values(Grown(segment=1, bytes=MIB, allocated_bytes=3 * MIB)) == (
        "segment 1 added: the pool has 3.0 MiB"
    )


def test_loads_and_stores_are_timed_and_prompts_sum_up(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    engine.store(keys(3))
    engine.release(engine.lookup(keys(5), "r").lease, 0)
    client.delete(DeleteChunks(namespace=engine.attached.namespace, keys=keys(3)[1:]))
    engine.lookup(keys(3), "again")
    engine.heartbeat(outcomes=[
        Outcome(request="r", prompt_tokens=81, found_tokens=48, loaded_tokens=48),
        Outcome(request="again", prompt_tokens=49, local_tokens=16, found_tokens=16),
    ])
    found: dict[str, float] = {}

    def scraped() -> bool:
        lines = raw(server.unix, "GET", "/metrics")[2].decode().splitlines()
        found.update({line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"})
        return found["kvdock_prompt_tokens_total"] == 130 and found["kvdock_load_seconds_count"] == 1

    eventually(scraped)
    assert found["kvdock_store_seconds_count"] == 1 and found["kvdock_load_seconds_sum"] > 0
    sources = {name: value for name, value in found.items() if name.startswith("kvdock_prompt_source_tokens_total")}
    assert sum(sources.values()) == 130
    label = 'kvdock_prompt_source_tokens_total{{source="{}"}}'.format
    assert [sources[label(source)] for source in ("local", "memory", "computed")] == [16, 48, 66]
    label = 'kvdock_computed_reason_tokens_total{{why="{}"}}'.format
    assert [found[label(why)] for why in ("never_stored", "deleted", "tail")] == [32, 32, 2]
    label = 'kvdock_model_prompt_tokens_total{{model="test-model",source="{}",tenant=""}}'.format
    assert [found[label(source)] for source in ("local", "memory", "computed")] == [16, 48, 66]
    engine.close()


def test_rare_events_outlast_what_requests_cause_and_come_once_and_in_order() -> None:
    stream = EventStream(7, nothing, keep=8)
    grown = [Grown(seq=seq, segment=seq, bytes=1, allocated_bytes=1) for seq in (1, 3, 29)]
    for seq in range(1, 31):
        rare = [event for event in grown if event.seq == seq]
        stream.take(rare[0] if rare else Freed(seq=seq, bytes=seq))

    async def read(last_id: str) -> list[int]:
        reading = stream.read(last_id, EVENTS, "", lambda tenant: True, lambda: True, follows=False)
        pieces = [piece async for piece in reading]
        return [event["seq"] for event in parsed(b"".join(pieces)) if event["kind"] != "gap"]

    assert asyncio.run(read("")) == [1, 3, *range(23, 31)]
    assert asyncio.run(read("7-25")) == [*range(26, 31)]
