"""Who is attached, in the words of the wire: names, labels and manifests beside the table's numbers.

Ownership: the table decides who exists; this keeps the strings that the table stores only as digests.
Invariants: a session here has a table id of this server's life; a session that the table has closed is
dropped by `prune`. Used from the event loop only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvdock._core import Table
from kvdock.protocol.errors import ApiError
from kvdock.protocol.schemas import Manifest, Member


def digest16(text: str) -> bytes:
    """The table's 16-byte id of a client-chosen string."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvdock id").digest()


@dataclass(slots=True, frozen=True)
class NamespaceRecord:
    table_id: int
    digest: bytes
    manifest: Manifest

    @property
    def chunk_bytes(self) -> int:
        """All parts of a chunk that holds every group."""
        return self.bytes_of_groups(range(len(self.manifest.groups)))

    def bytes_of_groups(self, groups: Iterable[int]) -> int:
        return sum(self.manifest.groups[group].part_bytes for group in groups) * self.manifest.writers


@dataclass(slots=True)
class MemberRecord:
    id: str
    table_id: int
    ranks: tuple[int, ...]
    scheduler: bool
    lock_offset: int
    retired_before: int = 0
    """Segments the pool had removed when the member attached: it never mapped them."""
    dead: bool = False
    """Its lock was seen free. It never comes back: a new process is a new member."""

    def same_as(self, member: Member) -> bool:
        return (self.ranks, self.scheduler, self.lock_offset) == (
            tuple(member.ranks), member.scheduler, member.lock_offset
        )


@dataclass(slots=True)
class SessionRecord:
    id: str
    table_id: int
    instance: str
    label: str
    namespace: NamespaceRecord
    number: int
    """Rises from session to session: the order in which they are listed."""
    members: dict[str, MemberRecord] = field(default_factory=dict)
    grants: int = 0
    """Open leases and reservations, or more: the service counts up, `prune` sets the true number."""

    def member(self, member_id: str) -> MemberRecord:
        found = self.members.get(member_id)
        if found is None:
            raise ApiError("unknown_member", f"session {self.id} has no such member", found=member_id)
        return found


class Registry:
    """Sessions by wire id, instance and table id; namespaces by digest."""

    def __init__(self, pool: int) -> None:
        """`pool`: a number that servers which adopt the pool share, and those of other pools do not."""
        self._prefix = f"{pool:06x}"
        self._by_id: dict[str, SessionRecord] = {}
        self._by_instance: dict[str, SessionRecord] = {}
        self._by_table_id: dict[int, SessionRecord] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self._opened = 0

    def sessions(self) -> list[SessionRecord]:
        """In the order in which they were opened."""
        return list(self._by_id.values())

    def session(self, session_id: str) -> SessionRecord:
        found = self._by_id.get(session_id)
        if found is None:
            raise ApiError("unknown_session", "attach again: this server does not know the session", found=session_id)
        return found

    def of_instance(self, instance: str) -> SessionRecord | None:
        return self._by_instance.get(instance)

    def of_table_id(self, table_id: int) -> SessionRecord | None:
        return self._by_table_id.get(table_id)

    def namespaces(self) -> list[NamespaceRecord]:
        """In rising order of their table ids."""
        return list(self._namespaces.values())

    def namespace(self, digest: bytes) -> NamespaceRecord:
        found = self._namespaces.get(digest)
        if found is None:
            raise ApiError("unknown_namespace", "no engine has attached with it", found=digest.hex())
        return found

    def add_namespace(self, table_id: int, digest: bytes, manifest: Manifest) -> NamespaceRecord:
        return self._namespaces.setdefault(digest, NamespaceRecord(table_id, digest, manifest))

    def add_session(self, table_id: int, instance: str, label: str, namespace: NamespaceRecord) -> SessionRecord:
        """The wire id carries the pool's number, so an id of another pool is never found here; the table never
        uses one of its own twice, so one that outlives its server means the same session to the next."""
        self._opened += 1
        record = SessionRecord(f"{self._prefix}-{table_id}", table_id, instance, label, namespace, self._opened)
        self._by_id[record.id] = self._by_instance[instance] = self._by_table_id[table_id] = record
        return record

    def drop_session(self, record: SessionRecord) -> None:
        self._by_id.pop(record.id, None)
        self._by_instance.pop(record.instance, None)
        self._by_table_id.pop(record.table_id, None)

    def prune(self, table: Table) -> None:
        """Drops sessions that the table has closed, and sets `grants` of the others to the true number."""
        if not self._by_id:
            return
        grants = {view.session: view.leases + view.reservations for view in table.sessions()}
        for record in tuple(self._by_id.values()):
            if record.table_id not in grants:
                self.drop_session(record)
            else:
                record.grants = grants[record.table_id]


class Names:
    """The strings behind the digests of recent requests and stores, for people; bounded."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def digest(self, name: str) -> bytes:
        digest = digest16(name)
        self._names[digest] = name
        if len(self._names) > self._keep:
            self._names.popitem(last=False)
        return digest

    def name(self, digest: bytes) -> str:
        return self._names.get(digest) or digest.hex()
