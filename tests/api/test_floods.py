"""One client that floods the server stops no engine: they go on finding what is stored, and nothing is lost.

An engine looks up resident keys while a flood of bench/floods/kinds.py comes from another process. How much slower
lookups are is for `python -m bench.floods` to measure: here they must only go on, on a machine that is busy too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NamedTuple

import pytest
from api_helpers import MIB, OPERATOR, ServerProcess, eventually
from flood_helpers import request, until_closed
from forks import forked, preload

from bench.floods.honest import KEYS, Latencies, descriptors, honest, most_memory_mib
from bench.floods.kinds import BY_HAND, Target, prepared
from bench.serving import Engine, chain
from kvdock.client.client import Client
from kvdock.protocol.calls import INCLUDED

pytestmark = [pytest.mark.security, pytest.mark.alone]
preload("bench.floods.kinds")

SECONDS = 0.5
LONGEST_MS = 1000.0
"""Floods held all engines for as long and longer before there were limits, for seconds in some cases."""
TRIES = 3
"""The least of several counts: a busy machine keeps a lookup for as long now and then, a flood does so every time."""
GROWTH_MIB = 100.0
"""What the server takes more than before the floods, at most. It is forked from a large process here: python -m
bench.floods has all that a server takes."""


LIKE_ANOTHER = {
    "endless_url", "strangers_read", "strangers_unread", "connect_close", "crowd_ends", "docs", "metrics",
    "metrics_of_sessions", "events_followed", "events_unread", "kv_snapshots", "done", "largest_heartbeat",
    "lookups_4096", "lookups_unix", "blocks", "blocks_json", "blocks_legal", "blocks_unix",
}
"""The limit that holds them holds another one here, too: they run with --sweeps."""


class Rig(NamedTuple):
    server: ServerProcess
    engine: Engine
    keys: bytes
    began_mib: float


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(pool_bytes=16 * MIB))
        client = stack.enter_context(Client(server.unix, timeout_s=30.0))
        engine, keys = Engine(client, "honest"), chain(KEYS, "flooded")
        engine.store(keys)
        honest(engine, keys, 0.2, server.process.pid)
        yield Rig(server, engine, keys, most_memory_mib(server.process.pid))
        engine.close()


def beside(name: str, target: Target, rig: Rig) -> Latencies:
    with forked(begin, name, target) as attacker:
        attacker.recv()
        return honest(rig.engine, rig.keys, SECONDS, rig.server.process.pid)


def begin(name: str, target: Target, link: Connection) -> None:
    flood = prepared(name, target)
    link.send("begins")
    flood()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] if name in LIKE_ANOTHER else []) for name in BY_HAND]
)
def test_engines_go_on_beside(name: str, rig: Rig) -> None:
    target = Target(
        rig.server.unix, rig.server.http, rig.engine.session, rig.engine.member, rig.engine.namespace,
        dict.fromkeys(INCLUDED, OPERATOR), rig.engine.client.segments().lock_file,
    )
    tries = list[Latencies]()
    while len(tries) < TRIES and (not tries or tries[-1].max_ms >= LONGEST_MS):
        tries.append(beside(name, target, rig))
        assert not tries[-1].errors, tries
    assert tries[-1].max_ms < LONGEST_MS, tries
    assert most_memory_mib(rig.server.process.pid) - rig.began_mib < GROWTH_MIB
    eventually(lambda: descriptors(rig.server.process.pid) < 64 + 64)


def test_afterwards_all_is_as_it_was(rig: Rig) -> None:
    assert rig.engine.look_up(rig.keys) == KEYS
    eventually(lambda: until_closed(
        rig.server.http, request("GET", "/livez").replace(b"localhost", b"localhost\r\nConnection: close")
    ).startswith(b"HTTP/1.1 200"))
    eventually(lambda: descriptors(rig.server.process.pid) < 30)
    text = rig.server.log_text()
    assert "Traceback" not in text and len(text) < 100_000, text[:4000]
