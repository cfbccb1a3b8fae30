"""What an engine process tells of requests that have ended: with its heartbeats, once each, and never in their way."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
from api_helpers import LATE_S, ServerProcess, eventually, manifest, soon, unique
from connector_helpers import Rig, continued, mortal, stopped, successor

from kvdock.client.client import Client
from kvdock.connectors.outcomes import MOST_KEPT, OutcomeBuffer
from kvdock.connectors.session import EngineSession, Identity
from kvdock.protocol import schemas as s
from kvdock.protocol.errors import ApiError, ServerUnavailable
from kvdock.protocol.outcomes import MAX_OUTCOMES, Copied, Outcome

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


class Server:
    """Takes heartbeats, or fails with `error`. `meanwhile` is called before it does."""

    def __init__(self) -> None:
        self.beats = list[s.Heartbeat]()
        self.error: Exception | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self, beat: s.Heartbeat) -> s.HeartbeatAnswer:
        self.beats.append(beat)
        self.meanwhile()
        if self.error is not None:
            raise self.error
        return s.HeartbeatAnswer(heartbeat_s=1.0, questions=[], segments=1)

    def gets(self, buffer: OutcomeBuffer) -> s.Heartbeat:
        """The next heartbeat."""
        buffer.send_with(s.Heartbeat(member="m"), self)
        return self.beats[-1]

    def fails(self, buffer: OutcomeBuffer, error: Exception) -> s.Heartbeat:
        self.error = error
        with pytest.raises(type(error)):
            self.gets(buffer)
        self.error = None
        return self.beats[-1]


def filled(count: int) -> OutcomeBuffer:
    buffer = OutcomeBuffer()
    for number in range(count):
        buffer.add(outcome(f"r{number}"))
    return buffer


def named(begin: int, end: int) -> list[str]:
    return [f"r{number}" for number in range(begin, end)]


def numbers(beats: Sequence[s.Heartbeat]) -> list[int]:
    return [one.number for beat in beats for one in beat.outcomes]


def test_a_heartbeat_has_the_oldest_and_the_next_ones_the_others_with_rising_numbers() -> None:
    buffer, server = filled(2 * MAX_OUTCOMES + SPARE), Server()
    for begin, end in ((0, 64), (64, 128), (128, 128 + SPARE)):
        assert buffer.has_more
        assert names(server.gets(buffer)) == named(begin, end)
    assert not buffer.has_more
    assert msgspec.msgpack.encode(server.gets(buffer)) == msgspec.msgpack.encode(s.Heartbeat(member="m"))
    told = numbers(server.beats)
    assert told[0] > 0 and told == sorted(set(told)) and len(told) == 128 + SPARE


def test_the_newest_8192_are_kept_and_the_others_counted() -> None:
    buffer, server = filled(MOST_KEPT + SPARE), Server()
    while buffer.has_more:
        server.gets(buffer)
    assert MOST_KEPT == 8192 and [beat.outcomes_dropped for beat in server.beats] == [SPARE] + [0] * 127
    assert [name for beat in server.beats for name in names(beat)] == named(SPARE, MOST_KEPT + SPARE)


def test_what_was_not_answered_is_told_again_with_its_numbers_and_before_what_ended_since() -> None:
    buffer, server = filled(MAX_OUTCOMES), Server()
    server.meanwhile = lambda: buffer.add(outcome("since"))
    lost = server.fails(buffer, ServerUnavailable("gone"))
    server.meanwhile = lambda: None
    again = server.gets(buffer)
    assert names(again) == names(lost) == named(0, MAX_OUTCOMES) and numbers([again]) == numbers([lost])
    last = server.gets(buffer)
    assert names(last) == ["since"] and numbers([last]) > numbers([again])[-1:]


def test_copies_that_were_not_answered_are_reported_with_the_later_ones() -> None:
    buffer, server = OutcomeBuffer(), Server()
    buffer.ceiling_bytes_per_s = lambda: 7e9
    buffer.loaded(1000, 0.5)
    buffer.stored(300, 0.25)
    server.meanwhile = lambda: buffer.loaded(50, 0.125)
    server.fails(buffer, ServerUnavailable("gone"))
    server.meanwhile = lambda: None
    assert server.gets(buffer).copied == Copied(
        load_bytes=1050, load_us=625_000, store_bytes=300, store_us=250_000, ceiling_bytes_per_s=7e9
    )
    assert server.gets(buffer).copied is None


def test_a_full_buffer_to_which_a_heartbeat_returns_loses_the_oldest_and_counts_them() -> None:
    buffer, server = filled(MOST_KEPT), Server()

    def more_end() -> None:
        for number in range(MAX_OUTCOMES + SPARE):
            buffer.add(outcome(f"r{MOST_KEPT + number}"))

    server.meanwhile = more_end
    server.fails(buffer, ServerUnavailable("gone"))
    server.meanwhile = lambda: None
    lost = MAX_OUTCOMES + SPARE
    again = server.gets(buffer)
    assert (again.outcomes_dropped, names(again)) == (lost, named(lost, lost + MAX_OUTCOMES))
    told = numbers(server.beats[1:])
    assert told == sorted(told)


def test_what_the_server_refuses_is_not_told_again() -> None:
    buffer, server, count = filled(2 * MAX_OUTCOMES), Server(), itertools.count()
    server.meanwhile = lambda: buffer.add(outcome(f"late-{next(count)}"))
    server.fails(buffer, ApiError("unknown_session", "it has ended"))
    assert names(server.fails(buffer, ServerUnavailable("gone"))) == named(MAX_OUTCOMES, 2 * MAX_OUTCOMES)
    refused = server.fails(buffer, ApiError("invalid_body", "a server that knows no outcomes"))
    assert names(refused) == named(MAX_OUTCOMES, 2 * MAX_OUTCOMES) and refused.outcomes_dropped == 0
    buffer.add(outcome("r"))
    assert names(server.fails(buffer, ApiError("unknown_session", "it has ended"))) == []
    assert not buffer.has_more, "its heartbeats would be refused for ever"


def test_a_backlog_is_told_in_one_go() -> None:
    """A heartbeat carries few, and the next ones would be seconds later."""
    with ServerProcess(heartbeat_s=1.0) as slow, Rig(slow.unix) as rig:
        session, heard = rig.connector.session, list[tuple[int, float]]()
        heartbeat = session.client.heartbeat

        def noted(id: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
            if body.outcomes:
                heard.append((len(body.outcomes), time.monotonic()))
            return heartbeat(id, body)

        session.client.heartbeat = noted  # type: ignore[method-assign,assignment]  # the real one
        for number in range(3 * MAX_OUTCOMES):
            session.outcomes.add(outcome(f"r{number}"))
        eventually(lambda: sum(count for count, _ in heard) == 3 * MAX_OUTCOMES)
        assert [count for count, _ in heard] == [MAX_OUTCOMES] * 3
        assert heard[-1][1] - heard[0][1] < 1.0


def test_an_engine_that_leaves_tells_all_that_is_left() -> None:
    with ServerProcess(heartbeat_s=60.0, missed_heartbeats=100) as slow, Client(slow.unix) as client:
        with Rig(slow.unix) as rig:
            for number in range(3 * MAX_OUTCOMES + 1):
                rig.connector.session.outcomes.add(outcome(f"r{number}"))
        assert client.status().counters["outcomes"] == 3 * MAX_OUTCOMES + 1


def test_what_the_server_has_heard_counts_once_although_its_answer_was_lost(quick: ServerProcess) -> None:
    with Rig(quick.unix) as rig, Client(quick.unix) as client:
        before, heard, name = client.status().counters, list[int](), unique("once")
        told = rig.connector.session.client
        heartbeat = told.heartbeat

        def loses(id: str, body: s.Heartbeat) -> s.HeartbeatAnswer:
            answer = heartbeat(id, body)
            if body.outcomes:
                heard.append(body.outcomes[0].number)
                if len(heard) == 1:
                    raise ServerUnavailable("the answer was lost")
            return answer

        told.heartbeat = loses  # type: ignore[method-assign,assignment]  # the real one
        rig.connector.session.outcomes.add(outcome(name))
        eventually(lambda: len(heard) == 2)
        assert heard[0] == heard[1]
        after = client.status().counters
        assert [after[one] - before[one] for one in ("outcomes", "prompt_tokens", "loaded_tokens")] == [1, 100, 64]
        assert len(client.requests(request=name).requests) == 1


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
    while buffer.has_more:
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
