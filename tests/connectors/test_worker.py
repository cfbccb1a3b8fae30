"""Copies that fail: the load is a miss, the store is aborted, and neither holds anything at the server."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from api_helpers import ServerProcess, eventually
from connector_helpers import BLOCK, CHUNK, PER_CHUNK, Rig, Spectator, tokens_of
from same_tokens_helpers import bf16_config

from kvdock.client.client import Client
from kvdock.connectors.plans import LoadPiece
from kvdock.connectors.ranks import Answer, Order, Peers
from kvdock.connectors.worker import FIRST_PARTS, Bands, Loading, Own
from kvdock.datapath.joint import whole_of
from kvdock.engine.kv_cache import KVCache
from kvdock.protocol import schemas as s
from kvdock.shm.objects import SHM_DIR, unlink


def test_a_segment_that_cannot_be_mapped_fails_its_copies_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess() as server, Client(server.unix) as client, Rig(server.unix) as rig:
        tokens = tokens_of(7, 4)
        rig.store("w", tokens, range(16))
        hit = rig.lookup("r", tokens)
        assert hit == 4 * CHUNK
        for known in rig.attachment.segments.segments:
            rig.attachment.segments.detach(known.id)
            unlink(known.name)

        def held() -> tuple[int, int, int]:
            status = client.status()
            return status.leases, status.reservations, status.chunks.reserved

        assert rig.load("r", range(64, 80), 0, hit).valid_tokens == 0
        rig.store("v", tokens_of(8, 4), range(16, 32))
        eventually(lambda: held() == (0, 0, 0))
        assert not [record for record in caplog.records if record.levelno > logging.WARNING]
        assert rig.attachment is not None, "the session goes on"


def of_length(length: int) -> Callable[[LoadPiece], LoadPiece]:
    def changed(piece: LoadPiece) -> LoadPiece:
        return replace(piece, parts=tuple(msgspec.structs.replace(part, length=length) for part in piece.parts))

    return changed


@pytest.mark.security
@pytest.mark.parametrize("changed", [
    of_length(8), of_length(1 << 20), lambda piece: replace(piece, parts=()),
    lambda piece: replace(piece, block_ids=piece.block_ids * 2),
], ids=["shorter", "longer", "none", "more blocks"])  # fmt: skip
def test_a_part_that_is_not_as_long_as_what_is_copied_is_a_miss(
    changed: Callable[[LoadPiece], LoadPiece], server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(server.unix, salt=str(changed)) as rig:
        tokens = tokens_of(9, 2)
        rig.store("w", tokens, range(2 * PER_CHUNK))
        hit = rig.lookup("r", tokens)
        before = rig.blocks(range(64, 64 + 2 * PER_CHUNK))
        begun = rig.connector.scheduler.lookups.begin_load("r", [range(64, 64 + 2 * PER_CHUNK)], 0, hit)
        assert begun is not None
        attachment, plan = begun
        plan = replace(plan, pieces=(*plan.pieces[:-1], changed(plan.pieces[-1])))
        assert rig.connector.worker.load(attachment, plan) == 0
        attachment.release()
        assert torch.equal(rig.blocks(range(64, 64 + 2 * PER_CHUNK)), before), "nothing is copied"
        assert "load request=r failed: " in caplog.text
        assert rig.lookup("again", tokens) == hit, "the chunks are not to blame"


def test_a_load_by_layers_is_one_copy(server: ServerProcess) -> None:
    """Else all layers of some chunks would come before the first layer of the others."""
    with Rig(server.unix, salt="bands", num_blocks=256) as rig:
        chunks = FIRST_PARTS + 2
        tokens, into = tokens_of(13, chunks), range(128, 128 + chunks * PER_CHUNK)
        rig.store("w", tokens, range(chunks * PER_CHUNK))
        for bands, copies in ((None, [FIRST_PARTS, 2]), ([Bands([1, 2], 0)], [chunks])):
            hit = rig.lookup(f"r{bands}", tokens)
            begun = rig.connector.scheduler.lookups.begin_load(f"r{bands}", [into], 0, hit)
            assert begun is not None
            loading = rig.connector.worker.submit_load(*begun, bands)
            assert rig.connector.worker.finish_load(loading) == hit == len(tokens)
            assert [len(pieces) for _, pieces, _ in loading.copies] == copies
            rig.connector.worker.end_load(loading)
            begun[0].release()


@pytest.mark.parametrize("pack", ["off", "on"])
def test_loads_of_one_forward_pass_are_one_copy_and_each_has_a_verdict_of_its_own(
    pack: str, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """One is whole, one damaged, one cannot be described, and one shares its first blocks with a running request."""
    shared = PER_CHUNK + 1
    each, kinds = 2 * PER_CHUNK, ("whole", "damaged", "cannot", "shared")
    kv = KVCache(bf16_config("mha"))
    with Rig(server.unix, salt=f"together {pack}", kv=kv, pack=pack) as rig, Client(server.unix) as client:
        rig.fill(0)
        worker, loads = rig.connector.worker, []
        (group,) = worker.session.manifest.groups
        assert (group.slot_bytes < group.part_bytes) is (pack == "on")
        stored = {kind: range(at * each, (at + 1) * each) for at, kind in enumerate(kinds)}
        into = {kind: range(128 + at * each, 128 + (at + 1) * each) for at, kind in enumerate(kinds)}
        for at, kind in enumerate(kinds):
            tokens = tokens_of(20 + at, 2)
            rig.store(f"w-{kind}", tokens, stored[kind])
            if kind == "damaged":
                with Spectator(client, worker.session.manifest) as spectator:
                    spectator.flip(spectator.slots(tokens)[1], 12345)
            local = shared * BLOCK if kind == "shared" else 0
            begun = rig.connector.scheduler.lookups.begin_load(
                kind, [into[kind]], local, rig.lookup(kind, tokens, local)
            )
            assert begun is not None
            loads.append(begun)
        loads[2] = loads[2][0], replace(loads[2][1], pieces=(replace(loads[2][1].pieces[0], parts=()),))
        before = {kind: rig.blocks(blocks) for kind, blocks in into.items()}
        loadings = worker.submit_together(loads)
        assert [worker.finish_load(loading) for loading in loadings] == [2 * CHUNK, CHUNK, 0, 2 * CHUNK]
        assert [loading.damaged for loading in loadings] == [[], [1], [], []]
        handles = [handle for loading in loadings for _, _, handle in loading.copies]
        assert len(handles) == 3 and len({whole_of(handle) for handle in handles}) == 1
        took = [loading.took_s() for loading in loadings]
        assert took[2] is None and took[0] == took[1] and (took[3] or 0) > 0
        assert torch.equal(rig.blocks(into["whole"]), rig.blocks(stored["whole"]))
        assert torch.equal(rig.blocks(into["cannot"]), before["cannot"]), "nothing is copied"
        assert torch.equal(rig.blocks(into["shared"][:shared]), before["shared"][:, :shared])
        assert torch.equal(rig.blocks(into["shared"][shared:]), rig.blocks(stored["shared"][shared:]))
        assert "load request=cannot failed" in caplog.text
        for loading in loadings:
            worker.end_load(loading)
            worker.settle(loading.attachment)
            loading.attachment.release()
        eventually(lambda: client.status().leases == 0)


def test_copies_that_were_submitted_before_something_unexpected_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they would write to blocks that the engine gives to others, and read slots without a lease."""
    with Rig(server.unix, salt="unexpected", num_blocks=256) as rig:
        chunks, worker = FIRST_PARTS + 2, rig.connector.worker
        tokens, into = tokens_of(14, chunks), range(128, 128 + chunks * PER_CHUNK)
        rig.store("w", tokens, range(chunks * PER_CHUNK))
        begun = rig.connector.scheduler.lookups.begin_load("r", [into], 0, rig.lookup("r", tokens))
        assert begun is not None
        submit, ranges = worker._submit, list[range]()

        def fails_later(loading: Loading, own: Own, loader: Any, some: range, *more: Any) -> None:
            ranges.append(some)
            if len(ranges) > 1:
                raise RuntimeError("unexpected")
            submit(loading, own, loader, some, *more)

        monkeypatch.setattr(worker, "_submit", fails_later)
        loading = worker.submit_load(*begun)
        assert loading.lost and len(loading.copies) == 1 and "load request=r failed" in caplog.text
        assert worker.finish_load(loading) == 0 and all(copy.done() for _, _, copy in loading.copies)
        worker.end_load(loading)
        worker.settle(begun[0])
        begun[0].release()
        with Client(server.unix) as client:
            eventually(lambda: client.status().leases == 0)


