"""Nodes that share a store and read each other's pools: of those that want one prefix at the same time one loads it
from the store, and the others read it there. Whatever happens to the one that loads, the others load for themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from api_helpers import eventually
from halving_proxy import HalvingProxy
from peer_nodes import PART, TOKEN, PeerNode, nodes
from redis_server import served
from tier_engine import CHUNK_TOKENS
from tier_server import mover

from kvdock.api.tiers.peers import MOST_WAITING
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import EvictChunks
from kvdock.protocol.peer_schemas import MAX_WAIT_S, PeerNote, PeerNotes, PeerRead, PeerReadAnswer
from kvdock.protocol.schemas import LookupAnswer
from kvdock.tiers.stores.peers.claims import (
    CLAIM_S,
    MOST_CLAIMS,
    MOST_NODES,
    READERS_EACH,
    Claims,
    keeper_of,
)
from kvdock.tiers.stores.peers.tier import ASK_S, PeerServer
from kvdock.tiers.tier import AT_STORE, Deadline, Place

pytestmark = [pytest.mark.tiers, pytest.mark.timeout(120)]

CHUNKS = 8
TOKENS = CHUNKS * CHUNK_TOKENS
SIZE = CHUNKS * PART
WAIT_S = 10.0
STALL_S = 0.5
"""How long a node waits for the next chunk of another one."""


class Herd(NamedTuple):
    """`stores`: what is between each node and the store; it can be frozen in the midst of a load."""

    nodes: list[PeerNode]
    stores: list[HalvingProxy]

    def stored(self, count: int = CHUNKS) -> list[bytes]:
        """A prompt that the store has and no pool. The last node stores it, and measures the store soon after."""
        last = self.nodes[-1]
        keys, before = last.engine.chain(count), of_tier(last, "redis", "stored_bytes")
        last.engine.store(keys)
        eventually(lambda: of_tier(last, "redis", "stored_bytes") == before + count * PART, 30.0)
        eventually(lambda: is_empty(last))
        return keys


@contextmanager
def herd(folder: Path, count: int, tier_keep: str = "shared") -> Iterator[Herd]:
    with ExitStack() as stack:
        stack.enter_context(served(folder / "redis"))
        stores = [HalvingProxy(folder / f"proxy{at}", folder / "redis" / "sock") for at in range(count)]
        for one in stores:
            stack.callback(one.close)
        own: list[dict[str, object]] = [{"redis_url": f"unix://{folder}/proxy{at}"} for at in range(count)]
        made = stack.enter_context(nodes(folder, count, own=own, tier_asks=1, tier_keep=tier_keep))
        for one in stores:
            stack.callback(one.thaw)
        for node in made:
            eventually(partial(uses_all, node), 30.0)
        for node in made:  # from the answers each node learns the names of the others
            assert node.engine.awaited(node.engine.chain(CHUNKS), "meets").hit_tokens == 0
        yield Herd(made, stores)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Herd]:
    with herd(tmp_path, 2) as made:
        yield made


def of_tier(node: PeerNode, tier: str, counter: str) -> int:
    (found,) = [one for one in node.engine.client.status().tiers if one.name == tier]
    return found.counters[counter]


def uses_all(node: PeerNode) -> bool:
    """Its mover, which may just have been started, has opened all tiers."""
    return all(one.state == "open" for one in node.engine.client.status().tiers)


def uses_store(node: PeerNode) -> bool:
    """Its mover has opened the store, and knows of the peers, whatever has become of these."""
    states = {one.name: one.state for one in node.engine.client.status().tiers}
    return "peers" in states and all(state == "open" for name, state in states.items() if name != "peers")


def has_restarted(node: PeerNode) -> bool:
    view = node.engine.client.status().mover
    return view is not None and view.restarts > 0


def is_empty(node: PeerNode) -> bool:
    node.engine.client.evict(EvictChunks(free_bytes=node.engine.client.status().pool.limit_bytes))
    return node.engine.client.status().chunks.ready == 0


def loaded(node: PeerNode, size: int = SIZE) -> tuple[int, int]:
    """(bytes from other nodes, bytes from the store), once the node has reported so many together."""
    def parts() -> tuple[int, int]:
        return of_tier(node, "peers", "loaded_bytes"), of_tier(node, "redis", "loaded_bytes")

    eventually(lambda: sum(parts()) >= size)
    return parts()


def begin(node: PeerNode, keys: list[bytes], request: str, wait_s: float = WAIT_S) -> None:
    """A request, until its node has said from which tier the chunks come: then it loads them, or waits for another."""
    def is_promised() -> bool:
        pending = node.engine.lookup(keys, request, wait_s).pending
        return pending is not None and bool(pending.tier)

    eventually(is_promised)


def end(node: PeerNode, keys: list[bytes], request: str, wait_s: float = WAIT_S) -> LookupAnswer:
    """What the request has in the end. All of it is right."""
    found = node.engine.awaited(keys, request, wait_s)
    node.engine.read(keys, found)
    if found.lease is not None:
        node.engine.release(found)
    return found


def loads(made: Herd, at: int, keys: list[bytes], request: str) -> None:
    """The node begins to load from the store, which does not answer it any more."""
    made.stores[at].freeze()
    begin(made.nodes[at], keys, request)
    eventually(lambda: made.stores[at].is_frozen)


def asked(
    node: PeerNode, keys: list[bytes], claimer: str = "", wait_s: float = 0.0, address: str = "", later: int = 0,
    server: str = "", depth: int = 1,
) -> PeerReadAnswer:
    """As another node asks, whose generation is `later` higher. `server`: another address of the node's server."""
    namespace = node.engine.attachment.filed_in.hex()
    with Client(server or node.server.http, access_token=TOKEN) as client:
        (generation,) = client.peer_notes(PeerNotes(notes=[PeerNote(namespace, 0)])).generations
        return client.peer_read(PeerRead(
            namespace=namespace, generation=generation + later, keys=b"".join(keys), claimer=claimer, wait_s=wait_s,
            address=address, depth=depth,
        ))


