"""Who may do what: every route, with every kind of caller, over both sockets. Tenants: tests/api/test_tenants.py."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import uvicorn
from admin_helpers import ROUTES, call, ok
from api_helpers import (
    NOBODYS,
    OPERATOR,
    Engine,
    ServerProcess,
    access_file,
    attach,
    eventually,
    http_connection,
    keys,
    raw,
)
from fastapi import FastAPI
from flood_helpers import until_closed

from kvdock.api.access.access_file import AccessFile, entry
from kvdock.api.access.peer import NOBODY, peer_of
from kvdock.api.errors import AccessFileError, SettingsError
from kvdock.api.http.connection import connection_class
from kvdock.api.http.limits import ConnectionLimits
from kvdock.api.http.openapi import BODIES
from kvdock.api.record.counters import Counters
from kvdock.api.record.timings import Meter, Timings
from kvdock.api.settings import Settings
from kvdock.client.client import Client
from kvdock.protocol import calls
from kvdock.protocol.access import PrivateFileError
from kvdock.protocol.calls import INCLUDED, Call
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Heartbeat
from kvdock.protocol.wire_types import Scope

pytestmark = pytest.mark.security
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

OTHER_UID = 65534
TOKENS: dict[Scope, str] = {scope: f"{scope}-" + "t" * 40 for scope in INCLUDED}
EXAMPLES = {kind.__name__: body for kind, body in BODIES.items()}


class Asked(NamedTuple):
    """One call as anybody could send it. `scope`: what its route says that it needs."""

    method: str
    path: str
    body: Any
    scope: Scope


def every_call() -> list[Asked]:
    """A well-formed call of each route; ids are made up, so none finds anything."""
    asked = []
    for route in ROUTES:
        path = route.path
        for id_ in ("session", "lease", "reservation"):
            path = path.replace(f"{{{id_}}}", "0123456789abcdef")
        asked.append(Asked(route.method, path, EXAMPLES[route.body] if route.body else None, route.scope))
    return asked


CALLS = every_call()
PAGE = [Asked("GET", path, None, "health") for path in ("/", "/static/app.js", "/docs", "/docs.css", "/openapi.json")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    entries = [entry(f"only-{scope}", token, [scope], "") for scope, token in TOKENS.items()]
    path = access_file(tmp_path_factory.mktemp("access"), *entries)
    with ServerProcess(access_file=str(path), watch_s=0.02) as running:
        yield running


def status_of(address: str, asked: Asked, authorization: str) -> int:
    body = None if asked.body is None else msgspec.json.encode(asked.body)
    headers = {"Authorization": authorization, "Content-Type": "application/json"}
    return raw(address, asked.method, asked.path, body, headers)[0]


def refusals(address: str, authorization: str) -> dict[int, set[Scope]]:
    """Status 401 and 403 → the scopes of the routes that answered so; no other call may be refused for access."""
    found: dict[int, set[Scope]] = {401: set(), 403: set()}
    answered: set[Scope] = set()
    for asked in [*CALLS, *PAGE]:
        status = status_of(address, asked, authorization)
        assert status < 500 or status == 503, asked
        found[status].add(asked.scope) if status in found else answered.add(asked.scope)
    assert answered.isdisjoint(found[401] | found[403]), "routes of one scope answered differently"
    return found


def test_every_call_of_the_api_is_a_route_here() -> None:
    named = {(call_.method, call_.path) for call_ in vars(calls).values() if isinstance(call_, Call)}
    assert named <= {(route.method, route.path) for route in ROUTES} and len(CALLS) >= len(named) + 5


@pytest.mark.parametrize("scope", INCLUDED)
@pytest.mark.parametrize("transport", ["http", "unix"])
def test_a_token_may_do_what_its_scope_includes_and_is_forbidden_all_else(
    server: ServerProcess, scope: Scope, transport: str
) -> None:
    found = refusals(getattr(server, transport), f"Bearer {TOKENS[scope]}")
    assert found == {401: set(), 403: set(INCLUDED) - INCLUDED[scope]}


@pytest.mark.parametrize("scope", INCLUDED)
@pytest.mark.parametrize("transport", ["http", "unix"])
def test_whoami_tells_a_token_s_scopes_and_tenant(server: ServerProcess, scope: Scope, transport: str) -> None:
    status, _, content = raw(
        getattr(server, transport), "GET", "/v1/whoami", None, {"Authorization": f"Bearer {TOKENS[scope]}"}
    )
    assert (status, json.loads(content)) == (
        200, {"scopes": [one for one in INCLUDED if one in INCLUDED[scope]], "tenant": ""}
    )


def test_whoami_tells_what_a_caller_without_a_token_may_do(server: ServerProcess) -> None:
    nobody = raw(server.http, "GET", "/v1/whoami", None, NOBODYS)
    assert (nobody[0], json.loads(nobody[2])) == (200, {"scopes": ["health"], "tenant": None})
    with Client(server.unix) as client:
        own = client.whoami()
    assert (own.scopes, own.tenant) == (["health", "read", "engine", "admin", "peer"], "")
    unknown = raw(server.http, "GET", "/v1/whoami", None, {"Authorization": "Bearer nobodys"})
    assert (unknown[0], json.loads(unknown[2])["code"]) == (401, "unauthenticated")


def test_a_refusal_says_what_was_wanted(server: ServerProcess) -> None:
    body = b'{"namespace": "' + b"0" * 64 + b'", "keys": []}'
    for address in (server.http, server.unix):
        sent = {"Authorization": f"Bearer {TOKENS['read']}", "Content-Type": "application/json"}
        status, _, content = raw(address, "POST", "/v1/lookups", body, sent)
        problem = json.loads(content)
        assert (status, problem["code"], problem["wanted"]) == (403, "forbidden", "scope engine")
        assert problem["found"] == "token only-read"
    status, headers, content = raw(server.http, "GET", "/v1/leases", None, NOBODYS)
    assert (status, json.loads(content)["code"]) == (401, "unauthenticated")
    assert headers["www-authenticate"].startswith("Bearer")


def test_tcp_without_a_token_reads_health_and_totals_and_nothing_else(server: ServerProcess) -> None:
    assert refusals(server.http, "") == {401: {"read", "engine", "admin", "peer"}, 403: set()}
    totals = json.loads(raw(server.http, "GET", "/v1/status", None, NOBODYS)[2])
    assert totals["counters"]["lookups"] >= 0


@pytest.mark.parametrize(
    "authorization", ["Bearer wrong", "Bearer ", "Basic b3BlcmF0b3I6eA==", OPERATOR],
    ids=["wrong", "empty", "Basic", "of-another-server"],
)
@pytest.mark.parametrize("transport", ["http", "unix"])
def test_a_token_that_is_not_known_gets_nothing_not_even_what_is_open(
    server: ServerProcess, transport: str, authorization: str
) -> None:
    assert refusals(getattr(server, transport), authorization) == {401: set(INCLUDED), 403: set()}


def test_the_servers_own_user_may_do_everything_over_the_socket(server: ServerProcess) -> None:
    assert refusals(server.unix, "") == {401: set(), 403: set()}


_AS_ANOTHER = """
import http.client, json, socket, sys
asked, path = json.load(sys.stdin), sys.argv[1]
found = []
for method, target, body, _ in asked:
    link = http.client.HTTPConnection("localhost")
    link.sock = socket.socket(socket.AF_UNIX)
    link.sock.connect(path)
    sent = {} if body is None else {"content-type": "application/json"}
    link.request(method, target, None if body is None else json.dumps(body), sent)
    found.append(link.getresponse().status)
    link.close()
