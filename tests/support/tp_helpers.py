"""Engines of several ranks for tests: real processes, and hands inside them to stop a copy half way."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from api_helpers import PATIENCE_S, unique
from connector_helpers import CHUNK
from engine_helpers import poison

from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector
from kvdock.connectors.session import Identity
from kvdock.datapath.copy import Copier, CopyHandle, DescribedParts, PartCopy, ScatterParts
from kvdock.engine.config import EngineConfig, preset
from kvdock.engine.engine import Engine
from kvdock.engine.kvdock import connect
from kvdock.engine.ranks import ProcessGroup, Rank

Verb = Literal["load", "store"]


def shared(name: str, size: int, **changes: Any) -> EngineConfig:
    """A preset for `size` ranks."""
    return dataclasses.replace(preset(name), tensor_parallel=size, num_blocks=200, **changes)


def engine_of_ranks(
    process_group: ProcessGroup, config: EngineConfig, address: str | None, *, salt: str = "", pack: str = "auto"
) -> Engine:
    """An engine on poisoned memory in every rank, with kvdock when there is an address."""
    runner = process_group.runner(config)
    poison(runner.kv)
    process_group.ask(poison_rank)
    connector: EngineConnector | None = None
    if address is not None:
        identity = Identity(unique("instance"), unique("member"), label=f"{process_group.size} ranks")
        connector = connect(
            config, runner.kv, ConnectorSettings(address, timeout_s=PATIENCE_S, pack=pack), identity,
            chunk_tokens=CHUNK, cache_salt=salt, process_group=process_group,
        )
    return Engine(config, connector, runner=runner)


def poison_rank(rank: Rank) -> None:
    poison(rank.runner.kv)


class StuckCopier:
    """Copies half of what it is asked for, says so, and never comes back."""

    def __init__(self, inner: Copier, sign: Path) -> None:
        self.inner, self.sign = inner, sign

    def gather(self, parts: Sequence[PartCopy], *, after: int | None = None) -> CopyHandle:
        self.inner.gather(parts[: (len(parts) + 1) // 2]).result()
        return self._stop()

    def scatter(self, parts: ScatterParts, *, after: int | None = None) -> CopyHandle:
        parts = parts.copies() if isinstance(parts, DescribedParts) else parts
        self.inner.scatter(parts[: (len(parts) + 1) // 2]).result()
        return self._stop()

    def close(self) -> None:
        self.inner.close()

    def _stop(self) -> CopyHandle:
        self.sign.touch()
        threading.Event().wait()
        raise AssertionError("it waits for ever")


def stick(process_group: ProcessGroup, verb: Verb, number: int, sign: Path) -> None:
    """From now on rank `number` gets stuck in the middle of its copies; `sign` is there once it is."""
    process_group.ask(partial(_stuck_in, verb, number, sign))


def _stuck_in(verb: Verb, number: int, sign: Path, rank: Rank) -> None:
    """In each rank's process."""
    if rank.team.rank != number:
        return
    assert rank.worker is not None
    worker = rank.worker.worker
    if verb == "load":
        worker._loaders = [StuckCopier(copier, sign) for copier in worker._loaders]
    else:
        worker._storers = [StuckCopier(copier, sign) for copier in worker._storers]
