"""Tenants: what belongs to one does not exist for another, though both ask one server."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from admin_helpers import call, ok
from api_helpers import (
    NOBODYS,
    OPERATOR,
    Engine,
    ServerProcess,
    access_file,
    attach,
    eventually,
    keys,
    manifest,
    raw,
    unique,
)

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.errors import ApiError
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Hint

pytestmark = pytest.mark.security

A, B = "token-of-a-" + "a" * 32, "token-of-b-" + "b" * 32
SMALL, LONG = (s.Group(part_bytes=4096),), 128
PAIRS = 20
FAR = 4 * (PAIRS / 4) ** 0.5
"""Four standard deviations of the number of heads when PAIRS coins are thrown."""
"""Many small chunks: to find them takes longer than to find none."""
SALT, SEED = "s4lt-of-tenant-a", "s33d-of-tenant-a"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    tokens = [entry("team-a", A, ["engine"], "a"), entry("team-b", B, ["engine"], "b")]
    with ServerProcess(access_file=str(access_file(folder, *tokens))) as running:
        yield running


@pytest.fixture(scope="module")
def of_a(server: ServerProcess) -> Iterator[Client]:
    with Client(server.unix, access_token=A) as client:
        yield client


@pytest.fixture(scope="module")
def of_b(server: ServerProcess) -> Iterator[Client]:
    with Client(server.unix, access_token=B) as client:
        yield client


@pytest.fixture
def engine(of_a: Client) -> Iterator[Engine]:
    found = attach(of_a, label="engine of a", cache_salt=SALT, hash_seed=SEED)
    yield found
    found.close()


def asked_by(token: str, server: ServerProcess, path: str) -> tuple[int, dict[str, Any]]:
    status, _, content = raw(server.http, "GET", path, None, {"Authorization": f"Bearer {token}"})
    return status, json.loads(content)


def test_equal_manifests_of_two_tenants_never_meet(of_a: Client, of_b: Client, server: ServerProcess) -> None:
    with Client(server.unix) as own_client:
        engines = [attach(client, model="shared") for client in (of_a, of_b, own_client)]
        assert len({engine.attached.namespace for engine in engines}) == 3
        chain = keys(4, unique("meet"))
        engines[0].store(chain)
        assert [engine.lookup(chain, request=unique("r")).hit_tokens for engine in engines] == [64, 0, 0]
        again = attach(of_a, model="shared")
        assert again.attached.namespace == engines[0].attached.namespace
        for engine in (*engines, again):
            engine.close()


def test_a_session_of_another_tenant_does_not_exist(engine: Engine, of_b: Client, server: ServerProcess) -> None:
    """Not even for a caller who knows its id: every call is answered as for an id that never was."""
    chain = keys(2, unique("other"))
    engine.store(chain)
    lease = engine.lookup(chain, request="held").lease
    granted = engine.reserve(keys(1, unique("new")))
    assert lease and granted.reservation
    known, member = engine.session, engine.member
    asks: list[Callable[[], object]] = [
        lambda: of_b.heartbeat(known, s.Heartbeat(member=member)),
        lambda: of_b.lookup(s.Lookup(session=known, member=member, request="r", keys=chain)),
        lambda: of_b.reserve(s.Reserve(session=known, member=member, store="s", keys=chain)),
        lambda: of_b.release(lease, s.ReleaseLease(session=known, ranks=[0])),
        lambda: of_b.commit(str(granted.reservation), s.Commit(session=known, rank=0, parts=[])),
        lambda: of_b.hint(Hint(session=known, member=member, keys=chain, conversation_ended=True)),
        lambda: of_b.leave(known, member),
        lambda: of_b.session(known),
        lambda: of_b.session(engine.listed),
    ]
    for ask in asks:
        with pytest.raises(ApiError) as error:
            ask()
        assert error.value.code == "unknown_session"
    for path in (f"/v1/leases/{lease}", f"/v1/leases/{granted.reservation}"):
        assert asked_by(B, server, path)[1]["code"] == "unknown_grant" and asked_by(A, server, path)[0] == 200
    assert engine.release(lease, 0) == [] and engine.commit(granted).ready == 1


def test_a_grant_of_another_tenant_does_not_exist(engine: Engine, of_b: Client) -> None:
    """Named with the caller's own session, it is answered as one that was never given."""
    theirs = attach(of_b)
    chain = keys(2, unique("grants"))
    engine.store(chain)
    lease, granted = engine.lookup(chain, request="held").lease, engine.reserve(keys(1, unique("new")))
    assert lease and granted.reservation
    session, reservation = theirs.session, granted.reservation
    asks: list[Callable[[], object]] = [
        lambda: theirs.release(lease, 0),
        lambda: of_b.cancel(lease, session, theirs.member),
        lambda: of_b.mismatch(s.ReportMismatch(session=session, lease=lease, chunks=[0])),
        lambda: theirs.commit(granted),
        lambda: of_b.abort(reservation, s.Abort(session=session, ranks=[0])),
    ]
    for ask in asks:
        with pytest.raises(ApiError) as error:
            ask()
        assert error.value.code == "unknown_grant"
    theirs.heartbeat(done=[s.GrantRanks(grant=lease, ranks=[0])], keep=[lease])
    assert engine.release(lease, 0) == [] and engine.commit(granted).ready == 1
    theirs.close()