print(json.dumps(found))
"""


def as_another_user(socket_path: str, asked: list[Asked]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/usr/bin/env", "python3", "-c", _AS_ANOTHER, socket_path], input=json.dumps(asked), text=True,
        capture_output=True, user=OTHER_UID, group=OTHER_UID, extra_groups=[], cwd="/", timeout=60, check=False,
    )


@needs_root
def test_another_user_reaches_no_socket_and_through_an_open_one_only_health(server: ServerProcess) -> None:
    path = server.unix.removeprefix("unix:")
    assert "PermissionError" in as_another_user(path, CALLS[:1]).stderr
    Path(path).parent.chmod(0o711)
    try:
        assert "PermissionError" in as_another_user(path, CALLS[:1]).stderr, "the socket's own mode does not hold"
        Path(path).chmod(0o666)
        done = as_another_user(path, CALLS)
        assert done.returncode == 0, done.stderr
        for asked, status in zip(CALLS, json.loads(done.stdout), strict=True):
            assert (status == 401) == (asked.scope != "health"), (asked, status)
    finally:
        Path(path).chmod(0o600)
        Path(path).parent.chmod(0o700)


def test_what_a_caller_says_of_itself_does_not_count(server: ServerProcess) -> None:
    """Not Forwarded, nor a Host, nor an empty client address, which a reset connection has."""
    for headers in ({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=unix"}, {"Host": "localhost"}):
        assert raw(server.http, "GET", "/v1/sessions", None, {**NOBODYS, **headers})[0] == 401
    before = timed_lookups(server)
    host, port = server.http.removeprefix("http://").split(":")
    for _ in range(50):
        with socket.create_connection((host, int(port))) as link:
            body = b'{"namespace":"' + b"0" * 64 + b'","keys":[]}'
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close() resets
            link.sendall(
                b"POST /v1/lookups HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
    assert timed_lookups(server) == before, "a lookup over TCP without a token was answered"


@pytest.mark.parametrize("transport", ["http", "unix"])
def test_a_token_behind_the_body_does_not_count(server: ServerProcess, transport: str) -> None:
    """A proxy adds the caller's token to the header; what it passes on after the body is the caller's own."""
    sent = (
        f"POST /v1/releases HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKENS['read']}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        f"2\r\n{{}}\r\n0\r\nAuthorization: Bearer {TOKENS['engine']}\r\n\r\n"
    )
    assert until_closed(getattr(server, transport), sent.encode()).startswith(b"HTTP/1.1 403 ")


def timed_lookups(server: ServerProcess) -> int:
    ok(server.http, "GET", "/livez")
    return int(ok(server.http, "GET", "/v1/status")["counters"]["peeks"])


def test_a_connection_whose_peer_the_kernel_does_not_name_is_closed() -> None:
    class Nameless:
        def getsockopt(self, level: int, option: int, size: int = 0) -> int:
            if option == socket.SO_PEERCRED:
                raise OSError("no credentials")
            return int(socket.AF_UNIX)

    class Transport(asyncio.Transport):
        aborted = False

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return Nameless() if name == "socket" else default

        def abort(self) -> None:
            self.aborted = True

    async def connect() -> Transport:
        config = uvicorn.Config(FastAPI(), log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        limits = ConnectionLimits(tcp_connections=1, unix_connections=1)
        meter = Meter(Counters(), Timings(time.time), time.perf_counter_ns, {}, lambda event: None)
        protocol, transport = connection_class(limits, meter)(config, state, {}), Transport()
        protocol.connection_made(transport)
        assert not state.connections
        return transport

    assert asyncio.run(connect()).aborted
    with socket.socket() as tcp:
        assert peer_of(tcp) is NOBODY


# ------------------------------------------------------------------ the access file


def test_a_file_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    """Whoever writes it in place leaves it empty for a moment, and nobody's token may be refused for that."""
    path = access_file(tmp_path, entry("reader", TOKENS["read"], ["read"], ""))
    file, header = AccessFile(str(path)), f"Bearer {TOKENS['read']}".encode()
    known = [file.peer_of(header, NOBODY).name]
    whole = path.read_text()
    for text in ("", whole[:-1], whole + "\n"):
        path.write_text(text)
        asyncio.run(file.refresh())
        known.append(file.peer_of(header, NOBODY).name)
    assert known == [known[0]] * 4
    path.write_text("")
    asyncio.run(file.refresh())
    asyncio.run(file.refresh())
    with pytest.raises(ApiError, match="no such access token"):
        file.peer_of(header, NOBODY)


