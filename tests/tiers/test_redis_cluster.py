"""The Redis tier over a cluster of three servers: parts go where their keys belong, also after slots have moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from ports import held_port
from redis_server import RedisServer
from redis_subject import opened
from tier_helpers import ARENA, Part, Parts, assert_loads, eventually, outcomes_of, patient, store, store_all, works

from kvdock.tiers.notes import begins
from kvdock.tiers.stores.redis import RedisTier
from kvdock.tiers.stores.redis_nodes import Address, read_slots
from kvdock.tiers.tier import NotAll, Outcome, TierError

pytestmark = pytest.mark.tiers


@pytest.fixture(autouse=True)
def _arena() -> None:
    ARENA.reset()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    servers = []
    try:
        for at in range(3):
            port, bus = held_port(), held_port()
            servers.append(RedisServer(
                folder / str(at), ("127.0.0.1", port), f"port {port}", "cluster-enabled yes", f"cluster-port {bus}",
                "cluster-node-timeout 2000", "cluster-require-full-coverage no",
            ))  # fmt: skip
        clients: list[Any] = [redis.Redis(host="127.0.0.1", port=server.port) for server in servers]
        for at, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", at * 5461, 16383 if at == 2 else at * 5461 + 5460)
            known = (client.config_get(name)[name] for name in ("port", "cluster-port"))
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", *known)
        eventually(lambda: all(
            client.cluster("info")["cluster_state"] == "ok" and len(client.cluster("slots")) == 3 for client in clients
        ))  # fmt: skip
        for client in clients:
            client.close()
        yield servers
    finally:
        for server in servers:
            server.kill()


def test_a_cluster_keeps_each_part_where_its_key_belongs(cluster: list[RedisServer], parts: Parts) -> None:
    port = cluster[1].port
    batch = parts.many(40, 200_001)
    with opened(f"redis://127.0.0.1:{port}?cluster=yes") as tier:
        store_all(tier, batch)
        assert_loads(tier, batch)
        assert tier.exists([part.name for part in batch], patient()) == [True] * 40
        held = []
        for server in cluster:
            with redis.Redis(host="127.0.0.1", port=server.port) as client:
                held.append(client.dbsize())
        assert sum(held) == 40 and min(held) > 0
        assert tier.delete([part.name for part in batch], patient()) == [Outcome.DONE] * 40


def test_a_cluster_behind_a_url_without_cluster_is_told(cluster: list[RedisServer], parts: Parts) -> None:
    port = cluster[0].port
    with opened(f"redis://127.0.0.1:{port}") as tier, pytest.raises(TierError, match="set cluster=yes"):
        for part in parts.many(20, 10):
            store(tier, [part])


def test_one_lost_server_of_a_cluster_costs_its_own_parts_only(cluster: list[RedisServer], parts: Parts) -> None:
    port = cluster[0].port
    batch = parts.many(40, 1000)
    with opened(f"redis://127.0.0.1:{port}?cluster=yes") as tier:
        store_all(tier, batch)
        cluster[2].kill()
        try:
            outcomes = outcomes_of(tier, batch)
            assert {Outcome.DONE, Outcome.FAILED} == set(outcomes)
            kept = [part for part, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.DONE]
            assert_loads(tier, kept)
            assert set(store(tier, parts.many(20, 1000))) == {Outcome.DONE, Outcome.FAILED}
        finally:
            cluster[2].start()
        eventually(lambda: works(lambda: store_all_again(tier, batch)))
        assert_loads(tier, batch)


def test_the_notes_at_the_servers_that_are_left_are_known(cluster: list[RedisServer], parts: Parts) -> None:
    names = [bytes([number]) * 32 for number in range(20)]
    with opened(f"redis://127.0.0.1:{cluster[0].port}?cluster=yes") as tier:
        notes = {name: tier.change(name, begins(1), patient()) for name in names}
        assert tier.notes(names, patient()) == list(notes.values())
        cluster[2].kill()
        try:
            with pytest.raises(NotAll) as caught:
                tier.notes(names, patient())
            known = caught.value.known
            assert 0 < len(known) < len(names) and known.items() <= notes.items()
            lost = next(name for name in names if name not in known)
            with pytest.raises(TierError) as alone:
                tier.notes([lost], patient())
            assert not isinstance(alone.value, NotAll)
        finally:
            cluster[2].start()
        eventually(lambda: works(lambda: tier.notes(names, patient())))


def store_all_again(tier: RedisTier, batch: list[Part]) -> None:
    if set(store(tier, batch)) != {Outcome.DONE}:
        raise TierError(tier.name, "not yet")


def test_a_slot_that_has_moved_is_found_again(cluster: list[RedisServer], parts: Parts) -> None:
    port = cluster[0].port
    one = parts.make(1000)
    slot = redis.crc.key_slot(one.name.text().encode())
    clients: list[Any] = [redis.Redis(host="127.0.0.1", port=server.port) for server in cluster]
    owner = next(at for at, client in enumerate(clients) if slot in read_slots_of(client))
    heir = (owner + 1) % 3
    with opened(f"redis://127.0.0.1:{port}?cluster=yes") as tier:
        assert outcomes_of(tier, [one]) == [Outcome.MISSING]
        heir_id = clients[heir].execute_command("CLUSTER", "MYID").decode()
        for at in (heir, owner, 3 - heir - owner):
            clients[at].execute_command("CLUSTER", "SETSLOT", slot, "NODE", heir_id)
        with pytest.raises(TierError, match="MOVED"):
            store(tier, [one])
        eventually(lambda: works(lambda: store_all(tier, [one])))
        assert_loads(tier, [one])
    for client in clients:
        client.close()


def read_slots_of(client: Any) -> set[int]:
    my_id = client.execute_command("CLUSTER", "MYID").decode()
    slots = client.execute_command("CLUSTER", "SLOTS", NEVER_DECODE=True)
    return {slot for first, last, master, *_ in slots if master[2].decode() == my_id for slot in range(first, last + 1)}


@pytest.mark.parametrize("reply", [None, 7, b"x", [[0]], [[0, 5, []]], [[0, 5, [b"h", b"x"]]], [[0, b"5", [b"h", 1]]]])
def test_what_is_no_list_of_slots_is_refused(reply: Any) -> None:
    with pytest.raises(TierError, match="wanted an answer to CLUSTER SLOTS"):
        read_slots(reply, Address("h", 1))


def test_a_server_without_a_name_is_the_one_that_was_asked() -> None:
    assert read_slots([[0, 1, [b"", 7], [b"replica", 8]]], Address("h", 1)) == {0: Address("h", 7), 1: Address("h", 7)}
