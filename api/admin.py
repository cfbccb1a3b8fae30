"""What an operator may do: clear, delete, pin, change limits. None of it frees what an engine still holds.

Everything here is idempotent by nature: a call repeated because its answer was lost leaves the same state.
Long walks go in slices of the table, with other calls answered in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from kvdock.api.convert import key_bytes
from kvdock.api.paging import page_of
from kvdock.api.pool.limits import changed_limits
from kvdock.api.pool.registry import NamespaceRecord
from kvdock.api.service import CacheService
from kvdock.protocol.admin_schemas import (
    ClearCache,
    Cleared,
    Config,
    DeleteChunks,
    Deleted,
    Namespaces,
    NamespaceView,
    PatchConfig,
    PinChunks,
    Pinned,
)
from kvdock.protocol.schemas import KEY_BYTES

CLEAR_SLICE_RECORDS = 1024
KEYS_SLICE = 256
ALL_NAMESPACES = -1


async def clear(service: CacheService, body: ClearCache) -> Cleared:
    """Raises ApiError(unknown_namespace)."""
    space = ALL_NAMESPACES if body.namespace is None else _namespace(service, body.namespace).table_id
    chunks = cursor = 0
    while cursor >= 0:
        taken, cursor = service.table.clear(space, cursor, CLEAR_SLICE_RECORDS)
        chunks += taken
        await asyncio.sleep(0)
    return Cleared(chunks=chunks)


async def delete(service: CacheService, body: DeleteChunks) -> Deleted:
    """Raises ApiError: unknown_namespace, invalid_body."""
    space = _namespace(service, body.namespace).table_id
    chunks = 0
    for keys in _slices(key_bytes(body.keys)):
        chunks += service.table.delete(space, keys)
        await asyncio.sleep(0)
    return Deleted(chunks=chunks)


async def pin(service: CacheService, body: PinChunks) -> Pinned:
    """Raises ApiError: unknown_namespace, invalid_body."""
    space = _namespace(service, body.namespace).table_id
    # A duration that rounds to nothing still pins: only 0 itself unpins.
    until_ms = service.clock.now_ms() + max(1, round(body.duration_s * 1000)) if body.duration_s else 0
    chunks = 0
    for keys in _slices(key_bytes(body.keys)):
        chunks += service.table.pin(space, keys, until_ms)
        await asyncio.sleep(0)
    return Pinned(chunks=chunks)


async def configure(service: CacheService, body: PatchConfig) -> Config:
    """All of it takes effect or none. Raises ApiError: bad_argument, no_memory."""
    changes = {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}
    async with service.configuring:
        limits = changed_limits(service.limits, changes, service.settings.segment_bytes)
        await service.pool.resize(limits)
        service.limits = limits
    return config(service)


def config(service: CacheService) -> Config:
    return Config(
        limits=service.limits,
        settings=msgspec.structs.asdict(service.settings),
        retiring=service.pool.retiring,
    )


def namespaces(service: CacheService, limit: int, cursor: int) -> Namespaces:
    shown, following = page_of(service.registry.namespaces(), lambda record: record.table_id, limit, cursor)
    attached: dict[int, int] = {}
    for session in service.registry.sessions():
        attached[session.namespace.table_id] = attached.get(session.namespace.table_id, 0) + 1
    return Namespaces(
        namespaces=[
            NamespaceView(
                namespace=record.digest.hex(),
                manifest=record.manifest,
                chunk_bytes=record.chunk_bytes,
                sessions=attached.get(record.table_id, 0),
            )
            for record in shown
        ],
        next=following,
    )


def _namespace(service: CacheService, digest: str) -> NamespaceRecord:
    return service.registry.namespace(key_bytes([digest]))


def _slices(keys: bytes) -> Iterator[bytes]:
    step = KEYS_SLICE * KEY_BYTES
    for start in range(0, len(keys), step):
        yield keys[start : start + step]
