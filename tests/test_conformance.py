"""Our own connector passes the conformance kit, and broken ones do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from api_helpers import ServerProcess, unique

from kvdock.connectors import conformance
from kvdock.connectors.conformance import Bench
from kvdock.connectors.connector import ConnectorSettings, KvdockConnector
from kvdock.connectors.interface import Progress
from kvdock.connectors.session import Identity
from kvdock.engine.config import preset
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import connect


class OurSubject:
    """KvdockConnector over the small engine's KV memory."""

    def __init__(self, address: str, name: str, wrap: Callable[[KvdockConnector], KvdockConnector]) -> None:
        config = preset("tiny")
        self.label = unique(name)
        self.chunk_tokens, self.block_tokens, self.num_blocks = 64, config.block_tokens, config.num_blocks
        self.kv = KVCache(config)
        identity = Identity(self.label, self.label, label=self.label)
        self.connector = wrap(
            connect(config, self.kv, ConnectorSettings(address), identity, chunk_tokens=self.chunk_tokens)
        )

    def fill(self, block: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for plane in (*self.kv.k, *self.kv.v):
            plane[block] = torch.randn(plane[block].shape, generator=source)

    def contents(self, block: int) -> bytes:
        return b"".join(plane[block].contiguous().numpy().tobytes() for plane in (*self.kv.k, *self.kv.v))

    def close(self) -> None:
        self.connector.close()


SEEDS = itertools.count(7)


def bench_of(server: ServerProcess, wrap: Callable[[KvdockConnector], KvdockConnector] = lambda c: c) -> Bench:
    return Bench(lambda name: OurSubject(server.unix, name, wrap), server.unix, seed=next(SEEDS))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_our_connector_conforms(server: ServerProcess, check: Callable[[Bench], None]) -> None:
    check(bench_of(server))


def writes_shared_blocks(connector: KvdockConnector) -> KvdockConnector:
    """Loads the whole hit whatever the engine holds itself."""
    lookup, begin_load = connector.lookup, connector.begin_load
    connector.lookup = lambda request, tokens, local: lookup(request, tokens, 0)  # type: ignore[method-assign]  # broken on purpose
    connector.begin_load = lambda request, blocks, local, hit: begin_load(request, blocks, 0, hit)  # type: ignore[method-assign]  # broken on purpose
    return connector


def reports_twice(connector: KvdockConnector) -> KvdockConnector:
    poll = connector.poll

    def doubled(timeout_s: float = 0.0) -> Progress:
        found = poll(timeout_s)
        return Progress(found.loads * 2, found.stores * 2)

    connector.poll = doubled  # type: ignore[method-assign]  # broken on purpose
    return connector


def stores_the_wrong_blocks(connector: KvdockConnector) -> KvdockConnector:
    begin_store = connector.begin_store

    def shifted(request: str, tokens: Sequence[int], blocks: Sequence[int], computed: int) -> tuple[int, ...]:
        return begin_store(request, tokens, [*blocks[1:], blocks[0]], computed)

    connector.begin_store = shifted  # type: ignore[method-assign]  # broken on purpose
    return connector


def never_cancels(connector: KvdockConnector) -> KvdockConnector:
    connector.finished = lambda request: None  # type: ignore[method-assign]  # broken on purpose
    return connector


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (writes_shared_blocks, conformance.blocks_the_engine_shares_are_never_written),
        (reports_twice, conformance.what_one_stores_another_loads_byte_for_byte),
        (stores_the_wrong_blocks, conformance.what_one_stores_another_loads_byte_for_byte),
        (never_cancels, conformance.nothing_is_held_when_all_requests_have_ended),
    ],
    ids=lambda item: item.__name__,
)
def test_a_broken_connector_is_found_out(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, broken: Callable[[KvdockConnector], KvdockConnector],
    check: Callable[[Bench], None],
) -> None:
    monkeypatch.setattr(conformance, "ANSWER_S", 1.0)
    with pytest.raises(AssertionError):
        check(bench_of(server, broken))