# ------------------------------------------------------------------ one loads, and the others read


@pytest.mark.parametrize("count", [2, 4])
def test_a_herd_loads_a_prefix_once(tmp_path: Path, count: int) -> None:
    with herd(tmp_path, count, tier_keep="always") as made:
        keys = made.stored()
        found = [0] * count

        def ask(at: int) -> None:
            found[at] = end(made.nodes[at], keys, "herd").hit_tokens

        threads = [threading.Thread(target=ask, args=(at,)) for at in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [TOKENS] * count
        parts = [loaded(node) for node in made.nodes]
        assert sum(store for _, store in parts) == SIZE, "the store was read once"
        assert sum(peers for peers, _ in parts) == (count - 1) * SIZE


def follows(made: Herd, tail: int = 0) -> tuple[int, int]:
    """A request at B for what A is loading, and `tail` chunks more: (bytes from A, bytes from the store)."""
    a, b = made.nodes
    keys = made.stored(CHUNKS + tail)
    request, before = keys[0].hex(), loaded(b, 0)
    loads(made, 0, keys[:CHUNKS], request)
    begin(b, keys, request)
    made.stores[0].thaw()
    assert end(b, keys, request).hit_tokens == TOKENS + tail * CHUNK_TOKENS
    assert end(a, keys[:CHUNKS], request).hit_tokens == TOKENS
    after = loaded(b, sum(before) + SIZE + tail * PART)
    return after[0] - before[0], after[1] - before[1]


def test_what_a_node_is_loading_is_read_there_when_it_has_come(pair: Herd) -> None:
    """Though the pool drops it with its last reader. On a busy machine the chunks may come too late: then once more."""
    eventually(lambda: follows(pair) == (SIZE, 0), 60.0)
    eventually(lambda: of_tier(pair.nodes[1], "peers", "followed") >= CHUNKS)
    eventually(lambda: is_empty(pair.nodes[0]), 5.0)  # no lease is left


def test_what_has_come_is_held_for_those_that_waited_though_its_request_has_ended(pair: Herd) -> None:
    a, _ = pair.nodes

    def is_held() -> bool:
        """Not where the other node has asked too late."""
        keys, answers = pair.stored(), list[PeerReadAnswer]()
        loads(pair, 0, keys, "first-" + keys[0].hex())
        waits = threading.Thread(target=lambda: answers.append(asked(a, keys, wait_s=1.0, address="127.0.0.77")))
        waits.start()
        pair.stores[0].thaw()
        end(a, keys, "first-" + keys[0].hex())
        waits.join()
        (answer,) = answers
        there = sum(1 for parts in answer.chunks if parts)
        return there > 0 and a.engine.lookup(keys, keys[0].hex()).hit_tokens >= there * CHUNK_TOKENS

    eventually(is_held, 30.0)


def test_what_the_other_node_does_not_load_comes_from_the_store(pair: Herd) -> None:
    eventually(lambda: follows(pair, 4) == (SIZE, 4 * PART), 60.0)


def test_only_nodes_further_from_the_store_wait_for_a_node_that_follows_another(pair: Herd) -> None:
    a, b = pair.nodes
    keys = pair.stored()
    assert asked(a, keys).coming == 0
    loads(pair, 0, keys, "first")
    assert asked(a, keys).coming == CHUNKS
    assert asked(a, keys, later=1).coming == 0, "what comes was cleared there"
    begin(b, keys, "second")
    eventually(lambda: asked(b, keys).coming == 0)
    assert asked(b, keys, depth=2).coming == CHUNKS and asked(a, keys, depth=0).coming == 0
    pair.stores[0].thaw()
    assert end(b, keys, "second").hit_tokens == end(a, keys, "first").hit_tokens == TOKENS
    assert asked(a, keys).coming == asked(b, keys, depth=2).coming == 0


def test_of_many_that_wait_some_are_told_at_once_that_no_more_comes(pair: Herd) -> None:
    a, _ = pair.nodes
    keys = pair.stored()
    loads(pair, 0, keys, "first")

    def are_some_told() -> bool:
        def ask(_: int) -> int:  # over the Unix socket, which takes so many connections
            return asked(a, keys, wait_s=MAX_WAIT_S, server=a.server.unix).coming

        with ThreadPoolExecutor(2 * MOST_WAITING) as threads:
            answers = list(threads.map(ask, range(2 * MOST_WAITING)))
        assert answers.count(CHUNKS) >= MOST_WAITING
        return 0 in answers

    eventually(are_some_told, 30.0)  # where they come one after the other, each may wait
    assert asked(a, keys).coming == CHUNKS


def test_a_node_that_answers_late_to_a_short_question_keeps_its_name(pair: Herd) -> None:
    a, _ = pair.nodes
    peer = PeerServer("a", Client(a.server.http, access_token=TOKEN), time.monotonic)
    read = PeerRead(namespace=a.engine.attachment.filed_in.hex(), generation=1, keys=b"")
    eventually(lambda: peer.answer(read, Deadline(ASK_S)) is not None)
    name = peer.node
    os.kill(a.server.process.pid, signal.SIGSTOP)
    try:
        assert peer.answer(read, Deadline(0.2)) is None and peer.notes([], Deadline(0.2)) is None
        assert peer.node == name != "" and not peer.is_resting
        assert peer.answer(read, Deadline(2 * ASK_S)) is None
        assert peer.node == "" and peer.last_node == name and peer.is_resting
    finally:
        os.kill(a.server.process.pid, signal.SIGCONT)
        peer.close()


def test_two_nodes_that_wait_for_each_other_both_go_on(tmp_path: Path) -> None:
    with herd(tmp_path, 3) as made:
        a, b, _ = made.nodes
        one, two = made.stored(), made.stored()
        loads(made, 0, one, "a loads")
        loads(made, 1, two, "b loads")
        for node, keys, request in ((a, two, "a waits"), (b, one, "b waits")):
            assert node.engine.lookup(keys, request, WAIT_S).pending is not None
        for store in made.stores:
            store.thaw()
        for node, keys, request in ((a, one, "a loads"), (b, two, "b loads"), (a, two, "a waits"), (b, one, "b waits")):
            assert end(node, keys, request).hit_tokens == TOKENS


# ------------------------------------------------------------------ the one that loads fails


def ends_for_itself(made: Herd, keys: list[bytes], began_s: float) -> None:
    b = made.nodes[1]
    assert end(b, keys, "second").hit_tokens == TOKENS
    assert time.monotonic() - began_s < STALL_S + 3.0, "it has waited much longer than for its own load"
    assert loaded(b) == (0, SIZE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("whole", [True, False], ids=["server", "mover"])
def test_a_node_goes_on_without_one_that_dies_while_it_loads(pair: Herd, number: int, whole: bool) -> None:
    a, b = pair.nodes
    keys = pair.stored()
    loads(pair, 0, keys, "first")
    begin(b, keys, "second")
    began_s = time.monotonic()
    processes = [mover(a.server).pid, *([a.server.process.pid] if whole else [])]
    for process in processes:
        os.kill(process, number)
    ends_for_itself(pair, keys, began_s)
    if number == signal.SIGSTOP:
        for process in processes:
            os.kill(process, signal.SIGCONT)


def test_a_node_goes_on_without_one_whose_store_does_not_answer(pair: Herd) -> None:
    keys = pair.stored()
    loads(pair, 0, keys, "first")
    begin(pair.nodes[1], keys, "second")
    ends_for_itself(pair, keys, time.monotonic())


def test_a_node_goes_on_at_once_when_the_other_request_ends(pair: Herd) -> None:
    a, b = pair.nodes
    keys = pair.stored()
    loads(pair, 0, keys, "first")
    begin(b, keys, "second")
    began_s = time.monotonic()
    a.engine.session.close()
    ends_for_itself(pair, keys, began_s)


def test_a_node_goes_on_at_once_when_the_other_pool_is_full(pair: Herd) -> None:
    a, b = pair.nodes
    keys = pair.stored()
    full = a.engine.chain(64)
    a.engine.store(full)
    held = a.engine.lookup(full, "holds all that fits")
    assert held.hit_tokens >= 60 * CHUNK_TOKENS
    begin(a, keys, "first", wait_s=60.0)
    eventually(lambda: asked(a, keys).coming == 0, 10.0)
    began_s = time.monotonic()
    begin(b, keys, "second")
    ends_for_itself(pair, keys, began_s)
    a.engine.release(held)


def test_a_node_goes_on_at_once_when_the_other_one_does_not_load(pair: Herd) -> None:
    """It has claimed the prefix, and its request has ended since."""
    _, b = pair.nodes
    keys = pair.stored()
    names = [asked(node, keys).node for node in pair.nodes]
    for node in pair.nodes:
        assert asked(node, keys, claimer=names[0]).source == ""
        assert asked(node, keys, claimer=names[1]).source == names[0]
    began_s = time.monotonic()
    begin(b, keys, "second")
    ends_for_itself(pair, keys, began_s)


def test_a_node_whose_token_is_refused_loads_for_itself(pair: Herd, tmp_path: Path) -> None:
    a, b = pair.nodes
    keys = pair.stored()
    (tmp_path / "node1" / "token").write_text("wrong-" + "w" * 40)
    mover(b.server).kill()  # the next one reads the token
    eventually(lambda: has_restarted(b) and uses_store(b), 30.0)
    name = asked(a, keys).node
    for node in pair.nodes:
        asked(node, keys, claimer=name)
    assert end(b, keys, "second").hit_tokens == TOKENS
    assert loaded(b) == (0, SIZE)


def test_a_node_without_the_store_does_not_keep_others_from_it(tmp_path: Path) -> None:
    with herd(tmp_path, 2) as made:
        keys = made.stored()
        made.stores[0].close()
        begin(made.nodes[1], keys, "second")
        ends_for_itself(made, keys, time.monotonic())


# ------------------------------------------------------------------ claims


def test_the_first_that_claims_loads_until_its_claim_is_over() -> None:
    now_s = 100.0
    claims = Claims(lambda: now_s)
    space, key, from_a = bytes(32), bytes(31) + b"\1", Place("a", 1, 2)
    assert [claims.claim(space, 1, key, node) for node in ("a", "b", "a")] == [AT_STORE, from_a, AT_STORE]
    assert claims.claim(b"\1" * 32, 1, key, "b") == AT_STORE, "of another namespace"
    assert claims.claim(space, 2, key, "b") == AT_STORE, "after a clear"
    now_s += CLAIM_S
    assert [claims.claim(space, 1, key, node) for node in ("b", "a")] == [AT_STORE, Place("b", 1, 2)]
    for number in range(MOST_CLAIMS):
        claims.claim(space, 1, b"\7" + number.to_bytes(31, "big"), "c")
    assert claims.claim(space, 1, key, "a") == AT_STORE, "the oldest is forgotten"


def test_few_nodes_read_from_each_and_none_is_far_from_the_one_that_loads() -> None:
    claims, nodes_of = Claims(lambda: 100.0), [f"node{at}" for at in range(40)]
    places = {node: claims.claim(bytes(32), 1, bytes(32), node) for node in nodes_of}
    sources = Counter(place.source for place in places.values())
    assert sources.pop("") == 1 and max(sources.values()) == READERS_EACH
    for node, place in places.items():
        again = claims.claim(bytes(32), 1, bytes(32), node)
        assert again[:2] == place[:2] and again.nodes in (1, 40), "it asks once more"
        if place.source:
            assert place.depth == places[place.source].depth + 1 <= 5, "so nobody waits for one that waits for it"


def test_a_crowd_of_names_takes_no_more_memory() -> None:
    claims = Claims(lambda: 100.0)
    for number in range(3 * MOST_NODES):
        assert claims.claim(bytes(32), 1, bytes(32), f"node{number}").depth < 9
    (herd,) = claims._herds.values()
    assert len(herd.nodes) <= MOST_NODES + 1


def test_all_nodes_have_the_same_keeper_and_one_that_goes_moves_its_own_keys_alone() -> None:
    keys = [number.to_bytes(32, "big") for number in range(400)]
    four = ["a:1", "b:1", "c:1", "d:1"]
    before = [keeper_of(key, four) for key in keys]
    assert before == [keeper_of(key, reversed(four)) for key in keys]
    assert all(before.count(node) > 50 for node in four)
    after = [keeper_of(key, four[:3]) for key in keys]
    assert all(new == old or old == "d:1" for new, old in zip(after, before, strict=True))


def test_a_server_of_an_earlier_release_understands_a_read() -> None:
    """It refuses fields that it does not know, and they are sent only to servers that tell their `node`."""
    read = PeerRead(namespace="00" * 32, generation=1, keys=bytes(32), address="10.0.0.11")
    assert set(msgspec.to_builtins(read)) == {"namespace", "generation", "keys", "address"}