@pytest.mark.parametrize("wrong", ["[[token]]\nname = 7\n", "token = " + "[" * 10_000, f"token = {'9' * 5000}"],
                         ids=["name", "depth", "digits"])
def test_a_change_of_the_file_counts_soon_and_a_wrong_one_changes_nothing(tmp_path: Path, wrong: str) -> None:
    path = access_file(tmp_path)
    with ServerProcess(access_file=str(path)) as server:
        asked = {"Authorization": f"Bearer {TOKENS['read']}"}
        assert raw(server.http, "GET", "/v1/sessions", None, asked)[0] == 401
        access_file(tmp_path, entry("reader", TOKENS["read"], ["read"], ""))
        eventually(lambda: raw(server.http, "GET", "/v1/sessions", None, asked)[0] == 200)
        path.write_text(wrong)
        eventually(lambda: "stay valid" in server.log_text())
        assert raw(server.http, "GET", "/v1/sessions", None, asked)[0] == 200
        path.unlink()
        access_file(tmp_path)
        eventually(lambda: raw(server.http, "GET", "/v1/sessions", None, asked)[0] == 401)
        assert TOKENS["read"] not in server.log_text() and OPERATOR not in server.log_text()


def is_refused(engine: Engine) -> bool:
    try:
        engine.heartbeat()
    except ApiError as error:
        return error.code == "unauthenticated"
    return False