def test_the_next_session_gets_nothing_of_one_that_has_ended(of_a: Client, of_b: Client) -> None:
    """The table uses the place of an ended session again, for any tenant: its grants do not go with it."""
    first = attach(of_a, model="shared")
    granted = first.store(keys(1, unique("ended")))
    of_a.leave(first.session, first.member)
    first.close()
    following = attach(of_b, model="shared")
    for checksum in (7, 8):
        with pytest.raises(ApiError) as error:
            following.commit(granted, checksum=checksum)
        assert error.value.code == "unknown_grant"
    following.close()


def test_an_instance_and_a_lock_of_another_tenant_open_nothing(engine: Engine, of_b: Client) -> None:
    """The same instance of another tenant is another session; the same byte of the lock file is refused."""
    with pytest.raises(ApiError) as error:
        of_b.attach(engine.body)
    assert error.value.code == "lock_not_visible"
    theirs = attach(of_b, instance=engine.body.instance)
    assert theirs.listed != engine.listed
    theirs.close()


def test_a_line_break_in_an_instance_makes_it_no_other_tenants(engine: Engine, server: ServerProcess) -> None:
    with Client(server.unix) as client:
        attach(client, instance=f"a\n{engine.body.instance}").close()


def test_lists_show_a_tenant_its_own_only_and_an_operator_all(
    engine: Engine, of_b: Client, server: ServerProcess
) -> None:
    other = attach(of_b, label="engine of b", model=unique("model of b"))
    chain = keys(2, unique("listed"))
    engine.store(chain)
    engine.lookup(chain, request=unique("request of a"))
    other.reserve(keys(1, unique("b")), store=unique("store of b"))
    other.heartbeat(outcomes=[Outcome(request="told by b", prompt_tokens=1)])
    assert "told by b" not in json.dumps(asked_by(A, server, "/v1/requests?request=told")[1])
    assert "told by b" in json.dumps(asked_by(B, server, "/v1/requests?request=told")[1])
    for path in ("/v1/sessions", "/v1/leases", "/v1/namespaces", "/v1/requests"):
        seen = {name: json.dumps(asked_by(token, server, path)[1]) for name, token in (("a", A), ("b", B))}
        every = json.dumps(asked_by(OPERATOR, server, f"{path}?limit=1000")[1])
        for mine, theirs in ((engine, other), (other, engine)):
            text = seen["a" if mine is engine else "b"]
            identity = mine.attached.namespace if path == "/v1/namespaces" else mine.listed
            foreign = theirs.attached.namespace if path == "/v1/namespaces" else theirs.listed
            assert identity in text and foreign not in text, path
            assert identity in every and foreign in every, path
    other.close()


