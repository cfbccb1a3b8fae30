"""What an engine process tells of requests that have ended: with its heartbeats, the newest, and never in their way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest
from api_helpers import LATE_S, ServerProcess, eventually, manifest, soon, unique
from connector_helpers import Rig, continued, mortal, stopped, successor

from kvdock.client.client import Client
from kvdock.connectors.outcomes import OutcomeBuffer
from kvdock.connectors.session import EngineSession, Identity
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.outcomes import MAX_OUTCOMES, Outcome

SPARE = 40


def outcome(request: str) -> Outcome:
    return Outcome(request=request, prompt_tokens=100, found_tokens=64, loaded_tokens=64)


def names(beat: s.Heartbeat) -> list[str]:
    return [one.request for one in beat.outcomes]


@pytest.fixture(scope="module")
def quick() -> Iterator[ServerProcess]:
    with ServerProcess(heartbeat_s=0.1, recent_requests=4096) as server:
        yield server


def test_a_request_that_ended_is_told_with_the_next_heartbeat(quick: ServerProcess) -> None:
    with Rig(quick.unix) as rig, Client(quick.unix) as client:
        name = unique("ended")
        rig.connector.scheduler.ended(outcome(name))
        eventually(lambda: [one.kind for one in client.requests(request=name).requests] == ["ended"])
        view = client.requests(request=name).requests[0]
        assert view.outcome is not None and view.outcome.loaded_tokens == 64


def test_of_more_than_a_heartbeat_holds_the_newest_are_told_and_the_others_counted() -> None:
    buffer, beats = OutcomeBuffer(), list[s.Heartbeat]()

    def answered(beat: s.Heartbeat) -> s.HeartbeatAnswer:
        beats.append(beat)
        return s.HeartbeatAnswer(heartbeat_s=1.0, questions=[], segments=1)

    for number in range(MAX_OUTCOMES + SPARE):
        buffer.add(outcome(f"r{number}"))
    for _ in range(2):
        buffer.send_with(s.Heartbeat(member="m"), answered)
    assert names(beats[0]) == [f"r{number}" for number in range(SPARE, MAX_OUTCOMES + SPARE)]
    assert [beat.outcomes_dropped for beat in beats] == [SPARE, 0] and names(beats[1]) == []
    assert msgspec.msgpack.encode(beats[1]) == msgspec.msgpack.encode(s.Heartbeat(member="m"))


def test_what_nobody_heard_is_told_again_and_what_the_server_refuses_is_not() -> None:
    buffer, beats = OutcomeBuffer(), list[s.Heartbeat]()

    def fail(error: Exception) -> None:
        def send(beat: s.Heartbeat) -> s.HeartbeatAnswer:
            beats.append(beat)
            for number in range(SPARE):  # more end meanwhile
                buffer.add(outcome(f"late-{number}"))
            raise error

        with pytest.raises(type(error)):
            buffer.send_with(s.Heartbeat(member="m"), send)

    for number in range(MAX_OUTCOMES):
        buffer.add(outcome(f"r{number}"))
    fail(ServerUnavailable("gone"))
    fail(ApiError("unknown_session", "it has ended"))
    assert names(beats[1]) == [f"r{number}" for number in range(SPARE, MAX_OUTCOMES)] + [
        f"late-{number}" for number in range(SPARE)
    ]
    assert beats[1].outcomes_dropped == SPARE
    fail(ApiError("invalid_body", "a server that knows no outcomes"))
    assert names(beats[2]) == [f"late-{number}" for number in range(SPARE)] and beats[2].outcomes_dropped == 0
    buffer.add(outcome("r"))
    fail(ApiError("unknown_session", "it has ended"))
    assert names(beats[3]) == [], "its heartbeats would be refused for ever"


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_the_server_would_refuse_costs_no_heartbeat(quick: ServerProcess, name: str) -> None:
    with Rig(quick.unix) as rig, Client(quick.unix) as client:
        before, known = client.status().counters["dropped_outcomes"], unique("beside")
        for one in (name, known):
            rig.connector.session.outcomes.add(outcome(one))
        eventually(lambda: client.status().counters["dropped_outcomes"] == before + 1)
        assert client.requests(request=known).requests


def test_a_server_without_this_field_loses_no_engine(
    quick: ServerProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(quick.unix) as rig:
        client, attachment = rig.connector.session.client, rig.attachment
        heartbeat, heard = client.heartbeat, []

        def older(session: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
            if body.outcomes:
                raise ApiError("invalid_body", "Object contains unknown field `outcomes`")
            heard.append(body)
            return heartbeat(session, body)

        monkeypatch.setattr(client, "heartbeat", older)  # as a server answers that does not know the field
        for number in range(5):
            rig.connector.session.outcomes.add(outcome(f"r{number}"))
            heard.clear()
            eventually(lambda: bool(heard))
        assert rig.connector.session.attachment is attachment
        assert caplog.text.count("the server does not take the outcomes of requests") == 1


def test_what_ended_while_the_server_was_gone_is_told_to_the_next() -> None:
    with mortal(heartbeat_s=0.1) as server, Rig(server.unix) as rig:
        first = rig.attachment
        server.stop(signal.SIGKILL)
        eventually(lambda: rig.connector.session.attachment is None)
        rig.connector.session.outcomes.add(outcome("meanwhile"))
        with successor(server), Client(server.unix) as client:
            eventually(lambda: rig.connector.session.attachment not in (None, first))
            eventually(lambda: bool(client.requests(request="meanwhile").requests))


def test_a_stopped_server_holds_nobody_up_that_tells() -> None:
    with mortal(heartbeat_s=0.1) as server, Rig(server.unix, timeout_s=LATE_S) as rig:
        client, begun, ended = rig.connector.session.client, list[s.Heartbeat](), list[s.Heartbeat]()
        heartbeat = client.heartbeat

        def noted(session: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
            begun.append(body)
            try:
                return heartbeat(session, body)
            finally:
                ended.append(body)

        client.heartbeat = noted  # type: ignore[method-assign,assignment]  # the real one
        eventually(lambda: bool(begun))
        stopped(server)
        try:
            eventually(lambda: len(begun) > len(ended))
            with soon():  # while a heartbeat waits for the server
                for number in range(10_000):
                    rig.connector.scheduler.ended(outcome(f"r{number}"))
        finally:
            continued(server)
        eventually(lambda: rig.connector.session.attachment is not None)


def test_threads_lose_nothing_between_them() -> None:
    buffer, told, counted = OutcomeBuffer(), [], 0
    stop = threading.Event()

    def keep(beat: s.Heartbeat) -> s.HeartbeatAnswer:
        nonlocal counted
        told.extend(names(beat))
        counted += beat.outcomes_dropped
        return s.HeartbeatAnswer(heartbeat_s=1.0, questions=[], segments=1)

    def tell() -> None:
        while not stop.is_set():
            buffer.send_with(s.Heartbeat(member="m"), keep)

    teller = threading.Thread(target=tell)
    teller.start()
    for number in range(20_000):
        buffer.add(outcome(f"{number}"))
    stop.set()
    teller.join()
    buffer.send_with(s.Heartbeat(member="m"), keep)
    assert told == sorted(told, key=int) and len(set(told)) == len(told)
    assert len(told) + counted == 20_000


def test_a_session_of_several_processes_tells_through_any_of_them(quick: ServerProcess) -> None:
    name = unique("rank 1")
    session = EngineSession(
        Client(quick.unix), manifest(), Identity(unique("instance"), unique("member"), ranks=(1,), scheduler=False)
    )
    session.start()
    session.outcomes.add(outcome(name))
    with Client(quick.unix) as client:
        eventually(lambda: bool(client.requests(request=name).requests))
    session.close()
    session.client.close()