def test_an_engine_goes_on_when_its_token_is_replaced(tmp_path: Path) -> None:
    """In its session, as no token has another's name; without one that counts, it is refused."""
    held = tmp_path / "token"
    held.touch(mode=0o600)
    tokens = [secrets.token_urlsafe(32) for _ in range(3)]
    held.write_text(tokens[0])
    path = access_file(tmp_path, entry("engine", tokens[0], ["engine"], "a"))
    with (
        ServerProcess(access_file=str(path)) as server, Client(server.http, access_token_file=str(held)) as client
    ):
        engine = attach(client)
        engine.store(keys(2))
        for token in tokens[1:]:
            access_file(tmp_path, entry("engine", token, ["engine"], "a"))
            eventually(lambda: is_refused(engine))
            held.write_text(token)
            assert engine.lookup(keys(2)).hit_tokens == 32
        held.unlink()
        engine.heartbeat()
        with pytest.raises(PrivateFileError, match="token"):
            Client(server.http, access_token_file=str(held))
        engine.close()


@pytest.mark.parametrize(("text", "says"), [
    ('[[token]]\nname = "a"\n', "sha256"),
    ('[[token]]\nname = "a"\nsha256 = "abc"\nscopes = ["read"]\n', "sha256"),
    (entry("a", "x", ["root"], ""), "scopes"),  # type: ignore[list-item]  # a wrong scope is the point
    (entry("a", "x", [], ""), "scopes"),
    (entry("a b", "x", ["read"], ""), "name"),
    (entry("a", "x", ["read"], "Team A"), "tenant"),
    (entry("a", "x", ["read"], "a\n"), "tenant"),
    (entry("a", "x", ["read"], "\n"), "tenant"),
    (entry("a\n", "x", ["read"], ""), "name"),
    (entry("a", "x", ["read"], "") + "colour = 1\n", "colour"),
    (entry("a", "x", ["read"], "") + entry("a", "y", ["read"], ""), "name found twice"),
    (entry("a", "x", ["read"], "") + entry("b", "x", ["read"], ""), "sha256 found twice"),
    (entry("a", "x", ["read"], "") + "expires = 2026-12-01T00:00:00\n", "with a zone"),
    (entry("a", "x", ["read"], "") + "expires = 2026-12-01\n", "expires"),
    (entry("a", "x", ["read"], "b") + "expires = 2026-12-01T00:00:00Z\n" + entry("a", "y", ["read"], "c"), "tenants"),
    (entry("a", "x", ["read"], "") + "expires = 9999-12-31T23:59:59-23:59\n", "years 1 to 9999"),
    (entry("a", "x", ["read"], "") + "created = 0001-01-01T00:00:00+23:59\n", "years 1 to 9999"),
    (entry("a", "x", ["read"], "") + f"caps = {{sessions = {'9' * 5000}}}\n", "4300 digits"),
    (entry("a", "x", ["read"], "") + f"caps = {{bytes = '{'9' * 5000}GiB'}}\n", "a size like 512MiB"),
    (entry("a", "x", ["read"], "") + f"caps = {{bytes = '{'9' * 400}.5GiB'}}\n", "a size like 512MiB"),
    ("tokens = 1\n", "tokens"),
    ("token = " + "[" * 10_000, "nested too deeply"),
    ("token = " + "{a = " * 10_000, "nested too deeply"),
    ("[[token", "access.toml"),
])
def test_a_wrong_access_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = access_file(tmp_path)
    path.write_text(text)
    with pytest.raises(AccessFileError, match=r"access\.toml") as caught:
        AccessFile(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o610])