def test_metrics_name_no_other_tenant(engine: Engine, of_b: Client, server: ServerProcess) -> None:
    other = attach(of_b)

    def tenants(headers: dict[str, str]) -> set[str]:
        text = raw(server.http, "GET", "/metrics", None, headers)[2].decode()
        return set(re.findall(r'kvdock_tenant_sessions{tenant="(.*?)"} [1-9]', text))

    assert tenants({"Authorization": f"Bearer {A}"}) == {"a"} and tenants({"Authorization": f"Bearer {B}"}) == {"b"}
    assert tenants({}) >= {"a", "b"} and tenants(NOBODYS) == set()
    other.close()


def pages_are_the_whole(server: ServerProcess, path: str, field: str, id_: str) -> bool:
    """False also if something went meanwhile, as sessions of engines that earlier tests have closed."""
    whole = [item[id_] for item in asked_by(A, server, f"{path}?limit=1000")[1][field]]
    page = asked_by(A, server, f"{path}?limit=1")[1]
    paged = [item[id_] for item in page[field]]
    while page["next"] is not None:
        page = asked_by(A, server, f"{path}?limit=1&cursor={page['next']}")[1]
        paged += [item[id_] for item in page[field]]
    return paged == whole and len(whole) >= 3


def test_pages_of_a_tenants_lists_hold_each_of_its_items_once(
    of_a: Client, of_b: Client, server: ServerProcess
) -> None:
    engines = [attach(client) for client in (of_a, of_b) * 3]
    for engine in engines:
        for number in range(2):
            engine.reserve(keys(1, unique("page")), store=f"s{number}")
    for path, field, id_ in (("/v1/sessions", "sessions", "session"), ("/v1/leases", "leases", "grant"),
                             ("/v1/requests", "requests", "took_us")):
        eventually(partial(pages_are_the_whole, server, path, field, id_))
    for engine in engines:
        engine.close()


def test_no_answer_shows_a_salt_or_a_seed(engine: Engine, of_a: Client, server: ServerProcess) -> None:
    changed = s.AttachSession(
        instance=engine.body.instance, manifest=manifest(cache_salt="another salt"), member=engine.body.member,
    )
    with pytest.raises(ApiError) as error:
        of_a.attach(changed)
    assert error.value.code == "layout_mismatch" and SALT not in f"{error.value!s}{error.value.wanted}"
    texts = [
        raw(server.http, "GET", path)[2].decode()
        for path in ("/v1/namespaces", "/v1/sessions", f"/v1/sessions/{engine.listed}", "/v1/requests", "/v1/leases",
                     "/v1/status", "/v1/config", "/metrics")
    ]
    assert not [text for text in (*texts, server.log_text()) if SALT in text or SEED in text]
    assert '"cache_salt":"hidden"' in texts[0]


def test_a_peek_finds_nothing_in_another_tenants_namespace(engine: Engine, of_b: Client, server: ServerProcess) -> None:
    chain = keys(3, unique("peek"))
    engine.store(chain)
    peek = s.Lookup(namespace=engine.attached.namespace, keys=chain)
    with pytest.raises(ApiError) as error:
        of_b.lookup(peek)
    assert error.value.code == "unknown_namespace"
    assert engine.client.lookup(peek).hit_tokens == 48
    with Client(server.unix) as own_client:
        assert own_client.lookup(peek).hit_tokens == 48, "the server's own user is an operator, who sees all"


def test_neither_answer_nor_time_tells_what_another_tenant_has_stored(engine: Engine, of_b: Client) -> None:
    """B looks up what A has stored and what nobody has, in random order: equal answers, in equal times."""
    spy, owner = attach(of_b, groups=SMALL), attach(engine.client, groups=SMALL)

    def look(chain: list[str], request: str) -> None:
        answer = spy.lookup(chain, request=request)
        assert (answer.hit_tokens, answer.lease, answer.chunks) == (0, None, [])

    assert abs(slower_of_pairs(owner, look) - PAIRS / 2) < FAR
    spy.close()
    owner.close()


