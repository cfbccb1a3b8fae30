"""The names of the pool's namespaces, kept for the next server of the pool. The table has their digests alone, so
without the names that server could not say what is stored until an engine of each namespace attaches.

Used from the event loop only.
"""

from __future__ import annotations

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


class KeptNamespaces:
    def __init__(self, registry: Registry, table: Table) -> None:
        self._registry, self._table = registry, table
        self._kept: list[tuple[bytes, str | None, str]] = []

    @property
    def has_changed(self) -> bool:
        """Whether other namespaces are known than when they were last kept."""
        return self._names() != self._kept

    def kept(self) -> msgspec.Raw:
        self._kept = self._names()
        return msgspec.Raw(msgspec.json.encode([
            _Kept(
                namespace=one.digest.hex(), base=one.base.hex(), manifest=one.manifest, tenant=one.tenant,
                weights=one.use.weights, served_model_name=one.use.served_model_name,
            )
            for one in self._named()
        ]))

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

    def _names(self) -> list[tuple[bytes, str | None, str]]:
        return [(one.digest, one.use.weights, one.use.served_model_name) for one in self._named()]
