"""Weights that change while engines run, as the server has them: sessions move between namespaces, and what nobody runs
any more goes first, whatever happens to servers and engines meanwhile."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import ok
from adoption_helpers import next_at
from api_helpers import Engine, ServerProcess, access_file, attach, eventually, keys, unique
from connector_helpers import mortal
from msgspec.structs import replace

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol import admin_schemas as a, schemas as s
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import chunk_keys, filed_in

pytestmark = pytest.mark.weights

BEGINNINGS = "0123456789abcdef"

CHUNK_BYTES = 16384


def runs(engine: Engine, weights: str) -> str:
    """Says so; the namespace in which it is filed then."""
    body = s.RunWeights(session=engine.session, member=engine.member, weights=weights)
    return engine.client.weights(body).filed_in


def back_with(engine: Engine, weights: str) -> s.SessionAttached:
    """The member attaches again, and says what it runs."""
    return engine.client.attach(replace(engine.body, weights=weights))


def found(engine: Engine, wanted: list[str]) -> int:
    """How many tokens of the prefix it finds; it holds nothing afterwards."""
    answer = engine.lookup(wanted, unique("r"))
    if answer.lease is not None:
        engine.release(answer.lease, 0)
    return answer.hit_tokens


def namespace(client: Client, digest: str) -> a.NamespaceView | None:
    return next((one for one in client.namespaces(limit=1000).namespaces if one.namespace == digest), None)


def test_engines_share_what_they_store_under_weights_of_one_name_and_nothing_else(client: Client) -> None:
    revision = unique("model")
    one, other = (attach(client, revision=revision) for _ in range(2))
    wanted = keys(3, unique("w"))
    base = one.attached.namespace
    assert one.attached.filed_in == base
    one.store(wanted)
    assert runs(one, "step-1") == filed_in(bytes.fromhex(base), "step-1").hex() != base
    assert (found(one, wanted), found(other, wanted)) == (0, 48)
    one.store(wanted[:2])
    assert runs(other, "step-1") == runs(one, "step-1")
    assert found(other, wanted) == 32
    assert runs(other, "step-2") != runs(other, "") == base
    assert found(other, wanted) == 48
    late = attach(client, revision=revision)
    assert late.attached.namespace == base and found(late, wanted) == 48
    for engine in (one, other, late):
        engine.close()


def test_keys_that_the_server_makes_of_tokens_do_not_depend_on_the_weights(client: Client) -> None:
    engine = attach(client, revision=unique("model"))
    body = s.Lookup(session=engine.session, member=engine.member, request="r", tokens=list(range(32)))
    runs(engine, "step-1")
    granted = client.reserve(s.Reserve(
        session=engine.session, member=engine.member, store="s", tokens=list(range(32))
    ))
    engine.commit(granted)
    assert client.lookup(body).hit_tokens == 32
    made = chunk_keys(bytes.fromhex(engine.attached.namespace), range(32), 16)
    assert found(engine, [key.hex() for key in made]) == 32, "keys that an engine makes are the same"
    runs(engine, "")
    assert client.lookup(replace(body, request="r2")).hit_tokens == 0
    filed = filed_in(bytes.fromhex(engine.attached.namespace), "step-1").hex()
    by_tokens = s.Lookup(namespace=filed, tokens=body.tokens)
    assert client.lookup(by_tokens).hit_tokens == 32
    engine.close()


def test_workers_join_their_session_whatever_its_weights_are_and_cannot_change_them(client: Client) -> None:
    instance, revision = unique("engine"), unique("model")
    scheduler = attach(client, instance=instance, ranks=[0], revision=revision)
    filed = runs(scheduler, "step-7")
    worker = attach(client, instance=instance, ranks=[1], scheduler=False, revision=revision)
    assert (worker.attached.session, worker.attached.filed_in) == (scheduler.session, filed)
    assert back_with(worker, "step-8").filed_in == filed
    with pytest.raises(ApiError, match="not_the_scheduler"):
        runs(worker, "step-8")
    alone = attach(client, ranks=[0], scheduler=False, revision=revision)
    assert back_with(alone, "step-7").filed_in == alone.attached.namespace, "a session that a worker opens"
    for engine in (scheduler, worker, alone):
        engine.close()


@pytest.mark.parametrize(("change", "code"), [
    ({"session": "none"}, "unknown_session"), ({"member": "none"}, "unknown_member"),
    ({"weights": "x" * 129}, "invalid_body"),
])
def test_what_cannot_be_is_refused_and_the_session_stays(client: Client, change: dict[str, Any], code: str) -> None:
    engine = attach(client, revision=unique("model"))
    body = s.RunWeights(session=engine.session, member=engine.member, weights="step-1")
    with pytest.raises(ApiError) as refused:
        client.weights(replace(body, **change))
    assert refused.value.code == code
    assert client.session(engine.listed).namespace == engine.attached.namespace
    engine.close()


def test_a_session_of_another_tenant_does_not_exist_and_equal_names_of_two_tenants_never_meet(tmp_path: Path) -> None:
    tokens = {name: f"token-of-{name}-" + name * 32 for name in "ab"}
    entries = [entry(f"team-{name}", token, ["engine"], name) for name, token in tokens.items()]
    with (
        ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server,
        Client(server.unix, access_token=tokens["a"]) as of_a,
        Client(server.unix, access_token=tokens["b"]) as of_b,
    ):
        mine, theirs = attach(of_a), attach(of_b)
        wanted = keys(2, "w")
        assert runs(mine, "step-1") != runs(theirs, "step-1")
        mine.store(wanted)
        assert (found(mine, wanted), found(theirs, wanted)) == (32, 0)
        with pytest.raises(ApiError, match="unknown_session"):
            of_b.weights(s.RunWeights(session=mine.session, member=mine.member, weights="step-2"))
        assert runs(mine, "step-1") not in {one.namespace for one in of_b.namespaces().namespaces}
        for engine in (mine, theirs):
            engine.close()


def test_a_store_and_a_lease_begun_before_a_change_end_where_they_began(client: Client) -> None:
    engine, stays = (attach(client, revision="model-midway") for _ in range(2))
    old, begun = keys(2, unique("old")), keys(2, unique("begun"))
    engine.store(old)
    lease, reservation = engine.lookup(old), engine.reserve(begun)
    runs(engine, "step-1")
    assert engine.commit(reservation).ready == 2
    assert (found(engine, begun), found(stays, begun)) == (0, 32)
    assert engine.release(lease.lease, 0) == []
    engine.close()
    stays.close()


def test_who_follows_changes_forgets_all_when_the_session_moves(client: Client) -> None:
    engine, other = (attach(client, revision="model-changes") for _ in range(2))
    since = engine.attached.changes_next
    before, after = keys(1, unique("before")), keys(1, unique("after"))
    other.store(before)
    changes = engine.heartbeat(changes_since=since).changes
    assert changes is not None and [change.key for change in changes.changes] == before
    runs(engine, "step-1")
    runs(other, "step-1")
    other.store(after)
    anew = engine.heartbeat(changes_since=changes.next).changes
    assert anew is not None and (anew.changes, anew.complete) == ([], False)
    more = keys(1, unique("more"))
    other.store(more)
    following = engine.heartbeat(changes_since=anew.next).changes
    assert following is not None and following.complete
    assert [change.key for change in following.changes] == more
    engine.close()
    other.close()


def test_people_see_which_weights_chunks_are_of_and_since_when_nobody_runs_them(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client, revision=unique("model"))
        first = runs(engine, "step-1")
        wanted = keys(2, unique("w"))
        engine.store(wanted, beginnings=BEGINNINGS)
        second = runs(engine, "step-2")
        row = client.session(engine.listed)
        assert (row.namespace, row.weights) == (second, "step-2")
        assert found(engine, keys(2, unique("absent"))) == 0
        request = unique("r")
        engine.lookup(wanted, request, beginnings=BEGINNINGS)
        story = client.explain(request)
        assert (story.weights, story.namespace) == ("step-2", second)
        assert any("step-2" in sentence.text for sentence in story.sentences)
        assert [one.differs for one in story.elsewhere] == [{"weights": ["step-2", "step-1"]}]
        left, runs_now = namespace(client, first), namespace(client, second)
        assert left is not None and (left.weights, left.base) == ("step-1", engine.attached.namespace)
        assert left.left_s is not None and left.sessions == 0 and left.chunks == 2
        assert runs_now is not None and runs_now.left_s is None and runs_now.sessions == 1
        prefixes = client.prefixes(limit=200).prefixes
        assert [one.weights for one in prefixes if one.namespace == first] == ["step-1"]
        engine.close()


def test_one_engine_of_a_tenant_with_one_namespace_changes_weights_as_often_as_it_likes() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        ok(server.unix, "PATCH", "/v1/config", {"tenants": {"": {"namespaces": 1}}})
        engine = attach(client)
        for step in range(5):
            runs(engine, f"step-{step}")
            engine.store(keys(2, f"w{step}"))
        with pytest.raises(ApiError, match="quota_exceeded"):
            attach(client, revision="another")
        with pytest.raises(ApiError, match="quota_exceeded"):
            attach_with(client, engine, "step-0")
        eventually(lambda: len(client.namespaces().namespaces) == 1)
        engine.close()


def attach_with(client: Client, like: Engine, weights: str) -> s.SessionAttached:
    second = attach(client, instance=unique("second"))
    try:
        return back_with(second, weights)
    finally:
        second.close()


def test_the_next_server_has_sessions_where_they_were_and_learns_the_names_of_their_weights() -> None:
    with mortal() as server, Client(server.unix) as client:
        instance = unique("engine")
        engine = attach(client, instance=instance, ranks=[0])
        worker = attach(client, instance=instance, ranks=[1], scheduler=False)
        first, second = runs(engine, "step-1"), runs(engine, "step-2")
        wanted = keys(3, "w")
        engine.store(wanted, ranks=1)
        server.stop(signal.SIGKILL)
        with next_at(server):
            joined = client.attach(worker.body)
            assert (joined.filed_in, joined.namespace) == (second, engine.attached.namespace)
            view = namespace(client, second)
            assert view is not None and view.weights in (None, "step-2")  # it may have been kept before the end
            assert back_with(engine, "step-2").filed_in == second
            view = namespace(client, second)
            assert view is not None and (view.weights, view.sessions) == ("step-2", 1)
            assert found(engine, wanted) == 48
            assert namespace(client, first) is None, "it was empty"
            engine.close()
            worker.close()


def test_an_engine_whose_weights_changed_while_the_server_was_gone_is_filed_anew_when_it_comes_back() -> None:
    with mortal() as server, Client(server.unix) as client:
        engine = attach(client)
        runs(engine, "step-1")
        engine.store(keys(3, "w"))
        server.stop(signal.SIGKILL)
        with next_at(server):
            attached = back_with(engine, "step-2")
            assert attached.session == engine.session
            assert attached.filed_in == filed_in(bytes.fromhex(attached.namespace), "step-2").hex()
            assert found(engine, keys(3, "w")) == 0
            assert back_with(engine, "step-1").filed_in != attached.filed_in
            assert found(engine, keys(3, "w")) == 48
            with pytest.raises(ApiError, match="layout_mismatch"):
                client.attach(replace(engine.body, manifest=replace(engine.body.manifest, revision="another")))
            engine.close()


def test_what_nobody_runs_makes_room_for_others_before_anything_else_goes() -> None:
    pool_bytes = 64 * CHUNK_BYTES
    with (
        ServerProcess(pool_bytes=pool_bytes, segment_bytes=pool_bytes, weights_grace_s=0.0, watch_s=30.0) as server,
        Client(server.unix) as client,
    ):
        trained, other = attach(client), attach(client, revision="another")
        theirs = keys(12, "theirs")
        other.store(theirs)
        for step in range(4):
            runs(trained, f"step-{step}")
            assert len(trained.store(keys(12, f"w{step}")).chunks) == 12
        runs(trained, "step-4")
        assert len(trained.store(keys(44, "w4")).chunks) == 44
        assert found(other, theirs) == 12 * 16
        assert found(trained, keys(44, "w4")) == 44 * 16
        runs(trained, "step-3")
        lost = unique("lost")
        assert trained.lookup(keys(12, "w3"), lost).hit_tokens == 7 * 16, "the pool has 63 slots"
        broke = client.explain(lost).lookups[0].broke
        assert broke is not None and broke.why == "weights"
        trained.close()
        other.close()


def test_with_none_kept_weights_that_nobody_runs_any_more_are_removed_and_their_memory_is_free() -> None:
    with ServerProcess(weights_kept=0, watch_s=0.05) as server, Client(server.unix) as client:
        one, other = (attach(client) for _ in range(2))

        def has(*wanted: str) -> bool:
            """Chunks of these weights alone, two of each."""
            weights = {view.weights for view in client.namespaces().namespaces}
            return weights == set(wanted) and client.status().pool.ready_bytes == 2 * len(wanted) * CHUNK_BYTES

        one.store(keys(2, "w"))
        eventually(partial(has, ""))
        for before, now in (("", "step-1"), ("step-1", "step-2")):
            runs(one, now)
            one.store(keys(2, "w"))
            eventually(partial(has, before, now))
            assert found(other, keys(2, "w")) == 32, "it still runs those of before"
            runs(other, now)
            eventually(partial(has, now))
            assert found(other, keys(2, "w")) == 32
        for engine in (one, other):
            engine.close()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_thousands_of_weight_changes_neither_fill_the_table_nor_grow_the_server(sweeps: bool) -> None:
    """Four engines change their weights together, 5,000 changes in all or 1,200, and store some under each."""
    steps = 1250 if sweeps else 300
    pool_bytes = 512 * CHUNK_BYTES
    with ServerProcess(pool_bytes=pool_bytes, segment_bytes=pool_bytes) as server, Client(server.unix) as client:
        engines = [attach(client, label=f"rollout-{number}") for number in range(4)]
        sizes = []
        for step in range(steps):
            for engine in engines:
                runs(engine, f"step-{step}")
            wanted = keys(2, f"w{step}")
            assert len(engines[step % 4].store(wanted).chunks) == 2
            if step % 50 == 0:
                assert found(engines[(step + 1) % 4], wanted) == 32, "they share again"
            if step % (steps // 5) == steps // 5 - 1:
                sizes.append(resident_bytes(server.process.pid))
        eventually(lambda: len(client.namespaces(limit=1000).namespaces) <= 64 + 1)
        assert sizes[-1] - sizes[0] < 4 << 20, sizes
        assert len(client.curve().namespaces) == 1, "one manifest"
        for engine in engines:
            engine.close()


def test_a_table_full_of_namespaces_that_were_left_takes_another_one() -> None:
    pool_bytes = 2048 * CHUNK_BYTES
    with (
        ServerProcess(
            pool_bytes=pool_bytes, segment_bytes=pool_bytes, watch_s=60.0, history_interval_s=60.0
        ) as server,
        Client(server.unix) as client,
    ):
        engine = attach(client)
        for step in range(1200):
            runs(engine, f"step-{step}")
            engine.store(keys(1, f"w{step}"))
        assert found(engine, keys(1, "w1199")) == 16
        assert client.namespaces(limit=1000).next is not None, "not many more went than had to"
        runs(engine, "step-1198")
        assert found(engine, keys(1, "w1198")) == 16
        other = attach(client, revision="another")
        assert other.attached.namespace != engine.attached.namespace
        for one in (engine, other):
            one.close()
