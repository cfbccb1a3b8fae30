"""What routers are told follows what a real server finds, whoever stores, clears, evicts or is killed."""

from __future__ import annotations

import hashlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from adoption_helpers import next_at
from api_helpers import PATIENCE_S, ServerProcess, eventually
from connector_helpers import BLOCK, CHUNK, PER_CHUNK, Rig, tokens_of

from kvdock.connectors import announcer as module
from kvdock.connectors.announcer import Announcer, ChunkChange, ChunkOf
from kvdock.connectors.requests import ChunkObserver
from kvdock.connectors.session import Attachment, SessionObserver
from kvdock.connectors.vllm.block_names import chunk_of
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache
from kvdock.protocol.keys import chunk_keys

HEARTBEAT_S = 0.05


def request_of(tokens: Sequence[int]) -> Any:
    """What an announcer reads of a vLLM request: each hash covers all tokens before it."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    hashes = [hashlib.sha256(repr(list(tokens[:end])).encode()).digest() for end in ends]
    return SimpleNamespace(block_hashes=hashes, all_token_ids=list(tokens))


def ends_of(tokens: Sequence[int]) -> set[bytes]:
    """The last hashes of the chunks of a prompt."""
    return set(request_of(tokens).block_hashes[PER_CHUNK - 1 :: PER_CHUNK])


def chunks_of(request: Any) -> ChunkOf:
    return partial(chunk_of, request, hashes=PER_CHUNK, chunk_tokens=CHUNK)


class Asking(ChunkObserver):
    """Tells the announcer what the server says; the test itself tells it of chunks."""

    def __init__(self, announcer: Announcer) -> None:
        self.announcer = announcer

    def asking(self, attachment: Attachment) -> Callable[[Sequence[bytes]], None]:
        return self.announcer.asking(attachment)


class Telling:
    """A rig that tells a router: `told` is what it believes, as the last hash of each chunk."""

    def __init__(self, address: str, **options: Any) -> None:
        self.rig = Rig(address, **options)
        self.announcer = Announcer(self.rig.connector.session)
        # As vLLM's scheduler process wires them up; the small engine has no announcer.
        scheduler, session = self.rig.connector.scheduler, self.rig.connector.session
        requests = scheduler._requests
        requests.callbacks = replace(requests.callbacks, observer=Asking(self.announcer))
        session._observer = SessionObserver(scheduler.lookups.keeps_lease, self.announcer.changed)
        self.told: set[bytes] = set()
        self.known: set[bytes] = set()
        self.heard: list[ChunkChange] = []

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        return chunk_keys(self.rig.attachment.namespace, tokens, CHUNK)

    def knows(self, tokens: Sequence[int]) -> None:
        self.announcer.know(self.keys(tokens), chunks_of(request_of(tokens)))
        self.known |= ends_of(tokens)

    def stores(self, tokens: Sequence[int]) -> None:
        self.knows(tokens)
        self.rig.store("s", tokens, range(len(tokens) // BLOCK))

    def believes(self) -> set[bytes]:
        for told in self.announcer.take():
            self.heard.append(told)
            assert (told.chunk.hashes[-1] in self.told) != told.is_there, "told in turns"
            (self.told.add if told.is_there else self.told.remove)(told.chunk.hashes[-1])
        return self.told

    def comes_to(self, *prompts: Sequence[int]) -> None:
        """To believe that all chunks of these are there, and no others."""
        wanted = set().union(*map(ends_of, prompts))
        eventually(lambda: self.believes() == wanted)

    def agrees(self, wanted: set[bytes]) -> bool:
        return self.believes() == wanted

    def stays(self) -> None:
        """Over some heartbeats."""
        before, beats, since = set(self.believes()), self.announcer._beats, time.monotonic()
        while self.announcer._beats < beats + 3 or time.monotonic() < since + 4 * HEARTBEAT_S:
            assert self.believes() == before
            assert time.monotonic() < since + PATIENCE_S
            time.sleep(HEARTBEAT_S / 4)  # the server's heartbeats are awaited, not this process

    def clears(self) -> None:
        client = self.rig.connector.session.client
        assert client.clear(ClearCache(namespace=self.rig.attachment.namespace.hex())).chunks > 0

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *exc: object) -> None:
        self.rig.close()


@pytest.fixture
def quick() -> Any:
    with ServerProcess(heartbeat_s=HEARTBEAT_S) as server:
        yield server


def test_chunks_are_told_once_they_are_published_with_what_a_router_knows_them_by(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        tokens = tokens_of(1, 3, tail=7)
        one.knows(tokens)
        one.stays()
        assert one.told == set()
        one.stores(tokens)
        one.comes_to(tokens)
        hashes = request_of(tokens).block_hashes
        chunks = sorted((told.chunk for told in one.heard), key=lambda chunk: hashes.index(chunk.hashes[0]))
        for at, chunk in enumerate(chunks):
            assert list(chunk.hashes) == hashes[at * PER_CHUNK : (at + 1) * PER_CHUNK]
            assert chunk.parent == (hashes[at * PER_CHUNK - 1] if at else None)
            assert list(chunk.tokens) == tokens[at * CHUNK : (at + 1) * CHUNK]
        one.stays()


def test_what_goes_is_told_and_what_comes_back_too(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        for _ in range(2):
            one.stores(tokens_of(2, 2))
            one.comes_to(tokens_of(2, 2))
            one.clears()
            one.comes_to()


def test_what_others_store_and_what_is_there_already_is_told_to_who_knows_it(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one, Telling(quick.unix) as other:
        other.knows(tokens_of(3, 2))
        one.stores(tokens_of(3, 2))
        one.stores(tokens_of(4, 2))
        one.comes_to(tokens_of(3, 2), tokens_of(4, 2))
        other.comes_to(tokens_of(3, 2))
        other.stays()
        other.stores(tokens_of(4, 2))  # all of it is there
        other.comes_to(tokens_of(3, 2), tokens_of(4, 2))


def test_a_chunk_that_vllm_has_not_hashed_yet_is_known_later(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        tokens = tokens_of(5, 2)
        request = request_of(tokens)
        last = request.block_hashes.pop()
        one.announcer.know(one.keys(tokens), chunks_of(request))
        one.rig.store("s", tokens, range(2 * PER_CHUNK))
        one.comes_to(tokens[:CHUNK])
        request.block_hashes.append(last)
        one.announcer.know(one.keys(tokens), chunks_of(request))
        one.stores(tokens)
        one.comes_to(tokens)


def test_what_is_there_when_it_attaches_is_told_even_before_the_first_heartbeat() -> None:
    with ServerProcess(heartbeat_s=60.0) as slow, Telling(slow.unix) as one:
        one.stores(tokens_of(16, 2))
        with Telling(slow.unix) as other:
            other.stores(tokens_of(16, 2))
            other.comes_to(tokens_of(16, 2))


def test_what_a_lookup_finds_is_told(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one, Telling(quick.unix) as other:
        one.stores(tokens_of(11, 2))
        other.stays()  # and hears of what it does not know yet
        other.knows(tokens_of(11, 3))
        other.stays()
        assert other.rig.lookup("r", tokens_of(11, 3)) == 2 * CHUNK
        other.comes_to(tokens_of(11, 2))


def test_an_answer_that_is_older_than_a_heartbeat_tells_nothing_that_has_gone_since(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        tokens, other = tokens_of(12, 2), tokens_of(13, 1)
        one.stores(tokens)
        one.stores(other)
        one.comes_to(tokens, other)
        late = one.announcer.asking(one.rig.attachment)
        one.clears()
        one.comes_to()
        late(one.keys(tokens))  # seen before it was cleared, and said only now
        one.stays()
        assert one.told == set()
        one.stores(other)
        late(one.keys(other))
        one.comes_to(other)
        one.announcer.asking(one.rig.attachment)(one.keys(tokens))
        one.comes_to(tokens, other)


def test_who_has_forgotten_all_is_told_again_what_is_there(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        here, gone = tokens_of(31, 2), tokens_of(32, 2)
        one.stores(here)
        one.stores(gone)
        one.comes_to(here, gone)
        one.told.clear()
        one.announcer.announce_again()
        one.comes_to(here, gone)
        one.announcer.changed(one.rig.attachment, s.Changes(
            changes=[s.Change(key=key.hex(), is_there=False) for key in one.keys(gone)], next=0, complete=True
        ))
        one.told.clear()
        one.announcer.announce_again()
        one.comes_to(here)


def test_an_answer_that_is_older_than_what_was_missed_tells_nothing(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        tokens = tokens_of(17, 2)
        one.knows(tokens)
        late = one.announcer.asking(one.rig.attachment)
        one.announcer.changed(one.rig.attachment, s.Changes(changes=[], next=0, complete=False))
        late(one.keys(tokens))
        assert one.believes() == set()
        one.announcer.asking(one.rig.attachment)(one.keys(tokens))
        one.comes_to(tokens)


def test_a_great_many_are_told_step_by_step(quick: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_CHUNKS", 2)
    with Telling(quick.unix) as one:
        one.stores(tokens_of(14, 5))
        one.comes_to(tokens_of(14, 5))
        one.announcer.changed(one.rig.attachment, s.Changes(changes=[], next=0, complete=False))
        assert [len(one.believes()) for _ in range(3)] == [3, 1, 0]


def test_nothing_is_there_while_no_server_is(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        one.stores(tokens_of(6, 2))
        one.comes_to(tokens_of(6, 2))
        quick.stop(signal.SIGKILL)
        one.comes_to()
        with next_at(quick):
            eventually(lambda: one.rig.connector.session.attachment is not None)
            one.stays()  # what it took over, until somebody asks for it
            assert one.told == set()
            one.stores(tokens_of(6, 2))
            one.comes_to(tokens_of(6, 2))
            one.clears()
            one.comes_to()


def test_whoever_missed_changes_starts_again_with_nothing(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one:
        one.stores(tokens_of(7, 2))
        one.comes_to(tokens_of(7, 2))
        one.announcer.changed(one.rig.attachment, s.Changes(changes=[], next=0, complete=False))
        assert one.believes() == set()


def test_what_an_earlier_server_epoch_said_late_is_not_heard(quick: ServerProcess) -> None:
    with Telling(quick.unix) as one, Telling(quick.unix) as other:
        one.knows(tokens_of(8, 2))
        keys = one.keys(tokens_of(8, 2))
        late = s.Changes(changes=[s.Change(key.hex(), True) for key in keys], next=0, complete=True)
        one.announcer.changed(other.rig.attachment, late)
        one.announcer.asking(other.rig.attachment)(keys)
        assert one.believes() == set()


def test_of_many_chunks_that_never_come_the_oldest_are_forgotten(
    quick: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNANNOUNCED_CHUNKS", 4)
    with Telling(quick.unix) as one:
        first, second = tokens_of(9, 2), tokens_of(10, 4)
        one.knows(first)
        one.knows(second)
        one.announcer.asking(one.rig.attachment)(one.keys(first) + one.keys(second))
        one.comes_to(second)


def test_what_is_met_again_is_not_among_the_oldest(quick: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNANNOUNCED_CHUNKS", 4)
    with Telling(quick.unix) as one:
        prompts = [tokens_of(seed, 2) for seed in (18, 19, 20)]
        for at in (0, 1, 0, 2):
            one.knows(prompts[at])
        one.announcer.asking(one.rig.attachment)([key for tokens in prompts for key in one.keys(tokens)])
        one.comes_to(prompts[0], prompts[2])


@pytest.mark.parametrize("seed", range(3))
def test_two_routers_of_a_crowded_pool_believe_what_lookups_find(seed: int) -> None:
    draw = random.Random(seed)
    with (
        ServerProcess(heartbeat_s=HEARTBEAT_S, pool_bytes="1MiB", segment_bytes="1MiB") as server,
        Telling(server.unix) as one, Telling(server.unix) as other,
    ):
        trunks = [tokens_of(20 + n, 3) for n in range(4)]
        prompts = [draw.choice(trunks)[: CHUNK * draw.randint(1, 3)] + tokens_of(50 + n, 2) for n in range(20)]
        for step in range(60):
            draw.choice([one, other]).stores(draw.choice(prompts))
            if step % 25 == 24:
                one.clears()
            for who in (one, other):
                who.believes()
        client, namespace = one.rig.connector.session.client, one.rig.attachment.namespace.hex()
        there: set[bytes] = set()
        for tokens in prompts:
            keys = b"".join(one.keys(tokens))
            there |= ends_of(tokens[: client.lookup(s.Lookup(namespace=namespace, keys=keys)).hit_tokens])
        assert there and client.status().counters["evicted_chunks"] > 0
        for who in (one, other):
            eventually(partial(who.agrees, there & who.known))