@pytest.mark.security
def test_a_slot_that_is_not_as_long_as_our_part_is_not_written(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with Rig(server.unix, salt="write") as rig, Client(server.unix) as client:
        reserve = rig.connector.session.client.reserve

        def longer(body: s.Reserve) -> s.ReserveAnswer:
            got = reserve(body)
            for chunk in got.chunks:
                chunk.parts[:] = [msgspec.structs.replace(part, length=part.length + 4096) for part in chunk.parts]
            return got

        monkeypatch.setattr(rig.connector.session.client, "reserve", longer)
        rig.store("w", tokens_of(10, 2), range(2 * PER_CHUNK))
        assert "store request=w failed: part of group 0 by writer 0: found " in caplog.text
        eventually(lambda: client.status().reservations == 0)
        assert rig.lookup("r", tokens_of(10, 2)) == 0


@pytest.mark.security
def test_a_segment_that_was_cut_short_is_a_miss_and_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with ServerProcess() as server, Rig(server.unix) as rig:
        tokens = tokens_of(11, 2)
        rig.store("w", tokens, range(2 * PER_CHUNK))
        hit = rig.lookup("r", tokens)
        for known in rig.attachment.segments.segments:
            os.truncate(f"{SHM_DIR}{known.name}", 4096)
        assert rig.load("r", range(64, 64 + 2 * PER_CHUNK), 0, hit).valid_tokens == 0
        rig.store("v", tokens_of(12, 2), range(2 * PER_CHUNK))
        assert "load request=r failed: segment " in caplog.text and "store request=v failed: segment " in caplog.text


def test_a_load_is_valid_as_far_as_on_the_rank_that_got_least_and_nowhere_if_a_rank_is_lost() -> None:
    orders: list[Order] = []

    def post(rank: int, order: Order) -> bool:
        orders.append(order)
        return True

    peers = Peers((1, 2, 3), post)
    for last, wanted in ((48, 16), (None, 0)):
        barrier = peers.send(None, None, below=4)
        number = orders[-1].number
        for rank, tokens in ((1, 64), (2, 16)):
            peers.answered(Answer(number, rank, is_started=True, valid_tokens=tokens))
        if last is None:
            peers.lost(3)
        else:
            peers.answered(Answer(number, 3, is_started=True, valid_tokens=last))
        assert barrier.wait() == (wanted, [])
