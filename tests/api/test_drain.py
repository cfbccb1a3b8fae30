"""A server that an operator has drained gives out nothing new, and stays up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from api_helpers import ServerProcess, access_file, attach, eventually, keys, raw
from cli_helpers import KVDOCK, TIMEOUT_S, clean_environ, kvdock, refusal

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import Drained, DrainServer
from kvdock.protocol.errors import ApiError
from kvdock.protocol.outcomes import Outcome
from kvdock.protocol.schemas import Hold, Lookup

ON, OFF = DrainServer(is_drained=True), DrainServer(is_drained=False)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.unix) as client:
        yield client


@pytest.mark.parametrize("packed", [True, False])
def test_a_drained_server_gives_out_nothing_and_lets_what_is_open_finish(server: ServerProcess, packed: bool) -> None:
    with Client(server.unix, packed=packed) as client, closing(attach(client)) as engine:
        engine.store(keys(2, "there"))
        lease, coming = engine.lookup(keys(2, "there")).lease, engine.reserve(keys(1, "coming"), store="coming")
        assert client.drain(ON) == client.drain(ON) == Drained(is_drained=True, leases=1, reservations=1)
        missed = engine.lookup(keys(2, "there"), request="another")
        assert (missed.hit_tokens, missed.lease, missed.chunks, missed.limited_by) == (0, None, [], "draining")
        short = engine.reserve(keys(1, "more"), store="more")
        assert (short.reservation, short.present, short.chunks, short.limited_by) == (None, [], [], "draining")
        held = client.hold(Hold(session=engine.session, member=engine.member, request="h", keys=keys(2, "there")))
        assert (held.lease, held.is_limited, held.chunks) == (None, True, [[], []])
        with closing(attach(client, model="another")) as newcomer:
            assert newcomer.lookup(keys(1)).limited_by == "draining", "an engine may start meanwhile"
        assert engine.lookup(keys(2, "there")).lease == lease, "what it has been given is still its own"
        assert engine.reserve(keys(1, "coming"), store="coming").reservation == coming.reservation
        assert engine.commit(coming).ready == 1 and engine.release(lease, 0) == []
        assert (client.status().leases, client.status().reservations) == (0, 0)
        peek = Lookup(namespace=engine.attached.namespace, keys=keys(2, "there"))
        assert client.lookup(peek).hit_tokens == 32, "what is stored stays"


def test_everybody_is_told_and_undrain_ends_it(server: ServerProcess, client: Client) -> None:
    with closing(attach(client)) as engine:
        engine.store(keys(1))
        client.drain(ON)
        assert raw(server.http, "GET", "/readyz")[::2] == (503, b'{"status":"not ready","reasons":["draining"]}')
        assert raw(server.http, "GET", "/livez")[0] == 200 and client.status().reasons == ["draining"]
        verdict = client.verdict()
        assert (verdict.effect, verdict.findings[0].remedy) == ("not_ready", "kvdock undrain")
        assert "drained" in verdict.headline and "operator" in verdict.findings[0].text
        assert client.drain(OFF) == Drained(is_drained=False, leases=0, reservations=0)
        assert raw(server.http, "GET", "/readyz")[0] == 200 and "drained" not in client.verdict().headline
        assert engine.lookup(keys(1), request="after").hit_tokens == 16
        assert engine.reserve(keys(1, "after")).limited_by is None


def test_what_engines_compute_meanwhile_has_that_reason(client: Client) -> None:
    with closing(attach(client)) as engine:
        engine.store(keys(2))
        client.drain(ON)
        engine.lookup(keys(2), request="r")
        engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=33)])
        outcome = client.requests(request="r").requests[0].outcome
        assert outcome is not None
        assert [(run.tokens, run.why) for run in outcome.runs] == [(32, "draining"), (1, "tail")]


def test_what_a_server_had_while_it_was_drained_was_not_waited_for(client: Client) -> None:
    with closing(attach(client)) as engine:
        engine.store(keys(2))
        client.drain(ON)
        assert engine.lookup(keys(2), request="r").hit_tokens == 0
        client.drain(OFF)
        assert engine.lookup(keys(2), request="r").hit_tokens == 32
        engine.heartbeat(outcomes=[Outcome(request="r", prompt_tokens=33, found_tokens=32, loaded_tokens=32)])
        outcome = client.requests(request="r").requests[0].outcome
        assert outcome is not None
        assert [(run.tokens, run.source or run.why) for run in outcome.runs] == [(32, "memory"), (1, "tail")]


@pytest.mark.security
def test_only_operators_drain(tmp_path: Path) -> None:
    token = "engine-" + "e" * 40
    path = access_file(tmp_path, entry("engine", token, ["engine"], "a"))
    with ServerProcess(access_file=str(path)) as server, Client(server.http, access_token=token) as engine:
        with pytest.raises(ApiError, match="forbidden"):
            engine.drain(ON)
        assert raw(server.http, "GET", "/readyz")[0] == 200


def test_a_drain_does_not_outlive_its_server(tmp_path: Path) -> None:
    settings = {"socket_path": str(tmp_path / "kvdock.sock"), "on_exit": "keep"}
    with ServerProcess(**settings) as first, Client(first.unix) as client:
        client.drain(ON)
    with ServerProcess(**settings) as second, Client(second.unix) as client:
        assert client.status().status == "ok"


def test_the_command_waits_until_nothing_is_open(server: ServerProcess, client: Client) -> None:
    with closing(attach(client)) as engine:
        engine.store(keys(1))
        lease = engine.lookup(keys(1)).lease
        assert "1 lease and 0 reservations" in kvdock("drain", "--server", server.unix).stdout
        waiting = subprocess.Popen(
            [*KVDOCK, "drain", "--wait", "--json", "--server", server.unix], env=clean_environ(),
            stdout=subprocess.PIPE, text=True,
        )
        eventually(lambda: server.log_text().count("POST /v1/drain") == 2)
        assert waiting.poll() is None, "a lease is open"
        engine.release(lease, 0)
        said, _ = waiting.communicate(timeout=TIMEOUT_S)
        assert json.loads(said) == {"is_drained": True, "leases": 0, "reservations": 0}
        assert "gives out slots again" in kvdock("undrain", "--server", server.unix).stdout
        assert raw(server.http, "GET", "/readyz")[0] == 200


def test_the_command_does_not_wait_for_a_drain_that_somebody_ends(server: ServerProcess, client: Client) -> None:
    with closing(attach(client)) as engine:
        engine.store(keys(1))
        engine.lookup(keys(1))
        waiting = subprocess.Popen(
            [*KVDOCK, "drain", "--wait", "--server", server.unix], env=clean_environ(), stderr=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: "draining" in client.status().reasons)
        client.drain(OFF)
        _, said = waiting.communicate(timeout=TIMEOUT_S)
        assert (waiting.returncode, said.startswith("kvdock: somebody has ended the drain")) == (1, True)


def test_a_server_that_ends_is_not_brought_back(tmp_path: Path) -> None:
    with ServerProcess(drain_s=60.0) as server, Client(server.unix) as client, closing(attach(client)) as engine:
        engine.store(keys(1))
        lease = engine.lookup(keys(1)).lease
        server.process.send_signal(15)
        eventually(lambda: client.status().reasons == ["draining"])
        assert "about to end" in refusal(kvdock("undrain", "--server", server.unix), 1)
        assert engine.lookup(keys(1), request="more").limited_by == "draining"
        engine.release(lease, 0)
