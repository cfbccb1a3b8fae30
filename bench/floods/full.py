"""A server that has much: sessions, namespaces, chunks that routers know by name, a full ring of events, and tokens of
every scope."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.floods.honest import KEYS
from bench.floods.kinds import Target
from bench.floods.turns import LongestTurn
from bench.serving import CHUNK_TOKENS, MIB, Engine, ServerProcess, chain
from kvdock.api.access.access_file import add_token
from kvdock.api.feeds.sse import KEPT_EVENTS
from kvdock.client.client import Client
from kvdock.datapath.liveness import MemberLiveness
from kvdock.protocol import schemas as s
from kvdock.protocol.calls import INCLUDED
from kvdock.protocol.kv_events import named
from kvdock.protocol.wire_types import KEY_BYTES, MAX_ANSWERS, MAX_RANKS, MAX_STORE_KEYS

PART_BYTES = 256
SETTINGS: dict[str, object] = {
    "pool_bytes": 512 * MIB, "segment_bytes": 512 * MIB, "missed_heartbeats": 100_000,
    "observe": "log,stream,metrics,curve,kv_events",
}


CHUNKS_OF_NAMESPACE = 32


class Size(NamedTuple):
    """How much the server has."""

    sessions: int = 2500
    namespaces: int = 900
    named_chunks: int = 60_000
    leases: int = 2000
    """The session of floods has them, each with as many readers as there can be, about whom every heartbeat asks."""

    def scaled(self, share: float) -> Size:
        return Size(*(max(1, round(share * of)) for of in self))


class Full(NamedTuple):
    """`engine`: the honest one, which finds `keys`."""

    server: ServerProcess
    engine: Engine
    keys: bytes
    target: Target
    longest_turn: LongestTurn
    explained: Path
    """What long turns were made of, if the server notes it."""


@contextmanager
def full_server(size: Size, *, explains: bool = False) -> Iterator[Full]:
    _allow_descriptors()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvdock-floods-")))
        access_file = str(folder / "access.toml")
        tokens = {str(scope): add_token(access_file, scope, [scope]) for scope in INCLUDED}
        longest_turn, explained = LongestTurn(folder / "longest_turn"), folder / "explained"
        more = {"explained_file": str(explained)} if explains else {}
        server = stack.enter_context(ServerProcess(
            "measured", access_file=access_file, turns_file=str(folder / "longest_turn"), **more, **SETTINGS
        ))
        client = stack.enter_context(Client(server.unix, timeout_s=30.0))
        engine, keys = Engine(client, "honest", PART_BYTES), chain(KEYS, "flooded")
        with Client(server.unix, timeout_s=30.0, access_token=tokens["engine"]) as its_client:
            flooder = Engine(its_client, "flooder", PART_BYTES)
        with Client(server.http, timeout_s=30.0, access_token=tokens["engine"]) as its_client:
            flooder.comes_also_by(its_client)
        lock_file = client.segments().lock_file
        for liveness in _fill(client, size, lock_file):
            stack.callback(liveness.close)
        engine.store(keys)  # last: while the pool grew, chunks were evicted
        with Client(server.unix, timeout_s=30.0, access_token=tokens["engine"]) as its_client:
            _lease(its_client, flooder, size.leases)
        for _ in range(KEPT_EVENTS):
            engine.look_up(keys)
        target = Target(server.unix, server.http, flooder.session, flooder.member, flooder.namespace, tokens, lock_file)
        yield Full(server, engine, keys, target, longest_turn, explained)


def _fill(client: Client, size: Size, lock_file: str) -> Iterator[MemberLiveness]:
    """Attaches and stores; what proves that the members live."""
    source = random.Random(0)
    for number in range(size.sessions):
        liveness = MemberLiveness(lock_file, source=source)
        yield liveness
        member = s.Member(id=f"member-{number}", ranks=[0], scheduler=True, lock_offset=liveness.offset)
        manifest = s.Manifest(
            model=f"{number % size.namespaces}-" + "x" * 200, revision="r" * 1000, kv_dtype="u8", layers=1, kv_heads=1,
            head_size=1, chunk_tokens=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, groups=(s.Group(part_bytes=PART_BYTES),),
        )
        session = client.attach(s.AttachSession(
            instance=f"full-{number}", label="l" * 200, manifest=manifest, member=member
        )).session
        if number < size.namespaces:
            _store(client, session, member.id, chain(CHUNKS_OF_NAMESPACE, f"{number}"))
    name = named(None, [1], range(100_000, 100_000 + CHUNK_TOKENS))
    for number in range(size.named_chunks // MAX_STORE_KEYS):
        _store(client, session, member.id, chain(MAX_STORE_KEYS, f"named {number}"), blocks=[name] * MAX_STORE_KEYS)


def _lease(client: Client, engine: Engine, count: int) -> None:
    """Leases of one chunk. The member that asked for them has given its own up; their readers have not."""
    keys = chain(1, "leased")
    _store(client, engine.session, engine.member, keys)
    leases = [
        client.lookup(s.Lookup(
            session=engine.session, member=engine.member, request=f"leased-{number}", keys=keys, readers=MAX_RANKS
        )).lease for number in range(count)
    ]
    for start in range(0, count, MAX_ANSWERS):
        done = [s.GrantRanks(grant=lease) for lease in leases[start : start + MAX_ANSWERS] if lease is not None]
        client.heartbeat(engine.session, s.Heartbeat(member=engine.member, done=done))


def _store(client: Client, session: str, member: str, keys: bytes, **more: Any) -> None:
    granted = client.reserve(s.Reserve(session=session, member=member, store=keys[:8].hex(), keys=keys, **more))
    if granted.reservation is None or len(granted.chunks) * KEY_BYTES != len(keys):
        raise RuntimeError(f"reserved {len(granted.chunks)} chunks: {granted.limited_by}")
    parts = [s.PartDone(chunk.index, 0, 5) for chunk in granted.chunks]
    client.commit(granted.reservation, s.Commit(session=session, rank=0, parts=parts))


def _allow_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
