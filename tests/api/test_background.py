"""Background work of the server that fails is logged with its cause, is a finding, and goes on."""

from __future__ import annotations

import ast
import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from api_helpers import ServerProcess, attach, eventually, keys
from kv_readers import Belief, ZmqReader, endpoints
from paths import ROOT
from tier_engine import TierEngine, manifest
from tier_server import PART, SETTINGS, is_served

from kvdock.api import background
from kvdock.api.background import Background
from kvdock.api.feeds.kv import KvLog
from kvdock.api.feeds.kv_zmq import KvZmq
from kvdock.api.record.journal import Journal
from kvdock.api.tiers.mover_client import MoverClient
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.kv_events import block_hash

ALLOWED = {
    ("background.py", "create_task"), ("background.py", "Thread"),
    ("server.py", "create_task"),  # the keeper, whose failure ends the server
    ("keeper.py", "create_task"),  # the pulse, which only reads a clock
    # calls wait for these, and get their errors
    ("reports/metrics.py", "create_task"), ("reports/contents.py", "create_task"),
    ("http/routes_people.py", "create_task"), ("http/wire.py", "create_task"),
    ("tiers/process.py", "create_task"),  # its failure ends the mover, and another one is started
    ("feeds/traces.py", "Thread"),  # at the end of the server
    ("pool/segments.py", "Thread"),  # writes zeros, whose failure is a segment that is not prefaulted
}


def fails_once(owner: type, name: str) -> None:
    """Its next call that has something to do fails after it has taken it."""
    whole: Callable[..., Any] = getattr(owner, name)
    failed: list[str] = []

    @wraps(whole)
    def broken(self: Any, *args: Any) -> Any:
        if not failed and all(args):
            failed.append(name)
            raise RuntimeError(f"broken on purpose in {name}")
        return whole(self, *args)

    setattr(owner, name, broken)


def broken() -> None:
    fails_once(KvLog, "_take")
    fails_once(KvZmq, "_framed")
    fails_once(Journal, "_hand_out")


class BrokenServer(ServerProcess):
    before = partial(broken)


def test_kv_events_and_the_journal_go_on_after_a_failure_which_is_named() -> None:
    with BrokenServer(**endpoints()) as server, Client(server.unix) as client:
        engine, chains = attach(client), [keys(2, "a"), keys(2, "b")]
        wanted = {block_hash(bytes.fromhex(key)) for chain in chains for key in chain}
        reader = ZmqReader(server)
        for number, chain in enumerate(chains):
            body = s.Reserve(session=engine.session, member=engine.member, store=f"{number}", keys=chain)
            granted = client.reserve(body)
            assert granted.reservation is not None
            parts = [s.PartDone(one.index, 0, 7) for one in granted.chunks]
            client.commit(granted.reservation, s.Commit(session=engine.session, rank=0, parts=parts))

        def is_whole() -> bool:
            answers = reader.ask(0)
            return bool(answers) and Belief().hear([event for _, _, events in answers for event in events]) == wanted

        works = ("following KV events", "publishing KV events", "handing out events")
        said = [f"{work} failed (RuntimeError: broken on purpose" for work in works]
        eventually(lambda: all(one in server.log_text() for one in said), 60.0)
        eventually(is_whole, 60.0)
        reader.close()
        log = server.log_text()
        assert all(log.count(f"{work} failed") == 1 for work in works) and log.count("Traceback") == len(works)
        (finding,) = client.verdict().findings
        assert (finding.code, finding.severity) == ("server_failed", "bad")
        assert "broken on purpose" in finding.text and client.acknowledge().troubles == len(works)
        assert client.verdict().findings == []
        engine.leave()


def without_updates() -> None:
    fails_once(MoverClient, "next_update")


class ServerWithoutUpdates(ServerProcess):
    before = partial(without_updates)


def test_a_mover_that_gets_no_updates_is_started_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "disk_path": str(tmp_path / "disk")}
    with ServerWithoutUpdates(**settings) as server, Client(server.unix) as client:
        engine = TierEngine(server.unix, manifest(PART))
        is_served(server, 1)
        engine.store(engine.chain(4))
        eventually(lambda: client.status().tiers[0].objects == 4, 60.0)
        engine.close()
        log = server.log_text()
        assert log.count("the mover of lower tiers gets no updates") == 1 and "broken on purpose in next_update" in log


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(background, "LONGEST_RETRY_S", 0.002)


@pytest.mark.usefixtures("quick")
def test_a_cause_that_comes_again_is_logged_once_and_another_one_too(caplog: pytest.LogCaptureFixture) -> None:
    reported, left = list[str](), ["first", "first", "second", "first"]

    async def run() -> None:
        if left:
            raise ValueError(left.pop(0))

    async def story() -> None:
        made = Background(reported.append)
        made.begin("work", run)
        await made._begun[0]
        await made.once("a piece", run())
        left.append("third")
        await made.once("a piece", run())
        await made.end()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert reported == [f"work, ValueError: {what}" for what in ("first", "first", "second", "first")] + [
        "a piece, ValueError: third"
    ]
    assert [record.getMessage() for record in caplog.records] == [
        *(f"work failed (ValueError: {what}): it begins again" for what in ("first", "second", "first")),
        "a piece failed (ValueError: third): the server goes on without",
    ]


@pytest.mark.usefixtures("quick")
def test_a_thread_goes_on_until_it_is_to_end() -> None:
    reported, ending, tries = list[str](), threading.Event(), 0

    def run() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            ending.set()
        raise OSError("no")

    thread = Background(reported.append).thread("work", run, ending)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive() and reported == ["work, OSError: no"] * 3


def test_no_other_work_of_the_server_runs_unwatched() -> None:
    api = ROOT / "kvdock/api"
    found = {
        (str(path.relative_to(api)), name) for path in sorted(api.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        for name in [node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")]
        if name in ("create_task", "ensure_future", "Thread")
    }
    assert found == ALLOWED
