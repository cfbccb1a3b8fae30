"""Connects the small engine to kvdock: describes its KV, and returns the connector to run it with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvdock.connectors.engine_connector import ConnectorSettings, EngineConnector, open_rank
from kvdock.connectors.packing import with_packing
from kvdock.connectors.ranks import Peers
from kvdock.connectors.session import Identity
from kvdock.datapath.devices import Device
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_cache import KVCache
from kvdock.engine.ranks import ProcessGroup, Rank
from kvdock.protocol.schemas import Group, Manifest


def manifest_of(config: EngineConfig, layout: PagedLayout, chunk_tokens: int, cache_salt: str = "") -> Manifest:
    """The manifest of this engine's KV: everything on which the KV depends, apart from rounding. `chunk_tokens`: a
    multiple of the block size. `layout`: that of one rank. Engines of another tensor-parallel size add partial sums in
    another order, so they share no chunk with this one."""
    model = config.model
    part_bytes = layout.part_bytes(chunk_tokens // config.block_tokens)
    groups = tuple(
        Group(part_bytes=part_bytes) if kind.reach is None
        else Group(kind="window", window_tokens=kind.reach, part_bytes=part_bytes)
        for kind in model.groups
    )
    return Manifest(
        model=model.name,
        revision=model.revision,
        kv_dtype=model.dtype,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        token_order=layout.token_order,
        chunk_tokens=chunk_tokens,
        block_tokens=config.block_tokens,
        tensor_parallel=config.tensor_parallel,
        writers=1 if model.latent_size else config.tensor_parallel,
        groups=groups,
        cache_salt=cache_salt,
    )


def connect(
    config: EngineConfig, kv: KVCache, settings: ConnectorSettings, identity: Identity, *, chunk_tokens: int,
    cache_salt: str = "", process_group: ProcessGroup | None = None,
) -> EngineConnector:
    """A connector for an engine over `kv`; with a `process_group`, for all its ranks. Raises LayoutError, RankLost, and
    the errors of EngineConnector."""
    manifest, layouts = _described(config, kv, settings, chunk_tokens, cache_salt)
    peers = None
    if process_group is not None:
        peers = Peers(range(1, process_group.size), process_group.post)
        process_group.listen(peers.answered, peers.lost)
        process_group.ask(partial(_connect_rank, settings, identity, chunk_tokens, cache_salt))
    return EngineConnector(settings, manifest, identity, layouts, peers=peers)


def _connect_rank(
    settings: ConnectorSettings, identity: Identity, chunk_tokens: int, cache_salt: str, rank: Rank
) -> None:
    """Runs in the process of each other rank."""
    number = rank.team.rank
    manifest, layouts = _described(rank.runner.config, rank.runner.kv, settings, chunk_tokens, cache_salt)
    own = replace(identity, member=f"{identity.member}-rank-{number}", ranks=(number,), scheduler=False)
    rank.worker = open_rank(settings, manifest, own, layouts, rank.answer)


def _described(
    config: EngineConfig, kv: KVCache, settings: ConnectorSettings, chunk_tokens: int, cache_salt: str
) -> tuple[Manifest, list[PagedLayout]]:
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    # All groups use the same blocks of one memory, so they have the same layout.
    layouts = [layout] * len(config.model.groups)
    manifest = manifest_of(config, layout, chunk_tokens, cache_salt)
    return with_packing(manifest, layouts, settings.pack, Device.named(settings.device)), layouts
