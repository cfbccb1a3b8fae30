"""What a server keeps for the next one, damaged: it is read as it was written, or not at all, and no start fails."""

from __future__ import annotations

import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from adoption_helpers import next_at
from api_helpers import ServerProcess, attach, kept_of, keys
from connector_helpers import mortal

from kvdock.api.access.access_file import AccessFile
from kvdock.api.build import build
from kvdock.api.clock import Clocks
from kvdock.api.pool.lock import remove_stale
from kvdock.api.pool.pool import open_pool
from kvdock.api.settings import Settings
from kvdock.api.tiers.clears import OrderFile
from kvdock.client.client import Client
from kvdock.protocol.admin_schemas import AskedQuota, PatchConfig
from kvdock.protocol.mover_schemas import Order
from kvdock.shm.objects import Kept

pytestmark = pytest.mark.security
FLIPS = 150
QUOTA = 8 << 30


@pytest.fixture(scope="module")
def left() -> Iterator[ServerProcess]:
    """A server that has left its pool, with a namespace and a quota."""
    with ServerProcess(on_exit="keep") as server:
        with Client(server.unix) as client:
            engine = attach(client, served_model_name="kept-model")
            engine.store(keys(4, "kept"))
            engine.leave()
            client.configure(PatchConfig(tenants={"a": AskedQuota(bytes=QUOTA, sessions=4)}))
        server.stop(signal.SIGTERM)
        yield server
        remove_stale(spare=lambda one: one.pool_id != server.pool_id)


def flipped(content: bytes, source: random.Random) -> bytes:
    out = bytearray(content)
    out[source.randrange(len(out))] ^= 1 << source.randrange(8)
    return bytes(out)


def found_by_the_next(server: ServerProcess) -> tuple[object, object]:
    """Its quotas and namespaces."""
    settings = Settings.load(server.settings)
    pool = open_pool(settings, secrets.randbits)
    assert pool.pool_id == server.pool_id
    try:
        keeper = build(settings, pool, AccessFile(""), Clocks()).keeper
        spaces = [(one.manifest, one.tenant, one.model, one.base) for one in keeper._registry.namespaces()]
        return keeper._quotas.of("a"), spaces
    finally:
        pool.leave()


@pytest.mark.parametrize("what", ["history", "curve"])
def test_one_flipped_bit_costs_no_start_and_nothing_is_taken_for_what_was_kept(left: ServerProcess, what: Kept) -> None:
    path, source = kept_of(left.pool_id, what), random.Random(f"{what} 39")
    whole, wanted = path.read_bytes(), found_by_the_next(left)
    assert "bytes=8589934592" in str(wanted[0]) and "kept-model" in str(wanted[1])
    path.unlink()
    none = found_by_the_next(left)
    try:
        for _ in range(FLIPS):
            path.touch(mode=0o600)
            path.write_bytes(flipped(whole, source))
            assert found_by_the_next(left) == none
    finally:
        path.write_bytes(whole)
    assert found_by_the_next(left) == wanted, "it was left out because it was damaged"


def test_a_damaged_order_to_tiers_clears_them_and_is_never_another_order(tmp_path: Path) -> None:
    path, source = tmp_path / "kvdock.sock.orders", random.Random(39)
    orders = OrderFile(path)
    orders.write([Order(number=3, namespace="ab" * 32, tiers=["disk"], least=7, keys=b"k" * 64)])
    whole = path.read_bytes()
    assert [one.least for one in orders.read(["disk"])] == [7]
    for _ in range(1000):
        path.write_bytes(flipped(whole, source))
        (order,) = orders.read(["disk", "redis"])
        assert (order.namespace, order.keys, order.tiers) == ("", b"", ["disk", "redis"])


def test_orders_that_were_kept_before_there_were_seals_are_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "kvdock.sock.orders"
    kept = Order(number=3, namespace="ab" * 32, tiers=["disk"], least=7)
    path.write_bytes(msgspec.msgpack.encode({"version": 1, "orders": [kept]}))
    assert OrderFile(path).read(["disk", "redis"]) == [kept], "and all else in the tiers stays"
    path.write_bytes(msgspec.msgpack.encode({"version": 1, "orders": [[[[]]]]}))
    assert [one.namespace for one in OrderFile(path).read(["disk"])] == [""], "it may have named anything"


def test_a_server_starts_and_says_that_quotas_and_history_were_damaged() -> None:
    with mortal(on_exit="keep") as server:
        with Client(server.unix) as client:
            engine = attach(client)
            engine.store(keys(2, "kept"))
            engine.leave()
        server.stop(signal.SIGTERM)
        path = kept_of(server.pool_id, "history")
        whole = path.read_bytes()
        at = whole.index(b'"base":"') + 10
        path.write_bytes(whole[:at] + b"\xf3" + whole[at + 1 :])  # in a key, and no text
        with next_at(server) as second, Client(second.unix) as client:
            assert second.pool_id == server.pool_id, "chunks are there all the same"
            assert "quotas, and the history of hours and days begins anew: " in second.log_text()
            assert attach(client).lookup(keys(2, "kept")).hit_tokens == 32
            second.stop(signal.SIGKILL)
