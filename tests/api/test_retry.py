"""A client that lost an answer repeats the call: same outcome, nothing stranded.

Between client and server stands a real proxy that forwards a request, waits for the server's whole answer
and hangs up instead of passing it on. Every mutating call goes through it.
"""

from __future__ import annotations

import http.client
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from admin_helpers import CALLS, call, ok
from api_helpers import OPERATOR, Engine, ServerProcess, attach, eventually, keys, raw, unique

from kvdock.client.client import Client
from kvdock.client.transport import Address
from kvdock.protocol.schemas import Lookup, ReleaseLease


class DroppingProxy:
    """Forwards to `target` over the same kind of socket; `drops`: how many of the next answers never arrive."""

    def __init__(self, target: str) -> None:
        self.drops = 0
        self.dropped = 0
        self._target = Address.parse(target)
        self._folder = tempfile.TemporaryDirectory(prefix="kvdock-test-")
        if self._target.socket_path:
            path = f"{self._folder.name}/proxy.sock"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self.address = f"unix:{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> DroppingProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as from_client, self._connect() as server, server.makefile("rb") as answers:
            while request := read_message(from_client):
                server.sendall(request)
                answer = read_message(answers)
                assert answer, "the server hung up"
                if self.drops > 0:
                    self.drops -= 1
                    self.dropped += 1
                    return
                client.sendall(answer)

    def _connect(self) -> socket.socket:
        if not self._target.socket_path:
            return socket.create_connection((self._target.host, self._target.port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._target.socket_path)
        return server


def read_message(stream: Any) -> bytes:
    """One HTTP message with its body; b'' at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + (stream.read(int(lengths[0])) if lengths else b"")


@pytest.fixture(scope="module")
def proxy(server: ServerProcess) -> Iterator[DroppingProxy]:
    with DroppingProxy(server.http) as between:
        yield between


# ------------------------------------------------------------------ each mutating call


class Request(NamedTuple):
    method: str
    path: str
    body: dict[str, Any] | None = None


class Case(NamedTuple):
    route: tuple[str, str]
    """As in the OpenAPI document."""
    make: Callable[[Engine], Request]
    """Prepares an engine of its own and returns the call to make."""
    repeat_status: int = 0
    """What the repeat answers when it is another status than the first: final, and nothing to worry about."""


def asker(engine: Engine, **more: Any) -> dict[str, Any]:
    return {"session": engine.session, "member": engine.member, **more}


def chain(engine: Engine) -> list[str]:
    return keys(3, engine.session)


def changes_weights(engine: Engine) -> Request:
    """The chunks that it has stored stay where they are."""
    engine.store(chain(engine))
    return Request("POST", "/v1/weights", asker(engine, weights="step-1"))


def lease(engine: Engine) -> str:
    """On the three chunks that the engine has stored."""
    engine.store(chain(engine))
    found = engine.lookup(chain(engine), request="the request").lease
    assert found is not None
    return found


def reservation(engine: Engine) -> str:
    granted = engine.reserve(chain(engine), store="the store").reservation
    assert granted is not None
    return granted


def attach_again(engine: Engine) -> Request:
    return Request("POST", "/v1/sessions", msgspec.to_builtins(engine.body))


def lookup(engine: Engine) -> Request:
    engine.store(chain(engine))
    return Request("POST", "/v1/lookups", asker(engine, request="r", keys=chain(engine)))


def leave(engine: Engine) -> Request:
    engine.store(chain(engine))  # a namespace without chunks goes with its last session
    return Request("DELETE", f"/v1/sessions/{engine.session}?member={engine.member}")


def commit(engine: Engine) -> Request:
    parts = [[index, 0, "00000000000000aa"] for index in range(3)]
    return Request(
        "POST", f"/v1/reservations/{reservation(engine)}/commit", {"session": engine.session, "rank": 0, "parts": parts}
    )


def administer(method: str, path: str, **more: Any) -> Callable[[Engine], Request]:
    def make(engine: Engine) -> Request:
        engine.store(chain(engine))
        body = {"namespace": engine.attached.namespace, **more}
        return Request(method, path, {**body, "keys": chain(engine)} if "clear" not in path else body)

    return make


def one_rank(engine: Engine) -> dict[str, Any]:
    return {"session": engine.session, "ranks": [0]}


CASES = [
    Case(("POST", "/v1/sessions"), attach_again),
    Case(("POST", "/v1/sessions/{session}/heartbeat"), lambda e: Request(
        "POST", f"/v1/sessions/{e.session}/heartbeat",
        {"member": e.member, "done": [{"grant": lease(e), "ranks": [0]}]})),
    Case(("DELETE", "/v1/sessions/{session}"), leave, repeat_status=404),
    Case(("POST", "/v1/lookups"), lookup),
    Case(("POST", "/v1/leases/{lease}/release"), lambda e: Request(
        "POST", f"/v1/leases/{lease(e)}/release", one_rank(e))),
    Case(("POST", "/v1/releases"), lambda e: Request(
        "POST", "/v1/releases", {"session": e.session, "releases": [[lease(e), [0]]]})),
    Case(("DELETE", "/v1/leases/{lease}"), lambda e: Request(
        "DELETE", f"/v1/leases/{lease(e)}?session={e.session}&member={e.member}")),
    Case(("POST", "/v1/mismatches"), lambda e: Request(
        "POST", "/v1/mismatches", {"session": e.session, "lease": lease(e), "chunks": [1]})),
    Case(("POST", "/v1/holds"), lambda e: Request("POST", "/v1/holds", asker(e, request="h", keys=chain(e)))),
    Case(("POST", "/v1/prefetches"), lambda e: Request("POST", "/v1/prefetches", asker(e, keys=chain(e)))),
    Case(("POST", "/v1/weights"), changes_weights),
    Case(("POST", "/v1/hints"), lambda e: Request(
        "POST", "/v1/hints", asker(e, keys=chain(e), priority=10, duration_s=600))),
    Case(("POST", "/v1/reservations"), lambda e: Request(
        "POST", "/v1/reservations", asker(e, store="s", keys=chain(e)))),
    Case(("POST", "/v1/reservations/{reservation}/commit"), commit),
    Case(("POST", "/v1/reservations/{reservation}/raw"), lambda e: Request(
        "POST", f"/v1/reservations/{reservation(e)}/raw", {"session": e.session, "rank": 0, "parts": [[0, 0]]})),
    Case(("POST", "/v1/reservations/{reservation}/abort"), lambda e: Request(
        "POST", f"/v1/reservations/{reservation(e)}/abort", one_rank(e))),
    Case(("POST", "/v1/cache/clear"), administer("POST", "/v1/cache/clear")),
    Case(("POST", "/v1/acknowledge"), lambda engine: Request("POST", "/v1/acknowledge", {})),
    Case(("POST", "/v1/chunks/delete"), administer("POST", "/v1/chunks/delete")),
    Case(("POST", "/v1/cache/evict"), lambda e: Request("POST", "/v1/cache/evict", {"free_bytes": 16 << 20})),
    Case(("POST", "/v1/pins"), administer("POST", "/v1/pins", duration_s=600)),
    Case(("POST", "/v1/drain"), lambda e: Request("POST", "/v1/drain", {"is_drained": False})),
    Case(("PATCH", "/v1/config"), lambda e: Request("PATCH", "/v1/config", {"session_grants": 4096})),
]
OF_TIERS = ("POST", "/v1/tiers/clear"), ("POST", "/v1/peers/notes"), ("POST", "/v1/peers/reads")
"""tests/tiers/test_owned.py and tests/tiers/test_peers.py repeat them, at servers that have tiers."""
COUNTS = {"troubles", "chunks", "bytes", "quarantined"}
"""Fields that say what this call did, which for a repeat is nothing."""


def state(engine: Engine) -> dict[str, Any]:
    """All that a call can change: what the session holds, what it waits for, what is stored, what is given out."""
    address = engine.client.address
    status, session = call(address, "GET", f"/v1/sessions/{engine.session}")
    held = {name: session.get(name) for name in ("leases", "reservations", "held_bytes")}
    grants = [{**grant, "grant": "", "age_s": 0, "session": ""} for grant in session.get("grants", [])]
    peek = {"namespace": engine.attached.namespace, "keys": chain(engine)}
    stored = ok(address, "POST", "/v1/lookups", peek)["hit_tokens"]
    return {"attached": status, **held, "grants": grants, "hit_tokens": stored}


def finish(engine: Engine) -> None:
    call(engine.client.address, "DELETE", f"/v1/sessions/{engine.session}?member={engine.member}")
    call(engine.client.address, "POST", "/v1/cache/clear", {"namespace": engine.attached.namespace})
    engine.close()


def settled(answer: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """An answer without what differs from engine to engine and from moment to moment."""
    text = json.dumps({name: value for name, value in answer.items() if name not in COUNTS | {"age_s"}})
    for one in (engine.session, engine.member, engine.attached.namespace):
        text = text.replace(one, "")
    plain: dict[str, Any] = json.loads(text)
    for tenant in plain.get("tenants", {}).values():
        tenant.pop("used", None)  # namespaces of other tests go meanwhile
    ids = ("lease", "reservation", "grant", "segments", "filed_in", "parts")
    return {name: "" if name in ids else value for name, value in plain.items()}


def test_every_mutating_call_has_a_case() -> None:
    assert {case.route for case in CASES} == {route for route in CALLS if route[0] != "GET"} - {*OF_TIERS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case.route))
def test_a_call_whose_answer_was_lost_can_be_repeated(
    server: ServerProcess, client: Client, proxy: DroppingProxy, case: Case
) -> None:
    control, engine = (attach(client, model=unique("retry")) for _ in range(2))
    told = case.make(control)
    first_status, first = call(server.http, *told)
    assert first_status in (200, 204), first
    wanted = state(control)

    request = case.make(engine)
    proxy.drops, proxy.dropped = 1, 0
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        call(proxy.address, *request)
    assert proxy.dropped == 1, "the server never got the call"
    status, answer = call(proxy.address, *request)
    assert status == (case.repeat_status or first_status), answer
    if not case.repeat_status:
        assert settled(answer, engine) == settled(first, control)
    assert state(engine) == wanted
    assert call(server.http, *request)[0] == status, "a third time is no different"
    assert state(engine) == wanted
    finish(control)
    finish(engine)


def test_a_repeated_grant_is_the_same_grant(server: ServerProcess, client: Client, proxy: DroppingProxy) -> None:
    engine = attach(client, model=unique("retry"))
    reserving = Request("POST", "/v1/reservations", asker(engine, store="s", keys=chain(engine)))
    proxy.drops = 1
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        call(proxy.address, *reserving)
    once, again = (ok(proxy.address, *reserving) for _ in range(2))
    assert once == again and len(once["chunks"]) == 3
    shown = ok(server.http, "GET", f"/v1/sessions/{engine.session}")
    assert [grant["grant"] for grant in shown["grants"]] == [once["reservation"]], "a reservation was stranded"
    other = call(server.http, "POST", "/v1/reservations", asker(engine, store="s", keys=keys(1, "other")))
    assert other[1]["code"] == "id_reused"
    finish(engine)


def test_a_repeated_reservation_says_what_the_first_said_though_the_pool_has_changed() -> None:
    with ServerProcess(pool_bytes=1 << 20, segment_bytes=1 << 20, session_cap=0.25) as server, Client(
        server.unix
    ) as client:
        engine, other = attach(client), attach(client, instance="other")
        long = keys(40, "cut short")
        engine.store(long[:2])
        other_part = other.reserve(long[:3])
        first = engine.reserve(long, store="s")
        assert (first.limited_by, first.present, first.busy) == ("held_bytes", [0, 1], [2]) and first.chunks
        other.commit(other_part)
        ok(server.http, "POST", "/v1/chunks/delete", {"namespace": engine.attached.namespace, "keys": long[:1]})
        assert engine.reserve(long, store="s") == first
        engine.close()
        other.close()


@pytest.mark.parametrize("kind", ["unix", "http"])
def test_the_client_repeats_by_itself_and_strands_nothing(server: ServerProcess, kind: str) -> None:
    """A whole session, with every single answer lost once."""
    with DroppingProxy(getattr(server, kind)) as between, Client(between.address, access_token=OPERATOR) as client:
        between.drops = 1
        engine = attach(client, model=unique("retry"))
        calls = 1
        for step in (
            lambda: engine.heartbeat(),
            lambda: engine.store(chain(engine)),
            lambda: engine.lookup(chain(engine), request="r"),
        ):
            between.drops = 1
            step()
            calls += 1
        between.drops = 1
        found = client.lookup(Lookup(session=engine.session, member=engine.member, request="r", keys=chain(engine)))
        assert found.lease is not None and found.hit_tokens == 48
        between.drops = 1
        assert client.release(found.lease, ReleaseLease(session=engine.session, ranks=[0])).remaining == []
        assert between.dropped == calls + 2
        with Client(server.unix) as direct:
            shown = direct.session(engine.session)
            assert (shown.leases, shown.reservations, shown.held_bytes) == (0, 0, 0)
            direct.leave(engine.session, engine.member)
        engine.close()


def test_after_all_of_it_nothing_is_held(server: ServerProcess, client: Client) -> None:
    """Runs last: what the tests above left would show here."""
    def nothing_held() -> bool:
        status = client.status()
        pool = status.pool
        return (status.leases, status.reservations, pool.held_bytes, pool.quarantined_bytes, pool.reserved_bytes) == (
            0, 0, 0, 0, 0
        )

    eventually(nothing_held)
    assert raw(server.http, "GET", "/livez")[0] == 200
    assert "Traceback" not in Path(server.log_path).read_text()
