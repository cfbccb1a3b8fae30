"""Nodes that read each other's pools by Mooncake's Transfer Engine: what one has the others hit, what was cleared or
deleted nobody reads, a stranger reads nothing, and no byte is wrong whatever dies."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_helpers import OPERATOR, ServerProcess, access_file, eventually, unique
from paths import ROOT
from peer_nodes import PART, TOKEN, PeerNode, nodes
from tier_engine import CHUNK_TOKENS, TierEngine, manifest
from tier_server import mover

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import ClearCache, DeleteChunks, EvictChunks
from kvdock.protocol.errors import ApiError
from kvdock.protocol.peer_schemas import PeerNote, PeerNotes, PeerRead, PeerReadAnswer
from kvdock.tiers.stores.peers.engine import Engine, PeersSettings
from kvdock.tiers.stores.peers.tier import PeerServer
from kvdock.tiers.tier import Deadline, TierUrlError, address_of

pytestmark = [pytest.mark.tiers, pytest.mark.security, pytest.mark.timeout(120)]

Pair = tuple[PeerNode, PeerNode]
CHUNKS = 8
TOKENS = CHUNKS * CHUNK_TOKENS


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with nodes(tmp_path, 2) as (a, b):
        yield a, b


def hits(node: PeerNode, keys: list[bytes], request: str) -> int:
    """How many tokens a request finds in the end. All of their bytes are right."""
    found = node.engine.awaited(keys, request, wait_s=5.0)
    node.engine.read(keys, found)
    if found.lease is not None:
        node.engine.release(found)
    return found.hit_tokens


def comes(node: PeerNode, keys: list[bytes], request: str, tokens: int = TOKENS) -> None:
    """A request finds as many tokens. On a busy machine a peer may say too late what it has: then once more."""
    tries = itertools.count()
    eventually(lambda: hits(node, keys, f"{request}-{next(tries)}") == tokens, 30.0)


def counter(node: PeerNode, name: str) -> int:
    (tier,) = node.engine.client.status().tiers
    return tier.counters[name]


def generation(node: PeerNode) -> int:
    """The generation that the node tells its peers for its namespace."""
    with peer_client(node) as client:
        note = PeerNote(namespace_of(node.engine), 0)
        return client.peer_notes(PeerNotes(notes=[note])).generations[0]


def namespace_of(engine: TierEngine) -> str:
    return engine.attachment.filed_in.hex()


def peer_client(node: PeerNode, token: str = TOKEN) -> Client:
    return Client(node.server.http, access_token=token)


def lease(node: PeerNode, keys: list[bytes], address: str = "127.0.0.77") -> PeerReadAnswer:
    """As another node asks for it."""
    with peer_client(node) as client:
        return client.peer_read(PeerRead(
            namespace=namespace_of(node.engine), generation=generation(node), keys=b"".join(keys),
            address=address,
        ))


# ------------------------------------------------------------------ what is read


def test_a_node_hits_what_the_pool_of_another_has_and_both_keep_it(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    comes(b, keys, "first")
    eventually(lambda: counter(b, "loaded_bytes") == CHUNKS * PART)
    assert a.engine.lookup(keys, "still").hit_tokens == TOKENS
    assert counter(a, "stored_bytes") == counter(b, "stored_bytes") == 0, "nothing is written to a peer"


def test_what_nobody_has_is_a_miss(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys[:3])
    comes(b, keys, "part", 3 * CHUNK_TOKENS)
    assert hits(b, b.engine.chain(CHUNKS), "nothing") == 0


@pytest.mark.parametrize("writers", [2, 8])
def test_the_parts_of_all_writers_come(tmp_path: Path, writers: int) -> None:
    with nodes(tmp_path, 2) as (a, b):
        engines = [TierEngine(one.server.unix, manifest(4096, writers=writers), "ranks") for one in (a, b)]
        keys = engines[0].chain(CHUNKS)
        engines[0].store(keys)
        tries = itertools.count()
        eventually(lambda: engines[1].awaited(keys, f"r-{next(tries)}").hit_tokens == TOKENS, 30.0)
        found = engines[1].lookup(keys, "read")
        assert all(len(parts) == writers for parts in found.chunks)
        engines[1].read(keys, found)
        for one in engines:
            one.close()


def test_a_prefix_is_put_together_from_what_two_peers_have(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as (a, b, c):
        keys = a.engine.chain(CHUNKS)
        a.engine.store(keys[:5])
        b.engine.store(keys[3:], parent=keys[2])
        comes(c, keys, "both")


# ------------------------------------------------------------------ leases


def test_what_a_peer_reads_is_not_evicted_until_it_releases(pair: Pair) -> None:
    a, _ = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    held = lease(a, keys)
    assert held.lease and [len(parts) for parts in held.chunks] == [1] * CHUNKS
    assert not evicted(a), "a peer reads it"
    with peer_client(a) as client:
        for _ in range(2):  # the answer to the first was lost
            client.peer_read(PeerRead(namespace=namespace_of(a.engine), generation=0, keys=b"", releases=[held.lease]))
    eventually(lambda: evicted(a))


def test_the_lease_of_a_dead_peer_ends_by_itself(pair: Pair) -> None:
    a, _ = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    held = lease(a, keys)
    assert 0 < held.lease_s <= 10
    eventually(lambda: evicted(a), 30.0)


def test_a_question_alone_holds_nothing(pair: Pair) -> None:
    a, _ = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys[:4])
    found = asked(a, keys, generation(a))
    assert (found.lease, found.engine) == (0, "")
    assert [len(parts) for parts in found.chunks] == [1] * 4 + [0] * 4
    eventually(lambda: evicted(a), 5.0)


@pytest.mark.parametrize("step", [-1, 1])
def test_chunks_of_another_generation_are_not_there(pair: Pair, step: int) -> None:
    a, _ = pair
    a.engine.client.clear(ClearCache(namespace=namespace_of(a.engine)))
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    eventually(lambda: [len(parts) for parts in asked(a, keys, generation(a)).chunks] == [1] * CHUNKS)
    assert asked(a, keys, generation(a) + step).chunks == []


def asked(node: PeerNode, keys: list[bytes], generation: int) -> PeerReadAnswer:
    with peer_client(node) as client:
        return client.peer_read(PeerRead(
            namespace=namespace_of(node.engine), generation=generation, keys=b"".join(keys),
        ))


def evicted(node: PeerNode) -> bool:
    """Tries to evict all that the pool has."""
    node.engine.client.evict(EvictChunks(free_bytes=node.engine.client.status().pool.limit_bytes))
    return node.engine.client.status().chunks.ready == 0


# ------------------------------------------------------------------ clears and deletions


@pytest.mark.parametrize("at_reader", [False, True], ids=["at the holder", "at the reader"])
def test_nobody_reads_what_was_cleared_at_one_node(pair: Pair, at_reader: bool) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    comes(b, keys, "before")
    where = b if at_reader else a
    assert where.engine.client.clear(ClearCache(namespace=namespace_of(where.engine))).pending_tiers == []
    assert hits(where, keys, "at once") == 0
    eventually(lambda: generation(a) == generation(b) > 1_700_000_000_000)
    assert hits(a, keys, "later") == hits(b, keys, "later") == 0, "the other pool has followed"
    a.engine.store(keys)
    comes(b, keys, "again")  # that nobody has it is remembered for some seconds


def test_nobody_reads_what_was_deleted_at_one_node(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    deleted = b.engine.client.delete(DeleteChunks(namespace=namespace_of(b.engine), keys=[keys[5].hex()]))
    assert deleted.pending_tiers == []
    comes(b, keys, "there", 5 * CHUNK_TOKENS)
    assert hits(a, keys, "here") == 5 * CHUNK_TOKENS


def test_a_deletion_waits_for_a_peer_that_is_cut_off(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    comes(b, keys, "before")
    os.kill(a.server.process.pid, signal.SIGSTOP)
    deleted = b.engine.client.delete(DeleteChunks(namespace=namespace_of(b.engine), keys=[keys[0].hex()]))
    assert deleted.pending_tiers == ["peers"]
    os.kill(a.server.process.pid, signal.SIGCONT)
    eventually(lambda: a.engine.lookup(keys, "gone").hit_tokens == 0, 60.0)
    eventually(lambda: b.engine.client.status().tiers[0].pending_orders == 0, 30.0)
    assert hits(b, keys, "after") == 0


def test_nothing_is_read_at_a_peer_that_has_not_been_told_of_a_deletion(pair: Pair) -> None:
    a, _ = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    peer = PeerServer("a", Client(a.server.http, access_token=TOKEN), time.monotonic)
    namespace, now = a.engine.attachment.filed_in.hex(), generation(a)
    read = PeerRead(namespace=namespace, generation=now, keys=b"".join(keys[1:]))
    assert peer.answer(read, Deadline(5.0)) is not None
    os.kill(a.server.process.pid, signal.SIGSTOP)
    assert not peer.tell_deleted(namespace, now, keys[:1], Deadline(0.2))
    os.kill(a.server.process.pid, signal.SIGCONT)
    assert peer.answer(read, Deadline(5.0)) is None
    eventually(lambda: peer.tell_deleted(namespace, now, keys[:1], Deadline(5.0)))
    assert peer.answer(read, Deadline(5.0)) is not None
    assert a.engine.lookup(keys, "gone").hit_tokens == 0
    peer.close()


def test_while_a_deletion_waits_for_one_peer_the_others_are_read(tmp_path: Path) -> None:
    with nodes(tmp_path, 3) as (a, b, c):
        keys, more = a.engine.chain(CHUNKS), c.engine.chain(CHUNKS)
        a.engine.store(keys)
        comes(b, keys, "before")
        os.kill(a.server.process.pid, signal.SIGSTOP)
        gone = DeleteChunks(namespace=namespace_of(b.engine), keys=[keys[0].hex()])
        assert b.engine.client.delete(gone).pending_tiers == ["peers"]
        c.engine.store(more)
        eventually(lambda: hits(b, more, random.randbytes(8).hex()) == TOKENS, 30.0)

        def is_shown() -> bool:
            (tier,) = b.engine.client.tiers().tiers
            return tier.pending_orders == 1 and a.server.http.removeprefix("http://") in tier.pending_why

        eventually(is_shown, 30.0)
        os.kill(a.server.process.pid, signal.SIGCONT)
        eventually(lambda: a.engine.lookup(keys, "gone").hit_tokens == 0, 60.0)
        eventually(lambda: b.engine.client.tiers().tiers[0].pending_orders == 0, 30.0)
        assert hits(b, keys, "after") == 0


@contextmanager
def stopped(node: PeerNode) -> Iterator[None]:
    os.kill(node.server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.server.process.pid, signal.SIGCONT)


def test_what_an_engine_stores_anew_survives_that_a_deletion_is_told_again(tmp_path: Path) -> None:
    """A does not hear of it at first, B deletes, and C, which was told twice, computes the first prompt anew and reads
    the second one at A."""
    with nodes(tmp_path, 3) as (a, b, c):
        anew, stale, more = (a.engine.chain(2) for _ in range(3))
        for keys in (anew, stale, more):
            a.engine.store(keys)
            comes(c, keys, unique("before"), len(keys) * CHUNK_TOKENS)
        gone = [keys[0].hex() for keys in (anew, stale)]
        with stopped(a):
            order = DeleteChunks(namespace=namespace_of(b.engine), keys=gone)
            assert b.engine.client.delete(order).pending_tiers == ["peers"]
            assert hits(c, anew, "told") == hits(c, stale, "told too") == 0
            c.engine.store(anew)
        eventually(lambda: b.engine.client.tiers().tiers[0].pending_orders == 0, 60.0)
        assert a.engine.lookup(anew, "gone").hit_tokens == 0
        assert hits(c, anew, "stays") == 2 * CHUNK_TOKENS
        assert b.engine.client.delete(order).pending_tiers == []
        assert hits(c, anew, "deleted once more") == 0


def test_a_deletion_that_is_told_again_takes_what_has_come_from_another_node(pair: Pair) -> None:
    """The other node was not told yet. What an engine has stored since stays."""
    a, b = pair
    keys, namespace = a.engine.chain(2), namespace_of(a.engine)
    a.engine.store(keys)
    told = [PeerNote(namespace, generation(b), keys[0])]
    with peer_client(b) as client:
        client.peer_notes(PeerNotes(notes=told))
        comes(b, keys, "read at A", 2 * CHUNK_TOKENS)
        client.peer_notes(PeerNotes(notes=told, again=True))
        assert b.engine.lookup(keys, "gone").hit_tokens == 0
        client.peer_notes(PeerNotes(notes=told))
        b.engine.store(keys)
        client.peer_notes(PeerNotes(notes=told, again=True))
        assert b.engine.lookup(keys, "anew").hit_tokens == 2 * CHUNK_TOKENS
        client.peer_notes(PeerNotes(notes=told, again=True))
        assert b.engine.lookup(keys, "a deletion that is not known").hit_tokens == 0


# ------------------------------------------------------------------ strangers


@pytest.mark.parametrize(("token", "code"), [
    ("", "unauthenticated"), ("wrong-" + "w" * 40, "unauthenticated"), ("engine-" + "e" * 40, "forbidden"),
    ("tenant-" + "t" * 40, "forbidden"),
])
def test_only_the_token_of_peers_gets_a_lease(tmp_path: Path, token: str, code: str) -> None:
    more = [entry("engines", "engine-" + "e" * 40, ["engine"], ""), entry("a", "tenant-" + "t" * 40, ["peer"], "a")]
    with nodes(tmp_path, 2, entries=more) as (a, _), peer_client(a, token) as client:
        keys = a.engine.chain(1)
        a.engine.store(keys)
        for call in (
            lambda: client.peer_read(PeerRead(namespace=namespace_of(a.engine), generation=1, keys=keys[0])),
            lambda: client.peer_read(PeerRead(
                namespace=namespace_of(a.engine), generation=1, keys=keys[0], claimer="10.0.0.9:1",
            )),
            lambda: client.peer_notes(PeerNotes(notes=[PeerNote(namespace_of(a.engine), 1 << 40)])),
        ):
            with pytest.raises(ApiError) as refused:
                call()
            assert refused.value.code == code
        assert a.engine.lookup(keys, "there").hit_tokens == CHUNK_TOKENS


READS = """
import ctypes, sys
from mooncake.engine import TransferEngine
host, engine, there, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
library, memory = TransferEngine(), ctypes.create_string_buffer(length)
library.initialize(host, "P2PHANDSHAKE", "tcp", "")
done = library.transfer_sync_read(engine, ctypes.addressof(memory), there, length) == 0
print("read", memory.raw.hex() if done else "nothing", flush=True)
"""


def test_an_engine_at_an_address_that_was_not_admitted_reads_nothing(pair: Pair) -> None:
    a, _ = pair
    keys = a.engine.chain(1)
    a.engine.store(keys)
    there = lease(a, keys)  # for another address
    ((part,),) = there.chunks
    program = (sys.executable, "-c", READS, "127.0.0.1", there.engine, str(part.address), "64")

    def read() -> str:
        done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
        (line,) = [one for one in done.stdout.splitlines() if one.startswith("read ")]
        return line.removeprefix("read ")

    assert read() == "nothing"
    lease(a, keys, address="127.0.0.1")
    assert read() == a.engine.bytes_of(keys[0])[:64].hex(), "an admitted one reads them: else this would show nothing"


# ------------------------------------------------------------------ faults


def test_a_damaged_chunk_is_a_miss(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    found = a.engine.lookup(keys, "to damage")
    a.engine.damage(found.chunks[2][0])
    a.engine.release(found)
    comes(b, keys, "damaged", 2 * CHUNK_TOKENS)
    eventually(lambda: counter(b, "damaged") > 0)


@pytest.mark.parametrize("whole", [True, False], ids=["server", "mover"])
def test_a_peer_that_is_frozen_costs_no_more_than_the_wait_and_comes_back(pair: Pair, whole: bool) -> None:
    a, b = pair
    keys, more = a.engine.chain(CHUNKS), a.engine.chain(CHUNKS)
    a.engine.store(keys)
    a.engine.store(more)
    frozen = a.server.process.pid if whole else mover(a.server).pid
    os.kill(frozen, signal.SIGSTOP)
    assert hits(b, keys, "frozen") == 0
    os.kill(frozen, signal.SIGCONT)
    tries = itertools.count()
    eventually(lambda: hits(b, more, f"again-{next(tries)}") == TOKENS, 60.0)


def test_a_peer_that_is_busy_has_not_failed() -> None:
    """All its connections are in use."""
    read = PeerRead(namespace="00" * 32, generation=1, keys=b"")
    with ServerProcess(tcp_connections=2) as server:
        peer = PeerServer("busy", Client(server.http, access_token=OPERATOR), time.monotonic)
        with Client(server.http, access_token=OPERATOR) as one, Client(server.http, access_token=OPERATOR) as other:
            assert one.status() and other.status()
            assert peer.answer(read, Deadline(1.0)) is None
            assert not peer.is_resting and "too_busy" not in peer.why
        eventually(lambda: peer.answer(read, Deadline(1.0)) is None and peer.is_resting)
        assert "forbidden" in peer.why or "peers_url" in peer.why
        peer.close()


def test_a_peer_that_is_killed_is_a_miss_and_the_next_one_is_found(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, tier_keep="always") as (a, b, c):
        keys = a.engine.chain(CHUNKS)
        a.engine.store(keys)
        comes(b, keys, "copies")
        mover(a.server).kill()
        a.server.process.send_signal(signal.SIGKILL)
        tries = itertools.count()
        eventually(lambda: hits(c, keys, f"from the other-{next(tries)}") == TOKENS, 30.0)


def test_what_a_restarted_mover_shares_is_read(pair: Pair) -> None:
    a, b = pair
    keys = a.engine.chain(CHUNKS)
    a.engine.store(keys)
    mover(a.server).kill()
    tries = itertools.count()
    eventually(lambda: hits(b, keys, f"again-{next(tries)}") == TOKENS, 60.0)


SHARES = """
import mmap, sys
from mooncake.engine import TransferEngine
library, memory = TransferEngine(), mmap.mmap(-1, int(sys.argv[1]))
memory.write(b"\\1" * len(memory))
import ctypes
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert library.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == library.register_memory(at, len(memory)) == 0
print("shares", library.get_rpc_port(), at, flush=True)
sys.stdin.read()
"""


def test_a_read_that_has_failed_writes_nothing_later(tmp_path: Path) -> None:
    """Its slots may be given to others then."""
    (tmp_path / "token").touch(0o600)
    settings = PeersSettings(("127.0.0.1:7",), tmp_path / "token", "127.0.0.1", stall_s=1)
    length = 128 << 20
    memory = mmap.mmap(-1, length)
    reader, here = Engine.open(settings), address_of(memoryview(memory))
    program = (sys.executable, "-c", SHARES, str(length))
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        line = next(one for one in other.stdout if one.startswith("shares"))
        port, there = map(int, line.split()[1:])

        def read_midway() -> bool:
            """Whether the read failed, after some of it had come."""
            memory[:] = bytes(length)
            stop = threading.Timer(0.02, other.send_signal, (signal.SIGSTOP,))
            stop.start()
            done = reader.read(f"127.0.0.1:{port}", here, there, length)
            stop.join()
            came = memory.find(b"\1") >= 0
            if done or not came:
                other.send_signal(signal.SIGCONT)
            return not done and came

        eventually(read_midway, 60.0)
        memory[:] = bytes(length)
        other.send_signal(signal.SIGCONT)
        assert reader.read(f"127.0.0.1:{port}", here, there, 4096), "the other one goes on"
        assert memory[4096:].count(1) == 0
        other.kill()
    reader.close()


# ------------------------------------------------------------------ settings


def test_a_server_without_peers_shares_nothing(tmp_path: Path) -> None:
    path = access_file(tmp_path, entry("peers", TOKEN, ["peer"], ""))
    with ServerProcess(access_file=str(path)) as server, Client(server.http, access_token=TOKEN) as client:
        with pytest.raises(ApiError) as refused:
            client.peer_notes(PeerNotes(notes=[]))
        assert refused.value.code == "not_found" and "peers_url" in str(refused.value)


@pytest.mark.parametrize(("url", "said"), [
    ("peers://127.0.0.1", "wanted peers://HOST:PORT,HOST:PORT"),
    ("peers://127.0.0.1:0", "wanted peers://HOST:PORT,HOST:PORT"),
    ("peers://127.0.0.1:7,x y:8", "wanted peers://HOST:PORT,HOST:PORT"),
    ("peers://127.0.0.1:7,127.0.0.1:7?token_file=FILE", "wanted each server once"),
    ("peers://127.0.0.1:7", "found no token_file"),
    ("peers://127.0.0.1:7?token_file=/nowhere", "wanted the path of a file that is there"),
    ("peers://127.0.0.1:7?token_file=FILE&stall_s=0", "wanted a whole number from 1 to 20"),
    ("peer://127.0.0.1:7", "wanted one of peers"),
])
def test_a_wrong_url_is_refused_with_what_is_wanted(tmp_path: Path, url: str, said: str) -> None:
    (tmp_path / "token").touch(0o600)
    with pytest.raises(TierUrlError, match=said):
        PeersSettings.parse(url.replace("FILE", str(tmp_path / "token")))


def test_without_the_package_the_server_does_not_start_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    program = "import sys; sys.modules['mooncake'] = None; from kvdock.__main__ import main; sys.exit(main())"
    url = f"peers://127.0.0.1:7?token_file={tmp_path / 'token'}"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", "--peers-url", url, "--socket-path", str(tmp_path / "s.sock"),
         "--port", "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )
    assert done.returncode != 0
    assert "the Transfer Engine is not installed, wanted: pip install 'kvdock[mooncake]'" in done.stderr
