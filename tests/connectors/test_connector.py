"""The verbs of the connector against a real server: what begins ends exactly once, asking is free, leases end."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from api_helpers import MIB, ServerProcess, eventually, unique
from connector_helpers import (
    CHUNK,
    PER_CHUNK,
    Rig,
    Spectator,
    connector_over,
    no_trace,
    own_threads,
    tokens_of,
)
from engine_helpers import config

from kvdock.client.client import Client
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.errors import LayoutMismatchError, RefusedError
from kvdock.connectors.interface import Hit, Miss, Pending
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import paged_layout
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of
from kvdock.protocol.admin_schemas import PatchConfig
from kvdock.protocol.schemas import listed_id

SECOND = tuple(range(32, 64))
"""Blocks to load into; stores read blocks 0…31."""


@pytest.fixture
def rig(server: ServerProcess) -> Iterator[Rig]:
    with Rig(server.unix) as one:
        yield one


def leases_of(client: Client, rig: Rig) -> list[str]:
    return [lease.grant for lease in client.leases().leases if lease.session == listed_id(rig.attachment.session)]


def stored(rig: Rig, seed: int, chunks: int, tail: int = 5) -> list[int]:
    tokens = tokens_of(seed, chunks, tail)
    rig.store(unique("store"), tokens, range(chunks * PER_CHUNK + 1))
    return tokens


# ---------------------------------------------------------------------- loads and stores


def test_what_was_stored_is_loaded_bit_for_bit_and_nothing_else_is_written(rig: Rig) -> None:
    tokens = stored(rig, 1, 3)
    before = rig.blocks(range(128))
    assert rig.lookup("r", tokens) == 3 * CHUNK
    done = rig.load("r", SECOND[: 3 * PER_CHUNK], 0, 3 * CHUNK)
    assert done.valid_tokens == 3 * CHUNK
    after = rig.blocks(range(128))
    assert torch.equal(after[:, 32 : 32 + 12], before[:, :12])
    untouched = [*range(32), *range(44, 128)]
    assert torch.equal(after[:, untouched], before[:, untouched])


def test_a_load_writes_no_block_before_the_local_hit_even_in_the_middle_of_a_chunk(rig: Rig) -> None:
    tokens = stored(rig, 2, 3)
    before = rig.blocks(range(128))
    assert rig.lookup("r", tokens, 96) == 192
    assert rig.load("r", SECOND[:12], 96, 192).valid_tokens == 192
    after = rig.blocks(range(128))
    assert torch.equal(after[:, 32:38], before[:, 32:38]), "a block of the local hit was written"
    assert torch.equal(after[:, 38:44], before[:, 6:12])


def test_every_begin_is_answered_exactly_once_also_without_a_lookup_or_a_second_time(rig: Rig) -> None:
    tokens = stored(rig, 3, 2)
    rig.connector.begin_load("stranger", [SECOND[:8]], 0, 128)
    assert rig.wait_load("stranger").valid_tokens == 0
    assert rig.lookup("r", tokens, 16) == 128
    rig.connector.begin_load("r", [SECOND[:8]], 16, 128)
    rig.connector.begin_load("r", [SECOND[:8]], 16, 128)
    assert {rig.wait_load("r").valid_tokens, rig.wait_load("r").valid_tokens} == {128, 16}
    rig.poll(0.2)
    assert (rig.loads, rig.stores) == ([], [])


def test_a_chunk_is_offered_once_and_a_tail_never(rig: Rig) -> None:
    tokens = tokens_of(4, 3, 40)
    begin = rig.connector.begin_store
    assert begin("r", tokens, [range(16)], 63) == ()
    first = begin("r", tokens, [range(16)], 64)
    assert first == ((0, 1, 2, 3),)
    assert begin("r", tokens, [range(16)], 64) == ()
    assert begin("r", tokens, [range(16)], 127) == ()
    second = begin("r", tokens, [range(16)], len(tokens))
    assert second == (tuple(range(4, 12)),)
    rig.wait_store("r", first)
    rig.wait_store("r", second)
    assert begin("r", tokens, [range(16)], len(tokens)) == ()
    rig.poll(0.2)
    assert rig.stores == []


def test_copies_that_fail_are_reported_and_their_memory_is_given_back_at_once(rig: Rig, client: Client) -> None:
    tokens = stored(rig, 24, 2)
    assert rig.lookup("r", tokens) == 128
    rig.connector.worker.close()
    assert rig.load("r", SECOND[:8], 16, 128).valid_tokens == 16
    blocks = rig.connector.begin_store("s", tokens_of(25, 2), [range(8)], 128)
    rig.wait_store("s", blocks)

    def held() -> tuple[int, int, int]:
        status = client.status()
        return status.leases, status.reservations, status.chunks.reserved

    eventually(lambda: held() == (0, 0, 0))  # long before the server asks about any of it


def test_what_was_loaded_is_not_offered_again(rig: Rig) -> None:
    tokens = stored(rig, 5, 2)
    longer = tokens[: 2 * CHUNK] + tokens_of(6, 1)
    assert rig.lookup("r", longer) == 128
    rig.load("r", SECOND[:8], 0, 128)
    assert rig.connector.begin_store("r", longer, [SECOND[:12]], 192) == (SECOND[8:12],)
    rig.wait_store("r", (SECOND[8:12],))


def test_a_second_engine_storing_the_same_prompt_copies_nothing(
    rig: Rig, server: ServerProcess, client: Client
) -> None:
    tokens = stored(rig, 7, 3)
    before = client.status().counters
    with Rig(server.unix, seed=99) as other:
        other.store("r", tokens, range(13))
    after = client.status().counters
    assert after["stored_chunks"] == before["stored_chunks"]
    assert rig.lookup("r", tokens) == 192
    rig.load("r", SECOND[:12], 0, 192)
    assert torch.equal(rig.blocks(SECOND[:12]), rig.blocks(range(12))), "the second engine's bytes were taken"


def test_a_store_that_finds_no_space_still_reports(client: Client) -> None:
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB, session_cap=0.2) as small, Rig(small.unix) as rig:
        tokens = tokens_of(8, 30)
        blocks = rig.connector.begin_store("r", tokens, [range(120)], len(tokens))
        assert blocks == (tuple(range(120)),)
        rig.wait_store("r", blocks)
        hit = rig.lookup("look", tokens)
        assert 0 < hit < len(tokens), "wanted a store that was cut short"
        assert rig.connector.begin_store("r", tokens, [range(120)], len(tokens)) == (), "a refused chunk came again"


def test_each_load_and_each_store_writes_one_line_for_who_debugs(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvdock.connector")
    tokens = tokens_of(9, 3, 5)
    rig.store("to-store", tokens, range(13))
    assert rig.lookup("to-load", tokens, 64) == 192
    rig.load("to-load", SECOND[:12], 64, 192)
    assert not any("request=" in record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG)
    lines = [record.getMessage() for record in caplog.records]
    [store] = [line for line in lines if line.startswith("store ")]
    [load] = [line for line in lines if line.startswith("load ")]
    assert store.startswith(f"store request=to-store tokens=192 bytes={192 * 512} ms=")
    assert load.startswith(f"load request=to-load tokens=128 bytes={128 * 512} ms=")


# ---------------------------------------------------------------------- lookups and their leases


def test_the_first_question_is_not_answered_and_asking_again_is_free(rig: Rig, client: Client) -> None:
    tokens = stored(rig, 10, 2)
    before = client.status().counters
    assert rig.connector.lookup("r", tokens, 0) == Pending()
    assert rig.lookup("r", tokens) == 128
    for _ in range(50):
        assert rig.connector.lookup("r", tokens, 0) == Hit(128)
    assert len(leases_of(client, rig)) == 1
    after = client.status().counters
    assert after["lookups"] - before["lookups"] == 1
    assert after["lookup_renewals"] == before["lookup_renewals"]


def test_a_prompt_shorter_than_a_chunk_is_answered_at_once(rig: Rig) -> None:
    assert rig.connector.lookup("r", tokens_of(11, 0, 63), 48) == Miss()


def test_a_lease_ends_with_its_load(rig: Rig, client: Client) -> None:
    tokens = stored(rig, 12, 2)
    rig.lookup("r", tokens)
    assert len(leases_of(client, rig)) == 1
    rig.load("r", SECOND[:8], 0, 128)
    eventually(lambda: leases_of(client, rig) == [])
    assert client.status().pool.held_bytes == 0


@pytest.mark.parametrize("answered", [True, False])
def test_the_lease_of_a_request_that_went_away_is_cancelled(rig: Rig, client: Client, answered: bool) -> None:
    tokens = stored(rig, 13, 2)
    if answered:
        rig.lookup("r", tokens)
        assert len(leases_of(client, rig)) == 1
    else:
        rig.connector.lookup("r", tokens, 0)
    rig.connector.finished("r")
    rig.connector.finished("r")
    rig.lookup("another", tokens_of(14, 1))  # lookups are sent in order: the one before has been answered
    eventually(lambda: leases_of(client, rig) == [])


def test_a_lease_is_given_back_when_the_local_hit_has_grown_past_it(rig: Rig, client: Client) -> None:
    """While a request waited for its answer another one computed the same prefix."""
    tokens = stored(rig, 15, 2)
    assert rig.lookup("r", tokens, 0) == 128
    assert rig.lookup("r", tokens, 128) == 128
    eventually(lambda: leases_of(client, rig) == [])
    assert rig.lookup("r", tokens, 0) == 128, "the local hit was lost again: the chunks can still be had"
    assert rig.load("r", SECOND[:8], 0, 128).valid_tokens == 128


def test_a_lookup_with_less_local_gets_the_chunks_in_front_too(rig: Rig, client: Client) -> None:
    tokens = stored(rig, 16, 3)
    assert rig.lookup("r", tokens, 128) == 192
    assert rig.lookup("r", tokens, 0) == 192
    assert len(leases_of(client, rig)) == 1
    before = rig.blocks(range(12))
    assert rig.load("r", SECOND[:12], 0, 192).valid_tokens == 192
    assert torch.equal(rig.blocks(SECOND[:12]), before)


@pytest.mark.parametrize("forgotten", [True, False])
def test_after_preemption_a_higher_epoch_gets_a_lease_of_its_own(rig: Rig, client: Client, forgotten: bool) -> None:
    tokens = stored(rig, 17, 2)
    rig.lookup("r", tokens)
    [first] = client.leases().leases
    rig.connector.begin_load("r", [SECOND[:8]], 0, 128)
    if forgotten:
        rig.connector.finished("r")  # preempted before the news of the load was taken in
    assert rig.lookup("r", tokens) == 128
    rig.wait_load("r")
    eventually(lambda: len(leases_of(client, rig)) == 1)
    [second] = client.leases().leases
    assert second.grant != first.grant and second.epoch > first.epoch
    assert second.remaining == [0], "the late release of the first load touched the second lease"
    assert rig.load("r", SECOND[8:16], 0, 128).valid_tokens == 128


def test_a_local_hit_longer_than_what_is_stored_is_a_miss_without_an_error(rig: Rig, client: Client) -> None:
    tokens = stored(rig, 18, 1, tail=60)
    assert rig.lookup("r", tokens, 112) == 112
    assert leases_of(client, rig) == []


def test_an_answer_to_a_request_that_went_and_came_back_is_not_taken_for_the_new_ones(
    rig: Rig, client: Client
) -> None:
    tokens = stored(rig, 22, 2)
    for _ in range(3):
        assert rig.connector.lookup("r", tokens, 0) == Pending()
        rig.connector.finished("r")
    assert rig.lookup("r", tokens) == 128
    eventually(lambda: len(leases_of(client, rig)) == 1)  # releases go out beside lookups, in no order with them
    assert rig.load("r", SECOND[:8], 0, 128).valid_tokens == 128
    eventually(lambda: leases_of(client, rig) == [])


# ---------------------------------------------------------------------- damage


def test_a_damaged_chunk_ends_the_valid_part_is_reported_and_not_offered_again(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = stored(rig, 19, 3)
    before = client.status().counters["mismatches"]
    with Spectator(client, rig.connector.session.manifest) as spectator:
        spectator.flip(spectator.slots(tokens)[1], 12345)
        assert rig.lookup("r", tokens) == 192
        assert rig.load("r", SECOND[:12], 0, 192).valid_tokens == 64
        assert client.status().counters["mismatches"] == before + 1
        assert "checksum mismatch in chunks [1]" in caplog.text
        assert len(spectator.slots(tokens)) == 1
        assert rig.lookup("again", tokens) == 64
        rig.connector.finished("again")
        # The request recomputes and offers what failed, but not what it loaded.
        assert rig.connector.begin_store("r", tokens, [range(13)], 192) == (tuple(range(4, 12)),)
        rig.wait_store("r", (tuple(range(4, 12)),))
        assert len(spectator.slots(tokens)) == 3


# ---------------------------------------------------------------------- attaching


def test_a_layout_that_does_not_yield_the_manifests_parts_is_refused_with_both_values(server: ServerProcess) -> None:
    kv = KVCache(config())
    layout = paged_layout(kv.format, kv.tensors, block_tokens=16)
    good = manifest_of(kv.config, layout, CHUNK)
    settings, identity = ConnectorSettings(server.unix), Identity("i", "m")
    wrong_parts = msgspec.structs.replace(good, chunk_tokens=32)
    with pytest.raises(LayoutMismatchError, match=r"found 16384 .*wanted 32768"):
        EngineConnector(settings, wrong_parts, identity, [layout])
    wrong_order = msgspec.structs.replace(good, token_order="HND")
    with pytest.raises(LayoutMismatchError, match=r"found NHD, wanted HND"):
        EngineConnector(settings, wrong_order, identity, [layout])
    assert own_threads() == []


def test_a_refused_engine_is_told_why_and_leaves_nothing_behind(server: ServerProcess, rig: Rig) -> None:
    taken = rig.connector.session.identity.instance
    with no_trace():
        for _ in range(3):
            with pytest.raises(RefusedError, match="layout_mismatch"):
                connector_over(KVCache(config()), server.unix, salt="other", instance=taken)


def test_twenty_connectors_leave_no_descriptor_thread_mapping_or_member_behind(
    server: ServerProcess, client: Client
) -> None:
    kv = KVCache(config(num_blocks=8))

    def one_life() -> None:
        with Rig(server.unix, kv=kv, label="loop") as one:
            tokens = tokens_of(100, 1, 3)
            one.store("r", tokens, range(5))
            assert one.lookup("s", tokens) == 64
            one.load("s", range(4), 0, 64)
            one.lookup("unused", tokens)

    one_life()
    with no_trace():
        for _ in range(20):
            one_life()
    assert client.status().sessions == 0
    assert client.leases().leases == []


def test_closing_waits_for_the_copies_that_were_begun(server: ServerProcess, client: Client) -> None:
    tokens = tokens_of(20, 30)
    rig = Rig(server.unix)
    blocks = rig.connector.begin_store("r", tokens, [range(120)], len(tokens))
    rig.close()
    rig.close()
    rig.poll()
    assert [(done.request_id, done.block_ids) for done in rig.stores] == [("r", blocks)]
    with Rig(server.unix) as other:
        assert other.lookup("r", tokens) == len(tokens)


def test_without_a_server_everything_is_a_miss_and_it_is_found_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess() as server:
        address = server.unix
        server.stop()
        with Rig(address) as rig:
            tokens = tokens_of(21, 2)
            assert rig.connector.lookup("r", tokens, 32) == Miss()
            assert rig.connector.begin_store("r", tokens, [range(8)], 128) == ()
            rig.connector.begin_load("r", [range(8)], 32, 128)
            assert rig.wait_load("r").valid_tokens == 32
            with ServerProcess(socket_path=address.removeprefix("unix:")):
                eventually(lambda: rig.connector.session.attachment is not None)
                rig.store("r", tokens, range(8))
                assert rig.lookup("s", tokens) == 128


def test_a_store_that_fell_short_is_offered_from_the_gap_on_once_there_is_more() -> None:
    """Chunks behind one that found no room could not be found, so they come after it."""
    tokens, blocks = tokens_of(5, chunks=8), tuple(range(8 * PER_CHUNK))
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB, session_cap=0.2) as small, Rig(small.unix) as rig:
        rig.wait_store("r", rig.connector.begin_store("r", tokens, [blocks], 7 * CHUNK))
        with Client(small.unix) as client:
            before = client.status().counters
            assert 0 < (stored := before["stored_chunks"]) < 7
            assert rig.connector.begin_store("r", tokens, [blocks], 7 * CHUNK) == ()
            assert client.status().counters["reservations"] == before["reservations"]
            held = rig.connector.begin_store("r", tokens, [blocks], len(tokens))
            assert held == (blocks[stored * PER_CHUNK :],)
            rig.wait_store("r", held)
            assert client.status().counters["stored_chunks"] == 8


def test_what_found_no_room_is_stored_when_its_request_ends() -> None:
    tokens, blocks = tokens_of(5, chunks=8), tuple(range(8 * PER_CHUNK))
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB, session_cap=0.2) as small, Rig(small.unix) as rig:
        rig.wait_store("r", rig.connector.begin_store("r", tokens, [blocks], len(tokens)))
        stored = rig.lookup("look", tokens) // CHUNK
        rig.connector.finished("look")
        scheduler = rig.connector.scheduler
        offer = scheduler.stores.begin_last_store("r", [blocks], len(tokens))
        assert offer is not None and offer.reads == (blocks[stored * PER_CHUNK :],)
        offer.attachment.release()
        assert scheduler.stores.begin_last_store("r", [blocks], len(tokens)) is None, "it came again"


def test_nothing_is_stored_behind_a_store_that_fell_short() -> None:
    tokens, blocks = tokens_of(5, chunks=80), tuple(range(80 * PER_CHUNK))
    with ServerProcess(pool_bytes=MIB, segment_bytes=MIB, session_cap=0.2) as small, Rig(small.unix) as rig:
        scheduler = rig.connector.scheduler
        first = scheduler.stores.begin_store("r", tokens, [blocks], len(tokens))
        assert first is not None
        scheduler.stores._fell_short(first, 0)
        last = scheduler.stores.begin_last_store("r", [blocks], len(tokens))
        assert last is not None and len(last.batches) == 3
        scheduler.finished("r")
        one = scheduler.stores.reserve(last, last.batches[0])
        assert one is not None and one.tokens < len(last.batches[0].keys) * CHUNK, "it fell short"
        scheduler.session.client.configure(PatchConfig(session_cap=0.9))
        assert [scheduler.stores.reserve(last, batch) for batch in last.batches[1:]] == [None, None]
        for offer in (first, last):
            offer.attachment.release()


def test_a_connector_beats_in_time_while_it_maps_what_the_pool_grows() -> None:
    sizes = {"pool_bytes": 4 * MIB, "segment_bytes": MIB, "heartbeat_s": 0.2}
    with ServerProcess(**sizes) as server, Rig(server.unix) as rig:
        client, at = rig.connector.session.client, list[float]()
        beat = client.heartbeat

        def noted(*arguments: Any, **named: Any) -> Any:
            at.append(time.monotonic())
            return beat(*arguments, **named)

        client.heartbeat = noted  # type: ignore[method-assign]  # sent, its moment kept
        for number in range(3):
            rig.store(f"s{number}", tokens_of(80 + number, 25), range(100))
        seen = len(at)
        eventually(lambda: len(at) >= seen + 10)
    gaps = sorted(later - one for one, later in itertools.pairwise(at))
    assert gaps[len(gaps) // 2] < 2 * 0.2, "half of them at least; the machine may stand still in some"