def test_the_same_test_sees_what_a_tenant_has_stored_itself(engine: Engine) -> None:
    """Else the test above could not fail."""
    owner = attach(engine.client, groups=SMALL)

    def look(chain: list[str], request: str) -> None:
        found = owner.lookup(chain, request=request)
        if found.lease:
            owner.release(found.lease, 0)

    assert slower_of_pairs(owner, look) - PAIRS / 2 > FAR
    owner.close()


def slower_of_pairs(owner: Engine, look: Callable[[list[str], str], None]) -> int:
    """In how many of PAIRS pairs of prefixes `look` takes longer, by its median, for the one that `owner` has stored.

    Many pairs, because where a prefix lies in this process's memory may make one lookup the slower by itself.
    """
    order, slower = random.Random(20261122), 0
    for _ in range(PAIRS):
        chains = {"stored": keys(LONG, unique("stored")), "absent": keys(LONG, unique("absent"))}
        owner.store(chains["stored"])
        took_s: dict[str, list[float]] = {"stored": [], "absent": []}
        for _ in range(15):
            for name in order.sample(["stored", "absent"], 2):
                request, began_s = unique("look"), time.perf_counter()
                look(chains[name], request)
                took_s[name].append(time.perf_counter() - began_s)
        slower += statistics.median(took_s["stored"]) > statistics.median(took_s["absent"])
    return slower


def test_tenants_survive_the_server(tmp_path: Path) -> None:
    """The next server gives the same ids to those who come back, and to nobody else."""
    path = access_file(tmp_path, entry("team-a", A, ["engine"], "a"), entry("team-b", B, ["engine"], "b"))
    settings = {"access_file": str(path), "socket_path": str(tmp_path / "kvdock.sock")}
    with ServerProcess(**settings) as first, Client(first.unix, access_token=A) as client:
        engine = attach(client)
        chain = keys(2)
        engine.store(chain)
        first.stop(9)
        with ServerProcess(**settings, adopt="require") as second, Client(second.unix, access_token=B) as of_b:
            with pytest.raises(ApiError, match="unknown_session"):
                client.heartbeat(engine.session, s.Heartbeat(member=engine.member))
            assert client.attach(engine.body).session == engine.session
            assert engine.lookup(chain).hit_tokens == 32
            with pytest.raises(ApiError, match="unknown_session"):
                of_b.heartbeat(engine.session, s.Heartbeat(member=engine.member))
            engine.close()


def test_what_an_operator_may_do_reaches_every_tenant(engine: Engine, server: ServerProcess) -> None:
    chain = keys(2, unique("cleared"))
    engine.store(chain)
    assert call(server.http, "POST", "/v1/cache/clear", {"namespace": engine.attached.namespace})[1]["chunks"] >= 2
    assert engine.lookup(chain, request=unique("r")).hit_tokens == 0
    assert ok(server.http, "GET", "/v1/status")["status"] == "ok"


