"""What engines have used and saved, what is cached, and that benchmarks falsify none of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from api_helpers import MIB, NOBODYS, Engine, ServerProcess, access_file, attach, eventually, keys, raw
from prometheus_client.parser import text_string_to_metric_families
from server_fixtures import fresh_server

from kvdock.api.access.access_file import entry
from kvdock.client.client import Client
from kvdock.protocol import schemas as s
from kvdock.protocol.admin_schemas import ClearCache, DeleteChunks
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import Copied, Outcome
from kvdock.protocol.reports import UseTotals

CHUNK_TOKENS, CHUNK_BYTES = 16, 16384

server = fresh_server()


def totals_of(client: Client, engine: Engine) -> UseTotals:
    (view,) = (one for one in client.sessions().sessions if one.session == engine.listed)
    return view.totals


def test_a_session_and_its_namespace_say_what_they_used_and_saved(client: Client) -> None:
    writer, reader = attach(client, label="writer"), attach(client, label="reader")
    chain = keys(4)
    writer.store(chain)
    reader.release(reader.lookup([*chain, *keys(1, "new")], "r1").lease, 0)
    reader.heartbeat(outcomes=[
        Outcome(request="r1", prompt_tokens=90, found_tokens=64, loaded_tokens=64, loaded_bytes=4 * CHUNK_BYTES,
                load_us=20_000, copy_us=5_000, prefill_tokens_per_s=640.0),
        Outcome(request="r2", prompt_tokens=90, found_tokens=64, loaded_tokens=32),
    ])
    assert totals_of(client, writer) == UseTotals(stored_bytes=4 * CHUNK_BYTES)
    wanted = UseTotals(
        lookups=1, lookup_tokens=80, loaded_bytes=4 * CHUNK_BYTES, hits=HitTotals(
            requests=2, prompt_tokens=180, loaded={"memory": 96},
            computed={"never_stored": 16, "not_asked": 48, "tail": 20}, saved_s=0.08,
        ),
    )
    assert totals_of(client, reader) == wanted
    (namespace,) = client.namespaces().namespaces
    assert namespace.totals == msgspec.structs.replace(wanted, stored_bytes=4 * CHUNK_BYTES)
    assert client.status().hits == wanted.hits
    assert client.status().counters["loaded_tokens"] == 96
    writer.close()
    reader.close()


def test_copy_rates_are_those_of_the_last_copies_beside_the_ceiling(client: Client) -> None:
    engine = attach(client)
    for _ in range(30):
        engine.heartbeat(copied=Copied(load_bytes=10 * MIB, load_us=5_000, ceiling_bytes_per_s=8e9))
    for _ in range(30):
        engine.heartbeat(copied=Copied(load_bytes=10 * MIB, load_us=2_500, store_bytes=MIB, store_us=1_000))
    (view,) = client.sessions().sessions
    assert view.copy.load_bytes_per_s == pytest.approx(4000 * MIB, rel=0.02)
    assert view.copy.store_bytes_per_s == pytest.approx(1000 * MIB)
    assert view.copy.ceiling_bytes_per_s == 8e9
    engine.close()


def test_an_engine_that_copied_nothing_has_no_rates(client: Client) -> None:
    engine = attach(client)
    engine.heartbeat()
    (view,) = client.sessions().sessions
    assert (view.copy.load_bytes_per_s, view.copy.store_bytes_per_s, view.copy.ceiling_bytes_per_s) == (None,) * 3
    engine.close()


# --------------------------------------------------------------------------- what is cached


def test_prefixes_are_listed_by_use_with_age_and_size(client: Client) -> None:
    engine = attach(client)
    popular, once = keys(3, "popular"), keys(5, "once")
    for chain in (popular, once):
        engine.store(chain)
    tail = keys(2, "tail")
    engine.store([*popular, *tail])
    for number in range(3):
        engine.release(engine.lookup(popular, f"r{number}").lease, 0)
    engine.release(engine.lookup(once, "other").lease, 0)
    found = client.prefixes()
    assert [one.key for one in found.prefixes] == [popular[0], once[0]] and found.prefix_count == 2
    first = found.prefixes[0]
    assert (first.uses, first.chunks, first.tokens, first.bytes) == (3, 5, 80, 5 * CHUNK_BYTES)
    assert first.namespace == engine.attached.namespace and first.model == "test-model" and first.tenant == ""
    assert (first.last_key, first.last_tokens) == (popular[-1], 48), "what every lookup of it found"
    assert first.age_s is not None and 0 <= first.age_s < 60 and first.unused_s is not None and first.unused_s < 60
    (namespace,) = client.namespaces().namespaces
    assert (namespace.chunks, namespace.bytes) == (10, 10 * CHUNK_BYTES)
    assert namespace.oldest_s is not None and namespace.unused_s is not None
    assert 0 <= namespace.unused_s <= namespace.oldest_s < 60
    assert len(client.prefixes(limit=1).prefixes) == 1
    engine.close()


def test_what_an_operator_takes_out_of_use_is_not_counted_any_more(client: Client) -> None:
    engine = attach(client)
    for name in "abc":
        engine.store(keys(2, name))
    assert client.prefixes().prefix_count == 3
    engine.store(keys(2, "d"))
    assert client.prefixes().prefix_count == 3, "one count serves those who ask within a second"
    client.delete(DeleteChunks(namespace=engine.attached.namespace, keys=[keys(2, "a")[0]]))
    after = client.prefixes()
    assert {one.key for one in after.prefixes} == {keys(2, name)[0] for name in "bcd"} and after.prefix_count == 3
    assert client.namespaces().namespaces[0].chunks == 7, "what came after it is not found, but is there"
    client.clear(ClearCache())
    assert client.prefixes().prefix_count == 0 and client.namespaces().namespaces[0].chunks == 0
    engine.close()


def test_a_pool_that_holds_nothing_has_no_ages(client: Client) -> None:
    engine = attach(client)
    assert client.prefixes().prefixes == [] and client.status().oldest_s is None
    (namespace,) = client.namespaces().namespaces
    assert (namespace.chunks, namespace.oldest_s, namespace.unused_s) == (0, None, None)
    engine.close()


def test_a_tenant_sees_its_own_prefixes_alone(tmp_path: Path) -> None:
    tokens = {name: f"{name}-token-" + "t" * 32 for name in "ab"}
    entries = [entry(name, token, ["engine"], name) for name, token in tokens.items()]
    with ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server:
        for name, token in tokens.items():
            with Client(server.unix, access_token=token) as client:
                engine = attach(client)
                engine.store(keys(2, name))
                engine.close()
        for name, token in tokens.items():
            with Client(server.unix, access_token=token) as client:
                found = client.prefixes()
                assert [(one.key, one.tenant) for one in found.prefixes] == [(keys(2, name)[0], name)]
                assert found.prefix_count == 1
        with Client(server.unix) as operator:
            assert operator.prefixes().prefix_count == 2


# --------------------------------------------------------------------------- benchmarks


def test_what_a_benchmark_does_is_in_no_total_and_goes_with_it(server: ServerProcess, client: Client) -> None:
    engine = attach(client)
    engine.store(keys(2, "real"))
    before = client.status()
    measuring = attach(client, is_bench=True, model="bench-model")
    measuring.store(keys(6, "bench"))
    measuring.release(measuring.lookup(keys(6, "bench"), "rb").lease, 0)
    measuring.lookup(keys(3, "missing"), "missed")
    measuring.heartbeat(outcomes=[Outcome(
        request="rb", prompt_tokens=96, loaded_tokens=96, load_us=10, prefill_tokens_per_s=10.0
    )], copied=Copied(load_bytes=MIB, load_us=1))
    after = client.status()
    changed = {name for name, total in after.counters.items() if total != before.counters[name]}
    assert changed == set() and after.hits == before.hits
    assert all(one.session == engine.listed for one in client.requests().requests)
    assert client.curve().total.lookups == 0
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(raw(server.http, "GET", "/metrics")[2].decode())
        for sample in family.samples
    }
    sources = [value for (name, *_), value in metrics.items() if name == "kvdock_prompt_source_tokens_total"]
    assert sources and not any(sources)
    assert metrics["kvdock_copy_bytes_per_second", "load"] == 0
    views = {one.namespace: one for one in client.namespaces().namespaces}
    assert views[measuring.attached.namespace].is_bench and not views[engine.attached.namespace].is_bench
    assert views[measuring.attached.namespace].totals.stored_bytes == 6 * CHUNK_BYTES
    assert [one.is_bench for one in client.sessions().sessions] == [False, True]
    measuring.close()  # without a word, as if it had been killed
    eventually(lambda: [one.namespace for one in client.namespaces().namespaces] == [engine.attached.namespace])
    assert client.status().chunks.ready == 2, "what engines stored stays"
    engine.close()


def another_goes(client: Client) -> None:
    """A benchmark that ends now is cleared up: so what ended before it would be gone as well."""
    other = attach(client, is_bench=True, model="another")
    other.store(keys(1, "another"))
    other.leave()
    eventually(lambda: all(one.namespace != other.attached.namespace for one in client.namespaces().namespaces))


def test_what_an_engine_shares_with_a_benchmark_stays(client: Client) -> None:
    measuring, engine = attach(client, is_bench=True), attach(client)
    measuring.store(keys(2, "shared"))
    measuring.leave()
    engine.leave()
    another_goes(client)
    assert client.status().chunks.ready == 2
    assert not client.namespaces().namespaces[0].is_bench


def test_a_benchmark_in_an_adopted_namespace_takes_nothing_with_it(server: ServerProcess) -> None:
    with Client(server.unix) as client:
        engine = attach(client)
        engine.store(keys(2, "kept"))
        engine.leave()
    server.stop(9)
    with ServerProcess(**server.settings) as second, Client(second.unix) as client:
        measuring = attach(client, is_bench=True)
        measuring.lookup(keys(2, "kept"), "rb")
        measuring.leave()
        another_goes(client)
        assert client.status().chunks.ready == 2


def test_metrics_name_engines_to_those_who_may_read_alone(tmp_path: Path) -> None:
    token = "reader-token-" + "t" * 32
    entries = [entry("reader", token, ["read"], "")]
    with ServerProcess(access_file=str(access_file(tmp_path, *entries))) as server, Client(server.unix) as client:
        engine = attach(client, label="engine A")
        engine.lookup(keys(2), "r")
        line = 'kvdock_engine_tokens_total{engine="engine A",what="asked"} 32.0'
        assert line not in raw(server.http, "GET", "/metrics", headers=NOBODYS)[2].decode()
        asked = {"Authorization": f"Bearer {token}"}
        assert line in raw(server.http, "GET", "/metrics", headers=asked)[2].decode()
        engine.close()


def test_attaching_says_nothing_of_benchmarks_by_default() -> None:
    assert b"is_bench" not in msgspec.json.encode(s.AttachSession(
        instance="i", manifest=s.Manifest(
            model="m", kv_dtype="f", layers=1, kv_heads=1, head_size=1, chunk_tokens=16, block_tokens=16,
            groups=(s.Group(part_bytes=1),),
        ), member=s.Member(id="m", lock_offset=1),
    ))
