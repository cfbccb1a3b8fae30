"""vLLM's reset at the server: this namespace goes and no other, and what is published late is not found."""

from __future__ import annotations

import logging
import signal
import time

import pytest
from adoption_helpers import next_at
from api_helpers import PATIENCE_S, ServerProcess
from connector_helpers import PER_CHUNK, Rig, mortal, tokens_of

from kvdock.connectors.session import EngineSession
from kvdock.connectors.vllm.resets import Clearing
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Commit, PartDone, Reserve

TOKENS = tokens_of(1, 2)
HIT = len(TOKENS)


def hit(rig: Rig, request: str) -> int:
    found = rig.lookup(request, TOKENS)
    rig.connector.finished(request)
    return found


def store(rig: Rig, request: str) -> None:
    rig.store(request, TOKENS, range(2 * PER_CHUNK))


def over(clearing: Clearing) -> bool:
    return clearing.is_over


def session(rig: Rig) -> EngineSession:
    return rig.connector.session


def test_one_namespace_is_cleared_and_no_other(server: ServerProcess) -> None:
    with Rig(server.unix) as rig, Rig(server.unix, salt="other") as other:
        for one in (rig, other):
            store(one, "a")
            assert hit(one, "b") == HIT
        clearing = Clearing(session(rig))
        assert over(clearing)
        assert clearing.ask() and over(clearing)
        assert hit(rig, "c") == 0 and hit(other, "c") == HIT


def test_what_was_being_stored_is_not_published_after_the_reset(server: ServerProcess) -> None:
    with Rig(server.unix) as rig:
        attachment = session(rig).attachment
        assert attachment is not None
        granted = session(rig).client.reserve(Reserve(
            session=attachment.session, member=attachment.member, store="begun", keys=bytes(range(32))
        ))
        assert granted.reservation is not None
        clearing = Clearing(session(rig))
        assert clearing.ask() and over(clearing)
        parts = [PartDone(chunk.index, part.group, 7) for chunk in granted.chunks for part in chunk.parts]
        with pytest.raises(ApiError) as refused:
            session(rig).client.commit(
                granted.reservation, Commit(session=attachment.session, rank=0, parts=parts)
            )
        assert refused.value.code == "grant_closed"


def test_a_server_that_is_gone_is_cleared_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with mortal() as server, Rig(server.unix) as rig:
        store(rig, "a")
        clearing = Clearing(session(rig))
        server.stop(signal.SIGKILL)
        assert not clearing.ask() and not over(clearing)
        assert "kvdock clear" in caplog.text
        with next_at(server) as restarted:
            until = time.monotonic() + PATIENCE_S
            while session(rig).attachment is None:
                assert time.monotonic() < until, restarted.log_text()
                rig.poll()
            assert hit(rig, "b") == HIT, "the pool was not taken over: the test shows nothing"
            assert clearing.starts_again()
            clearing.again()
            assert over(clearing) and hit(rig, "c") == 0


def test_nothing_is_tried_while_no_server_is_there() -> None:
    with mortal() as server, Rig(server.unix) as rig:
        clearing = Clearing(session(rig))
        server.stop(signal.SIGKILL)
        assert not clearing.ask()
        assert session(rig).attachment is None and not over(clearing) and not clearing.starts_again()


def test_what_fails_is_tried_again_after_a_pause_that_doubles_and_is_logged_once(
    server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    with Rig(server.unix) as rig:
        clearing = Clearing(session(rig), clock=lambda: now_s)
        known = rig.attachment.filed_in

        def pauses(count: int) -> list[float]:
            """After each of so many tries, until the next one; steps of vLLM are a hundredth of a second apart."""
            nonlocal now_s
            found = []
            for _ in range(count):
                assert clearing.starts_again()
                clearing.again()
                ended_s = now_s
                while not clearing.starts_again():
                    now_s += 0.01
                found.append(round(now_s - ended_s, 1))
                clearing._running = False  # as if that try, which we only waited for, had not begun
            return found

        rig.attachment.filed_in = bytes(32)  # which the server refuses: it has never heard of it
        assert not clearing.ask()
        assert pauses(8) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
        assert caplog.text.count("cannot clear namespace") == 1
        assert not clearing.ask(), "somebody asks anew"
        assert pauses(2) == [0.1, 0.2]
        assert caplog.text.count("cannot clear namespace") == 2

        rig.attachment.filed_in = known
        assert clearing.starts_again()
        clearing.again()
        assert over(clearing) and not clearing.starts_again()


def test_others_who_share_it_are_named(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvdock.vllm")
    with Rig(server.unix, instance="mine") as rig, Rig(server.unix, salt="other", instance="apart"):
        clearing = Clearing(session(rig))
        clearing.warn_of_others()
        assert not caplog.text
        with Rig(server.unix, instance="neighbour"):
            clearing.warn_of_others()
    assert "neighbour" in caplog.text and "mine" not in caplog.text and "apart" not in caplog.text
