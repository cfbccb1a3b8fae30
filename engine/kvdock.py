"""The engine's plug: describes this engine to kvdock and returns the connector to run it with."""

from __future__ import annotations

from kvdock.api.schemas import Group, Manifest
from kvdock.connectors.connector import ConnectorSettings, KvdockConnector
from kvdock.connectors.session import Identity
from kvdock.datapath.layout import PagedLayout, paged_layout
from kvdock.engine.config import EngineConfig
from kvdock.engine.kv_cache import KVCache


def manifest_of(config: EngineConfig, layout: PagedLayout, chunk_tokens: int) -> Manifest:
    """Everything that changes the bytes of this engine's KV. `chunk_tokens`: a multiple of the block size."""
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
        groups=groups,
    )


def connect(
    config: EngineConfig, kv: KVCache, settings: ConnectorSettings, identity: Identity, *, chunk_tokens: int
) -> KvdockConnector:
    """A connector for an engine over `kv`. Raises what KvdockConnector raises, and LayoutError."""
    layout = paged_layout(kv.format, kv.tensors, block_tokens=kv.block_tokens)
    # A block of any group has the same place and size: the groups take turns in one memory.
    layouts = [layout] * len(config.model.groups)
    return KvdockConnector(settings, manifest_of(config, layout, chunk_tokens), identity, layouts)
