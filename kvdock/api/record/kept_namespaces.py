"""The names of the pool's namespaces, kept for the next server of the pool. The table has their digests alone, so
without the names that server could not say what is stored until an engine of each namespace attaches.

Used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvdock._core import Table
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.protocol.schemas import Manifest


class _Kept(msgspec.Struct, omit_defaults=True):
    namespace: str
    base: str
    manifest: Manifest
    tenant: str = ""
    weights: str | None = None
    served_model_name: str = ""


_Named = tuple[bytes, str | None, str]
"""A namespace with those of its names that may change."""


class KeptNamespaces:
    def __init__(self, registry: Registry, table: Table) -> None:
        self._registry, self._table = registry, table
        self._kept: list[_Named] = []
        self._encoded: dict[_Named, bytes] = {}

    @property
    def has_changed(self) -> bool:
        """Whether other namespaces are known than when they were last kept."""
        return [_name_of(one) for one in self._named()] != self._kept

    def kept(self) -> Iterator[bytes]:
        named, before = self._named(), self._encoded
        self._kept = [_name_of(one) for one in named]
        encoded = dict[_Named, bytes]()
        for name, one in zip(self._kept, named, strict=True):
            yield b"," if encoded else b"["
            encoded[name] = before.get(name) or _encoded(one)  # once: manifests may be long
            yield encoded[name]
        self._encoded = encoded
        yield b"]" if encoded else b"[]"

    def take_over(self, kept: msgspec.Raw) -> None:
        """Names those namespaces of the table that an earlier server has named. Raises msgspec.MsgspecError."""
        numbers = {view.digest: view.namespace for view in self._table.namespaces()}
        for one in msgspec.json.decode(kept, type=list[_Kept]):
            digest = bytes.fromhex(one.namespace)
            if digest in numbers:
                known = self._registry.add_namespace(
                    numbers[digest], digest, one.manifest, one.tenant, holds_chunks=True, base=bytes.fromhex(one.base),
                    weights=one.weights,
                )
                known.use.served_model_name = known.use.served_model_name or one.served_model_name

    def _named(self) -> list[NamespaceRecord]:
        return [one for one in self._registry.namespaces() if not one.use.is_bench]


def _name_of(one: NamespaceRecord) -> _Named:
    return one.digest, one.use.weights, one.use.served_model_name


def _encoded(one: NamespaceRecord) -> bytes:
    return msgspec.json.encode(_Kept(
        namespace=one.digest.hex(), base=one.base.hex(), manifest=one.manifest, tenant=one.tenant,
        weights=one.use.weights, served_model_name=one.use.served_model_name,
    ))
