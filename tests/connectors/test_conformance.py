"""Our own connector passes the conformance kit, and broken ones do not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from api_helpers import PATIENCE_S, SOON_S, ServerProcess, unique

from kvdock.connectors import conformance
from kvdock.connectors.conformance import Bench
from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.interface import BlocksRead, Connector, GroupBlocks, LookupResult, Progress
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import paged_layout
from kvdock.engine.config import preset
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.kvdock import manifest_of


class OurSubject:
    """EngineConnector over the small engine's KV memory."""

    def __init__(self, name: str, kind: type[EngineConnector], model: str, settings: ConnectorSettings) -> None:
        config = preset(model)
        self.windows = [group.reach for group in config.model.groups]
        self.label = unique(name)
        self.chunk_tokens, self.block_tokens, self.num_blocks = 64, config.block_tokens, config.num_blocks
        self.kv = KVCache(config)
        identity = Identity(self.label, self.label, label=self.label)
        layout = paged_layout(self.kv.format, self.kv.tensors, block_tokens=self.block_tokens)
        manifest = manifest_of(config, layout, self.chunk_tokens)
        layouts = [layout] * len(self.windows)
        self.connector: Connector = kind(settings, manifest, identity, layouts)

    def fill(self, block: int, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        for plane in self.kv.planes:
            plane[block] = torch.randn(plane[block].shape, generator=source)

    def contents(self, block: int) -> bytes:
        return b"".join(plane[block].contiguous().numpy().tobytes() for plane in self.kv.planes)

    def close(self) -> None:
        self.connector.close()


SEEDS = itertools.count(7)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep any call for a moment. That the kit finds a call that waits, by bounds of its own, is
    shown with WaitsForAnswers."""
    monkeypatch.setattr(conformance, "LONGEST_CALL_S", SOON_S)
    monkeypatch.setattr(conformance, "ANSWER_S", PATIENCE_S)


def bench_of(
    server: ServerProcess, kind: type[EngineConnector] = EngineConnector, model: str = "tiny", **settings: Any
) -> Bench:
    made = ConnectorSettings(server.unix, timeout_s=PATIENCE_S, **settings)
    return Bench(lambda name: OurSubject(name, kind, model, made), server.unix, seed=next(SEEDS))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("model", ["tiny", "tiny-mla", "tiny-hybrid2", "tiny-hybrid3"])
def test_our_connector_conforms(server: ServerProcess, model: str, check: Callable[[Bench], None]) -> None:
    check(bench_of(server, model=model))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_our_connector_conforms_within_limits_and_with_statistics(
    server: ServerProcess, check: Callable[[Bench], None]
) -> None:
    check(bench_of(server, model="tiny-hybrid3", max_load_tokens=4096, min_load_tokens=1, chunk_statistics=True))


class WritesSharedBlocks(EngineConnector):
    """Loads the whole hit whatever the engine holds itself."""

    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        return super().lookup(request_id, token_ids, 0)

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        super().begin_load(request_id, block_ids, 0, hit_tokens)


class WritesWhatWindowsLeftBehind(EngineConnector):
    """Fills every block of the chunks it loads, also those that a window has left behind."""

    def begin_load(self, request_id: str, block_ids: GroupBlocks, local_tokens: int, hit_tokens: int) -> None:
        share = preset("tiny-hybrid3").num_blocks // len(block_ids)
        table: list[list[int | None]] = []
        for group, column in enumerate(block_ids):
            behind = sum(block is None for block in column) // 4 * 4
            table.append([None if at < behind else group * share + at for at in range(len(column))])
        super().begin_load(request_id, table, local_tokens, hit_tokens)


class StoresNoWindows(EngineConnector):
    """Declares full attention only, whatever the engine has."""

    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        rest: list[list[int | None]] = [[None] * len(column) for column in block_ids[1:]]
        return super().begin_store(request_id, token_ids, [block_ids[0], *rest], computed_tokens)


class ReportsTwice(EngineConnector):
    def poll(self, timeout_s: float = 0.0) -> Progress:
        found = super().poll(timeout_s)
        return Progress(found.loads * 2, found.stores * 2)


class StoresTheWrongBlocks(EngineConnector):
    def begin_store(
        self, request_id: str, token_ids: Sequence[int], block_ids: GroupBlocks, computed_tokens: int
    ) -> BlocksRead:
        return super().begin_store(request_id, token_ids, [[*b[1:], b[0]] for b in block_ids], computed_tokens)


class WaitsForAnswers(EngineConnector):
    def lookup(
        self, request_id: str, token_ids: Sequence[int], local_tokens: int, traceparent: str = ""
    ) -> LookupResult:
        time.sleep(1.2 * conformance.LONGEST_CALL_S)  # the defect: the engine's thread waits
        return super().lookup(request_id, token_ids, local_tokens)


class NeverCancels(EngineConnector):
    def finished(self, request_id: str, *, comes_back: bool = False) -> None:
        return None


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (WritesSharedBlocks, conformance.blocks_the_engine_shares_are_never_written),
        (WritesWhatWindowsLeftBehind, conformance.what_a_window_leaves_behind_is_neither_required_nor_written),
        (StoresNoWindows, conformance.what_one_stores_another_loads_byte_for_byte),
        (ReportsTwice, conformance.what_one_stores_another_loads_byte_for_byte),
        (StoresTheWrongBlocks, conformance.what_one_stores_another_loads_byte_for_byte),
        (WaitsForAnswers, conformance.what_one_stores_another_loads_byte_for_byte),
        (NeverCancels, conformance.nothing_is_held_when_all_requests_have_ended),
    ],
    ids=lambda item: item.__name__,
)
def test_a_broken_connector_is_found_out(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, broken: type[EngineConnector],
    check: Callable[[Bench], None],
) -> None:
    monkeypatch.setattr(conformance, "ANSWER_S", 1.0)
    with pytest.raises(AssertionError):
        check(bench_of(server, broken, "tiny-hybrid3"))