def test_clearing_a_tenant_takes_all_that_is_its_own_and_nothing_else(tmp_path: Path) -> None:
    """Also what it stored before a restart, after which no engine of it has attached."""
    path = access_file(tmp_path, entry("team-a", A, ["engine"], "a"), entry("team-b", B, ["engine"], "b"))
    settings = {"access_file": str(path), "socket_path": str(tmp_path / "kvdock.sock"), "on_exit": "keep"}
    chain = keys(3, "tenants")

    def stored_by(server: ServerProcess, token: str, model: str) -> None:
        with Client(server.unix, access_token=token) as client, closing(attach(client, model=model)) as engine:
            engine.store(chain)
            client.leave(engine.session, engine.member)

    def left(server: ServerProcess) -> list[int]:
        found = []
        for token, model in ((A, "one"), (A, "two"), (B, "one"), ("", "one")):
            with Client(server.unix, access_token=token) as client, closing(attach(client, model=model)) as engine:
                peek = s.Lookup(namespace=engine.attached.namespace, keys=chain)
                found.append(client.lookup(peek).hit_tokens)
                client.leave(engine.session, engine.member)
        return found

    with ServerProcess(**settings) as first:
        for token, model in ((A, "one"), (A, "two"), (B, "one"), ("", "one")):
            stored_by(first, token, model)
    with ServerProcess(**settings) as server, Client(server.unix) as own:
        assert own.clear(ClearCache(tenant="nobody")).chunks == 0
        assert own.clear(ClearCache(tenant="a")).chunks == 6, "its namespaces of before the restart"
        assert left(server) == [0, 0, 48, 48]
        stored_by(server, A, "two")
        assert own.clear(ClearCache(tenant="a")).chunks == 3
        assert own.clear(ClearCache(tenant="")).chunks == 3
        assert left(server) == [0, 0, 48, 0]
        refused = call(server.http, "POST", "/v1/cache/clear", {"tenant": "a", "namespace": "0" * 64})[1]
        assert (refused["code"], refused["found"]) == ("invalid_body", "$.tenant")


def test_an_operator_of_a_tenant_clears_its_own_alone(tmp_path: Path) -> None:
    own = entry("boss-a", A, ["engine", "admin"], "a")
    path = access_file(tmp_path, own, entry("team-b", B, ["engine"], "b"))
    with (
        ServerProcess(access_file=str(path)) as server, Client(server.http, access_token=A) as boss,
        Client(server.unix, access_token=B) as of_b, closing(attach(of_b)) as other, closing(attach(boss)) as engine,
    ):
        for one in (other, engine):
            one.store(keys(2))
        for body in (
            ClearCache(), ClearCache(tenant="b"), ClearCache(tenant=""), ClearCache(namespace=other.attached.namespace)
        ):
            with pytest.raises(ApiError, match="forbidden") as refused:
                boss.clear(body)
            assert refused.value.wanted == "tenant 'a'"
        assert "refused token boss-a: POST '/v1/cache/clear': forbidden" in server.log_text()
        assert other.lookup(keys(2)).hit_tokens == 32
        assert boss.clear(ClearCache(namespace=engine.attached.namespace)).chunks == 2
        engine.store(keys(2))
        assert boss.clear(ClearCache(tenant="a")).chunks == 2


def test_the_access_files_caps_are_quotas_and_change_with_it(tmp_path: Path) -> None:
    """A lowered cap counts at once, and a tenant that the file names no more has the default again."""
    path = access_file(tmp_path, entry("team-a", A, ["engine"], "a") + "caps = {sessions = 1, chunks = 8}\n")

    def quota(server: ServerProcess) -> dict[str, int | None] | None:
        shown: dict[str, Any] = ok(server.http, "GET", "/v1/config")["tenants"]
        return shown["a"]["quota"] if "a" in shown else None

    settings = {"access_file": str(path), "tenant_sessions": 7}
    with ServerProcess(**settings) as server, Client(server.unix, access_token=A) as client:
        engine, chain = attach(client), keys(8)
        with pytest.raises(ApiError) as error:
            attach(client)
        assert (error.value.code, error.value.status, error.value.found) == ("quota_exceeded", 429, 1)
        engine.store(chain)
        access_file(tmp_path, entry("team-a", A, ["engine"], "a") + "caps = {sessions = 2, chunks = 4}\n")
        peek = s.Lookup(namespace=engine.attached.namespace, keys=chain)
        eventually(lambda: client.lookup(peek).hit_tokens == 64)
        own = quota(server)
        ok(server.http, "PATCH", "/v1/config", {"tenants": {"a": {"sessions": 9}}})
        ok(server.http, "PATCH", "/v1/config", {"tenants": {"a": None}})
        assert quota(server) == own, "null gives back what the file says"
        attach(client).close()
        access_file(tmp_path, entry("team-a", A, ["engine"], "a"))
        eventually(lambda: (quota(server) or {}).get("sessions") == 7)
        engine.close()
