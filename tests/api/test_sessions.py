"""Attaching, heartbeats and questions, leaving, and dying, over a real server and real locks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from api_helpers import Engine, ServerProcess, attach, eventually, keys, post, unique
from paths import SUPPORT

from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import DeleteChunks
from kvdock.protocol.errors import ApiError

_VICTIM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from api_helpers import attach
from kvdock.client.client import Client
client = Client(sys.argv[2])
engine = attach(client, ranks=[0, 1], tensor_parallel=2, writers=2)
wanted = json.loads(sys.argv[3])
held = engine.lookup(wanted[:1], readers=2)
granted = engine.reserve(wanted[1:], parent=wanted[0])
engine.commit(granted, rank=0)
print(json.dumps([engine.listed, granted.reservation, held.lease]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def engine(client: Client) -> Iterator[Engine]:
    attached = attach(client, label="a label")
    yield attached
    attached.close()


def refused(code: str, error: pytest.ExceptionInfo[ApiError]) -> None:
    assert error.value.code == code, error.value


def session_ids(client: Client) -> set[str]:
    return {view.session for view in client.sessions().sessions}


def test_attaching_again_changes_nothing(client: Client, engine: Engine) -> None:
    again = client.attach(engine.body)
    assert (again.session, again.member, again.namespace) == (
        engine.attached.session, engine.attached.member, engine.attached.namespace
    )
    assert len(client.session(engine.session).members) == 1


def test_members_of_one_instance_share_a_session(client: Client, engine: Engine) -> None:
    second = attach(client, instance=engine.body.instance, ranks=[1], scheduler=False)
    assert second.session == engine.session
    members = {member.id: member for member in client.session(engine.session).members}
    assert members[engine.member].ranks == [0] and members[engine.member].scheduler
    assert members[second.member].ranks == [1] and not members[second.member].scheduler
    assert {member.state for member in members.values()} == {"live"}
    second.close()


def test_a_session_shows_who_it_is(client: Client, engine: Engine) -> None:
    view = client.session(engine.session)
    assert (view.label, view.model, view.instance) == ("a label", "test-model", engine.body.instance)
    assert view.namespace == engine.attached.namespace
    assert [shown.session for shown in client.sessions().sessions].count(view.session) == 1


def test_an_equal_manifest_is_the_same_namespace(client: Client, engine: Engine) -> None:
    other = attach(client)
    assert other.attached.namespace == engine.attached.namespace and other.session != engine.session
    other.close()


def test_a_member_whose_lock_is_not_held_is_not_attached(client: Client, engine: Engine) -> None:
    before = session_ids(client)
    engine.close()
    body = s.AttachSession(instance=unique("i"), manifest=engine.body.manifest, member=engine.body.member)
    with pytest.raises(ApiError) as error:
        client.attach(body)
    refused("lock_not_visible", error)
    assert session_ids(client) <= before


def test_leaving_is_the_members_word_on_everything_it_holds(client: Client, engine: Engine) -> None:
    wanted = keys(2, unique("left"))
    engine.store(wanted)
    engine.lookup(wanted)
    client.leave(engine.session, engine.member)
    assert engine.listed not in session_ids(client)
    assert all(view.session != engine.listed for view in client.leases().leases)
    with pytest.raises(ApiError) as error:
        engine.lookup(wanted)
    refused("unknown_session", error)


def test_a_session_of_several_wants_to_know_who_leaves(server: ServerProcess, client: Client, engine: Engine) -> None:
    from api_helpers import raw

    second = attach(client, instance=engine.body.instance, ranks=[1], scheduler=False)
    status, _, content = raw(server.http, "DELETE", f"/v1/sessions/{engine.session}")
    assert status == 422 and json.loads(content)["code"] == "ambiguous_member"
    client.leave(engine.session, second.member)
    assert raw(server.http, "DELETE", f"/v1/sessions/{engine.session}")[0] == 204
    assert engine.listed not in session_ids(client)
    second.close()


def test_an_id_of_another_server_epoch_is_unknown(engine: Engine) -> None:
    with ServerProcess() as other, Client(other.unix) as client:
        first = attach(client, member=engine.member)  # as the fixture's was the first or so of its own server
        namesake = first.session.rpartition("-")[2]
        mine = engine.session.replace(engine.session.rpartition("-")[2], namesake)
        with pytest.raises(ApiError) as error:
            client.heartbeat(mine, s.Heartbeat(member=engine.member))
        first.close()
    refused("unknown_session", error)
    assert error.value.status == 404


def test_a_heartbeat_says_when_the_next_is_due(engine: Engine) -> None:
    answer = engine.heartbeat()
    assert answer.heartbeat_s == 2.0 and answer.questions == [] and answer.segments == 1


def test_a_heartbeat_says_nothing_that_it_need_not() -> None:
    """A server older than a field refuses it, and serves clients that leave it out."""
    assert msgspec.json.encode(s.Heartbeat(member="m")) == b'{"member":"m"}'


def test_who_asks_with_heartbeats_is_told_what_lookups_find_and_do_not_any_more(
    engine: Engine, client: Client
) -> None:
    assert engine.heartbeat().changes is None, "nobody asked"
    earlier = engine.heartbeat(changes_since=0).changes
    assert earlier is not None and not earlier.complete and earlier.changes == []
    wanted, namespace = keys(2, unique("changes")), engine.attached.namespace
    reserved = engine.reserve(wanted)
    at = engine.heartbeat(changes_since=engine.attached.changes_next).changes
    assert at is not None and at.complete and at.changes == [], "nothing is published yet"
    assert at.next == earlier.next == engine.attached.changes_next
    engine.commit(reserved)
    client.delete(DeleteChunks(namespace=namespace, keys=wanted[1:]))
    path = f"/v1/sessions/{engine.session}/heartbeat"
    body = {"member": engine.member, "changes_since": at.next}
    status, answer = post(client.address, path, body)
    assert status == 200 and answer["changes"] == {
        "changes": [[wanted[0], True], [wanted[1], True], [wanted[1], False]], "next": at.next + 3, "complete": True,
    }
    packed = engine.heartbeat(changes_since=at.next).changes
    assert msgspec.to_builtins(packed) == answer["changes"], "as often as one asks"
    for wrong in (-1, 1 << 62, "0"):
        assert post(client.address, path, {**body, "changes_since": wrong})[0] == 422


def test_a_member_that_stops_beating_gets_no_new_grants_until_it_beats_again() -> None:
    with ServerProcess(heartbeat_s=0.4, missed_heartbeats=7) as server, Client(server.unix) as client:
        engine = attach(client)
        eventually(lambda: client.session(engine.session).members[0].state == "suspect")
        assert client.session(engine.session).members[0].heartbeat_age_s >= 7 * 0.4
        with pytest.raises(ApiError) as error:
            engine.reserve(keys(1))
        refused("member_suspect", error)
        engine.heartbeat()
        assert client.session(engine.session).members[0].state == "live"
        assert engine.reserve(keys(1)).reservation
        engine.close()


def test_an_old_lease_is_asked_about_and_done_ends_it() -> None:
    with ServerProcess(ask_s=0.2) as server, Client(server.unix) as client:
        engine = attach(client)
        wanted = keys(2)
        engine.store(wanted)
        lease = str(engine.lookup(wanted).lease)
        questions: list[s.GrantRanks] = []

        def asked() -> bool:
            questions.extend(engine.heartbeat().questions)
            return bool(questions)

        eventually(asked)
        assert questions[0] == s.GrantRanks(grant=lease, ranks=[])
        kept = engine.heartbeat(keep=[lease])
        assert kept.questions == [], "a kept lease is young again"
        done = [s.GrantRanks(grant=lease, ranks=[0]), s.GrantRanks(grant=lease, ranks=[])]
        engine.heartbeat(done=done)
        assert client.leases().leases == []
        engine.heartbeat(done=done)  # an answer that was lost is given again
        engine.close()


def test_a_killed_writer_publishes_nothing_and_its_memory_comes_back(server: ServerProcess, client: Client) -> None:
    survivor = attach(client, tensor_parallel=2, writers=2, ranks=[0, 1])
    wanted = keys(5, unique("killed"))
    survivor.store(wanted[:1], ranks=2)
    free_before = client.status().pool.free_bytes
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(SUPPORT), server.unix, json.dumps(wanted)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert victim.stdin is not None and victim.stdout is not None
    session, reservation, lease = json.loads(victim.stdout.readline())
    assert {reservation, lease} <= {view.grant for view in client.leases().leases}
    assert client.status().pool.free_bytes < free_before
    victim.send_signal(signal.SIGKILL)
    victim.wait(10)
    victim.stdin.close()
    victim.stdout.close()
    eventually(lambda: session not in session_ids(client))
    status = client.status()
    assert status.pool.free_bytes == free_before, "what it wrote and what it read is free again"
    assert status.chunks.reserved == status.chunks.quarantined == 0
    assert all(view.grant not in (reservation, lease) for view in client.leases().leases)
    found = survivor.lookup(wanted, readers=2)
    assert found.hit_tokens == 16, "what was published before is still there; nothing else is"
    assert status.counters["dead_members"] >= 1
    survivor.close()


def test_a_dead_members_memory_waits_until_it_has_settled() -> None:
    with ServerProcess(settle_s=60.0) as server, Client(server.unix) as client:
        engine = attach(client)
        engine.reserve(keys(4))
        engine.close()
        eventually(lambda: client.session(engine.session).members[0].state == "dead")
        pool = client.status().pool
        assert pool.quarantined_bytes == 4 * 16384 and pool.reserved_bytes == 0
        view = next(view for view in client.leases().leases if view.session == engine.listed)
        assert view.closed and view.remaining == [0]
