"""An engine's session says which weights it runs: at once, or once the server is back, in its own thread."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

import pytest
from admin_helpers import ok
from adoption_helpers import next_at
from api_helpers import LATE_S, ServerProcess, attach, eventually, keys, manifest, soon, unique
from connector_helpers import continued, mortal, stopped

from kvdock.client.client import Client
from kvdock.connectors.session import EngineSession, Identity
from kvdock.connectors.vllm.resets import Clearing
from kvdock.protocol import schemas as s
from kvdock.protocol.keys import filed_in

pytestmark = pytest.mark.weights


def session_at(client: Client, *, scheduler: bool = True, ranks: tuple[int, ...] = (0,)) -> EngineSession:
    return EngineSession(
        client, manifest(revision="weights"), Identity(unique("engine"), unique("member"), ranks, scheduler)
    )


def is_filed(client: Client, session: EngineSession, weights: str) -> Callable[[], bool]:
    def claim() -> bool:
        rows = [one for one in client.sessions().sessions if one.instance == session.identity.instance]
        return bool(rows) and rows[0].weights == weights

    return claim


def test_the_server_is_told_in_the_background_and_only_of_the_last() -> None:
    with ServerProcess(heartbeat_s=60.0) as server, Client(server.unix) as client:
        session = session_at(client)
        session.start()
        attachment = session.attachment
        assert attachment is not None and attachment.filed_in == attachment.namespace
        for step in range(50):
            session.runs(f"step-{step}")
        eventually(is_filed(client, session, "step-49"))
        eventually(lambda: attachment.weights == "step-49")
        assert attachment.filed_in == filed_in(attachment.namespace, "step-49")
        session.runs("")
        eventually(lambda: attachment.filed_in == attachment.namespace)
        session.close()


def test_saying_it_waits_for_no_server() -> None:
    with mortal() as server, Client(server.unix, timeout_s=LATE_S) as client:
        session = session_at(client)
        session.start()
        stopped(server)
        try:
            with soon():
                session.runs("step-1")
        finally:
            continued(server)
        eventually(is_filed(client, session, "step-1"))
        session.close()


def test_a_session_that_attaches_later_or_again_says_what_its_engine_runs_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mortal() as server, Client(server.unix) as client:
        told: list[str] = []
        real = client.weights

        def weights(body: s.RunWeights) -> s.WeightsAnswer:
            told.append(body.weights)
            return real(body)

        monkeypatch.setattr(client, "weights", weights)
        session = session_at(client)
        session.runs("step-1")
        session.start()
        assert is_filed(client, session, "step-1")()
        server.stop(signal.SIGKILL)
        session.runs("step-2")
        with next_at(server):
            eventually(lambda: session.attachment is not None)
            eventually(is_filed(client, session, "step-2"))
            attachment = session.attachment
            assert attachment is not None and attachment.filed_in == filed_in(attachment.namespace, "step-2")
            session.close()
        assert "step-1" not in told, "attaching says it"


def test_what_the_server_refuses_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess(heartbeat_s=0.05) as server, Client(server.unix) as client:
        session = session_at(client)
        session.start()
        other = attach(client, revision="weights")
        ok(server.unix, "PATCH", "/v1/config", {"tenants": {"": {"namespaces": 1}}})
        with caplog.at_level(logging.WARNING, "kvdock.connector"):
            session.runs("step-1")
            eventually(lambda: "does not take the weights" in caplog.text)
            ok(server.unix, "PATCH", "/v1/config", {"tenants": {"": {"namespaces": 4}}})
            eventually(is_filed(client, session, "step-1"))
        assert caplog.text.count("does not take the weights") == 1
        session.close()
        other.close()


def test_a_worker_s_session_says_nothing() -> None:
    with ServerProcess(heartbeat_s=0.05) as server, Client(server.unix) as client:
        session = session_at(client, scheduler=False)
        session.runs("step-1")
        session.start()
        attachment = session.attachment
        assert attachment is not None
        session.report_weights(attachment)
        assert attachment.filed_in == attachment.namespace
        assert is_filed(client, session, "")()
        session.close()


def test_a_name_that_is_too_long_is_refused_at_once() -> None:
    with ServerProcess() as server, Client(server.unix) as client:
        session = session_at(client)
        with pytest.raises(ValueError, match="129 characters, wanted at most 128"):
            session.runs("x" * 129)
        session.close()


def test_a_reset_clears_what_the_weights_of_now_find() -> None:
    with ServerProcess(heartbeat_s=60.0) as server, Client(server.unix) as client:
        session = session_at(client)
        session.start()
        other = attach(client, revision="weights")
        kept, cleared = keys(2, "kept"), keys(2, "cleared")
        other.store(kept)
        client.weights(s.RunWeights(session=other.session, member=other.member, weights="step-1"))
        other.store(cleared)
        session.runs("step-1")
        assert Clearing(session).ask()
        assert other.lookup(cleared, "r1").hit_tokens == 0
        client.weights(s.RunWeights(session=other.session, member=other.member, weights=""))
        assert other.lookup(kept, "r2").hit_tokens == 32
        session.close()
        other.close()