def test_an_access_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = access_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(AccessFileError, match="chmod 600"):
        AccessFile(str(path))


def test_an_access_file_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    """By an older one of the same user, with tokens that were revoked since."""
    folder, link = tmp_path / "open", tmp_path / "link.toml"
    folder.mkdir()
    link.symlink_to(access_file(folder))
    folder.chmod(0o777)
    for path in (folder / "access.toml", link):
        with pytest.raises(AccessFileError, match=r"found drwxrwxrwx .*, wanted a folder that others cannot write to"):
            AccessFile(str(path))
    folder.chmod(0o1777)  # as a Secret's volume: only its owner replaces a file there
    assert AccessFile(str(link)).peer_of(f"Bearer {OPERATOR}".encode(), NOBODY).name == "token operator"


@needs_root
def test_an_access_file_of_another_user_a_pipe_and_none_at_all_are_refused(tmp_path: Path) -> None:
    path = access_file(tmp_path)
    os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(AccessFileError, match=f"user {OTHER_UID}"):
        AccessFile(str(path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "missing", ".."):
        with pytest.raises(AccessFileError, match=f"/{re.escape(name)}: "):
            AccessFile(f"{tmp_path}/{name}")


def test_a_token_ends_by_the_wall_clock_and_only_who_has_it_is_told(tmp_path: Path) -> None:
    """A clock that is put back lets it work again; one that is put forward ends it early."""
    end_s = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    path = access_file(tmp_path, entry("guest", TOKENS["read"], ["read"], "") + "expires = 2026-12-01T01:00:00+01:00\n")
    now_s = [end_s - 1.0]
    file, header = AccessFile(str(path), lambda: now_s[0]), f"Bearer {TOKENS['read']}".encode()

    def answer(header: bytes = header) -> str:
        try:
            return file.peer_of(header, NOBODY).name
        except ApiError as error:
            return f"{error.code}: {error.detail}, {error.found}, wanted {error.wanted}"

    unknown = answer(b"Bearer guessed")
    expired = (
        "unauthenticated: the access token has expired, a token until 2026-12-01T00:00:00Z, wanted a newer one of guest"
    )
    assert answer() == "token guest" and "expired" not in unknown
    for at_s, wanted in ((end_s, expired), (end_s + 1e9, expired), (end_s - 5.0, "token guest")):
        now_s[0] = at_s
        assert (answer(), answer(b"Bearer guessed")) == (wanted, unknown)
        assert answer(f"Bearer {OPERATOR}".encode()) == "token operator", "a token without an end has none"


def test_a_running_server_refuses_a_token_from_its_end_on_and_ends_its_streams(tmp_path: Path) -> None:
    guest = entry("guest", TOKENS["read"], ["read"], "")
    sent = {"Authorization": f"Bearer {TOKENS['read']}"}
    later, past = (f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%dT%H:%M:%SZ}" for days in (1, -1))
    path = access_file(tmp_path, f"{guest}expires = {later}\n")
    with ServerProcess(access_file=str(path), observe="stream", watch_s=0.05) as server, Client(server.unix) as own:
        stream = http_connection(server.http)
        stream.request("GET", "/v1/events?follow=true", headers=sent)
        following = stream.getresponse()
        assert following.status == 200, "it has not ended yet"
        access_file(tmp_path, f"{guest}expires = {past}\n")
        eventually(lambda: raw(server.http, "GET", "/v1/sessions", None, sent)[0] == 401)
        status, _, content = raw(server.http, "GET", "/livez", None, sent)
        assert (status, json.loads(content)["detail"].split(":")[0]) == (401, "the access token has expired")
        stranger = {"Authorization": "Bearer " + "s" * 43}
        assert b"expired" not in raw(server.http, "GET", "/v1/sessions", None, stranger)[2]
        attach(own).close()  # an event wakes the stream
        assert b"attached" not in following.read()
        stream.close()
        assert "refused nobody" in server.log_text() and "wanted a newer one of guest" in server.log_text()


def test_a_server_beyond_loopback_needs_an_access_file(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "node7"):
        with pytest.raises(SettingsError, match="access_file") as caught:
            Settings.load({"host": host})
        assert host in str(caught.value)
        good = {"host": host, "access_file": str(access_file(tmp_path)), "allowed_hosts": "node7"}
        assert Settings.load(good).host == host
    assert Settings.load({"host": "127.0.0.2"}).access_file == ""


def test_a_server_beyond_loopback_warns_of_plain_text_as_it_starts() -> None:
    """127.1 is another name of 127.0.0.1, and no name that the settings take for loopback."""
    with ServerProcess(host="127.1", allowed_hosts="localhost,127.0.0.1") as server:
        (said,) = [line for line in server.log_text().splitlines() if "plain HTTP" in line]
        assert "WARNING" in said and "the port on 127.1 speaks plain HTTP" in said and "proxy with TLS" in said
    with ServerProcess() as server:
        assert "plain HTTP" not in server.log_text()


# ------------------------------------------------------------------ the log


def test_operators_calls_and_refusals_are_in_the_log() -> None:
    with ServerProcess() as server:
        ok(server.http, "POST", "/v1/cache/clear", {})
        call(server.http, "PATCH", "/v1/config", {"session_grants": 77})
        raw(server.http, "GET", "/v1/sessions%0aINFO%20forged", None, {"Authorization": "Bearer nobodys-token"})
        eventually(lambda: "forged" in server.log_text())
        log = server.log_text()
        assert "token operator: POST /v1/cache/clear" in log and '{"chunks":' in log
        assert "PATCH /v1/config" in log and '"session_grants":77' in log
        assert "refused nobody" in log and "unauthenticated" in log and "kvdock.audit" in log
        assert not [line for line in log.splitlines() if line.startswith("INFO forged")]
        assert "nobodys-token" not in log


# ------------------------------------------------------------------ sessions are capabilities


def test_a_listed_session_id_opens_nothing(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client)
        shown = ok(server.http, "GET", "/v1/sessions?limit=1000")["sessions"]
        assert engine.listed in {item["session"] for item in shown}
        assert engine.session not in json.dumps(shown)
        for guess in (engine.listed, f"{engine.listed}-{'0' * 32}", engine.session[:-1]):
            with pytest.raises(ApiError, match="unknown_session"):
                client.heartbeat(guess, Heartbeat(member=engine.member))
        assert ok(server.http, "GET", f"/v1/sessions/{engine.listed}")["instance"] == engine.body.instance
        engine.close()

