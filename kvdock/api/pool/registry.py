"""Attached sessions and members by the ids of the API: names, labels and manifests for the table's numbers.

Ownership: the table decides which sessions exist; this module keeps the strings that the table stores only as digests.
Invariants: each session here was attached to this server; `prune` drops those that the table has closed. Used from the
event loop only.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct, field

from kvdock._core import Table
from kvdock.api.turns import next_slice, sliced
from kvdock.protocol.access import Identity
from kvdock.protocol.errors import ApiError, without_secrets
from kvdock.protocol.hits import HitTotals
from kvdock.protocol.outcomes import Copied, OutcomeView
from kvdock.protocol.reports import CopyRates, UseTotals
from kvdock.protocol.schemas import MOVER_LABEL, MOVER_NAME, AttachSession, Manifest, Member
from kvdock.protocol.wire_types import OWN_TENANT

# --------------------------------------------------------------------------- sums of use

# What a session or a namespace has used since this server first saw it, and how fast its members copy.

KEPT_SHARE = 0.8
"""The weight of older copies when newer ones are added: rates are those of the last few heartbeats with copies."""


class Hits(Struct, gc=False):
    """Sums over requests that have ended; HitTotals explains them."""

    requests: int = 0
    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    reloaded_tokens: int = 0
    saved_s: float | None = None

    def ended(self, outcome: OutcomeView) -> None:
        self.requests += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.reloaded_tokens += outcome.reloaded_tokens
        for run in outcome.runs:
            if run.origin == "local":
                self.local_tokens += run.tokens
            elif run.origin == "loaded":
                _add(self.loaded, run.source, run.tokens)
            else:
                _add(self.computed, run.why, run.tokens)
        if outcome.saved_s is not None:
            self.saved_s = (self.saved_s or 0.0) + outcome.saved_s

    def add(self, other: HitTotals) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.local_tokens += other.local_tokens
        for sums, more in ((self.loaded, other.loaded), (self.computed, other.computed)):
            for name, tokens in more.items():
                _add(sums, name, tokens)
        self.reloaded_tokens += other.reloaded_tokens
        if other.saved_s is not None:
            self.saved_s = (self.saved_s or 0.0) + other.saved_s

    def view(self) -> HitTotals:
        return HitTotals(
            requests=self.requests, prompt_tokens=self.prompt_tokens, local_tokens=self.local_tokens,
            loaded=dict(self.loaded), computed=dict(self.computed), reloaded_tokens=self.reloaded_tokens,
            saved_s=self.saved_s,
        )


def _add(sums: dict[str, int], name: str, tokens: int) -> None:
    sums[name] = sums.get(name, 0) + tokens


class Sums(Struct, gc=False):
    lookups: int = 0
    lookup_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    hits: Hits = field(default_factory=Hits)

    def add(self, other: Sums) -> None:
        self.lookups += other.lookups
        self.lookup_tokens += other.lookup_tokens
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        self.hits.add(other.hits.view())

    def view(self) -> UseTotals:
        return UseTotals(
            lookups=self.lookups, lookup_tokens=self.lookup_tokens, loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes, hits=self.hits.view(),
        )


class Speed(Struct, gc=False):
    size_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: int, took_us: int) -> None:
        if size_bytes and took_us:
            self.size_bytes = KEPT_SHARE * self.size_bytes + size_bytes
            self.seconds = KEPT_SHARE * self.seconds + took_us / 1e6

    @property
    def bytes_per_s(self) -> float | None:
        return self.size_bytes / self.seconds if self.seconds else None


class Copies(Struct, gc=False):
    """How fast one member copies, as its heartbeats report."""

    loads: Speed = field(default_factory=Speed)
    stores: Speed = field(default_factory=Speed)
    ceiling_bytes_per_s: float = 0.0

    def add(self, copied: Copied) -> None:
        self.loads.add(copied.load_bytes, copied.load_us)
        self.stores.add(copied.store_bytes, copied.store_us)
        self.ceiling_bytes_per_s = copied.ceiling_bytes_per_s or self.ceiling_bytes_per_s


def rates_of(members: list[Copies]) -> CopyRates:
    """The rates of one session: its members copy at the same time, so their rates add up, as far as they are known."""

    def total(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate]
        return sum(known) if known else None

    return CopyRates(
        load_bytes_per_s=total([one.loads.bytes_per_s for one in members]),
        store_bytes_per_s=total([one.stores.bytes_per_s for one in members]),
        ceiling_bytes_per_s=total([one.ceiling_bytes_per_s for one in members]),
    )


def mean_of(sessions: list[CopyRates]) -> CopyRates:
    """The rates of several sessions, which do not copy at the same time: the means of those that load, or store."""
    loading = [one for one in sessions if one.load_bytes_per_s is not None]

    def mean(rates: list[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if known else None

    return CopyRates(
        load_bytes_per_s=mean([one.load_bytes_per_s for one in loading]),
        store_bytes_per_s=mean([one.store_bytes_per_s for one in sessions]),
        ceiling_bytes_per_s=mean([one.ceiling_bytes_per_s for one in loading]),
    )


# --------------------------------------------------------------------------- the registry

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KEYS_OF_PART = 2048
SLICE_NAMESPACES = 64
SLICE_SESSIONS = 64
"""At most this many sessions are looked at in one turn of the event loop."""


def digest16(text: str) -> bytes:
    """The table's 16-byte id for a string that a client chose."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvdock id").digest()


def owned(tenant: str, text: str) -> str:
    """The string as one of that tenant's: it differs from all strings of other tenants, as their names have no line
    break."""
    return f"{tenant}\n{text}" if tenant or "\n" in text else text


class NamespaceUse(Struct, gc=False):
    """A namespace, and how it was used since this server first saw it."""

    sums: Sums = field(default_factory=Sums)
    is_bench: bool = True
    """Only benchmarks have used it."""
    weights: str | None = None
    """The name of the weights whose chunks it has; "": those that engines start with. None: not known, because its
    engines attached to an earlier server and have not reported it yet."""
    served_model_name: str = ""
    """The name of the model for the users of the engine that came last, of those that have named it."""
    cleared_ms: int = -1
    """When it was cleared last, on the server clock; -1: not since this server's start."""


class NamespaceRecord(Struct, frozen=True, eq=False, gc=False):
    table_id: int
    digest: bytes
    manifest: Manifest
    tenant: str = ""
    base: bytes = b""
    """The digest of the same manifest and tenant without weights: keys are made of it."""
    use: NamespaceUse = field(default_factory=NamespaceUse)
    least_part_bytes: int = 0
    """The slot of its smallest part."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "least_part_bytes", min(one.slot_bytes for one in self.manifest.groups))

    @property
    def model(self) -> str:
        """The model's name for people, in lists, metrics and KV events."""
        return self.use.served_model_name or self.manifest.model

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk with all parts of every group."""
        return self.bytes_of_groups(range(len(self.manifest.groups)))

    def bytes_of_groups(self, groups: Iterable[int]) -> int:
        return sum(self.manifest.groups[group].slot_bytes for group in groups) * self.manifest.writers


class MemberRecord(Struct, eq=False, gc=False):
    id: str
    table_id: int
    ranks: tuple[int, ...]
    scheduler: bool
    lock_offset: int
    retired_before: int = 0
    """How many segments had been removed when the member attached: it has never mapped them."""
    follows: NamespaceRecord | None = None
    """The namespace whose changes it gets; None: none yet."""
    last_outcome: int = 0
    """The number of the last outcome that it has reported."""
    heard_ms: int = 0
    """The last attach or heartbeat, on the server clock."""
    suspect: bool = False
    """Its heartbeats are missing, and an event has reported that."""
    dead: bool = False
    """Its lock was found free. It never comes back: a new process is a new member."""
    copies: Copies = field(default_factory=Copies)

    def same_as(self, member: Member) -> bool:
        return (self.ranks, self.scheduler, self.lock_offset) == (
            tuple(member.ranks), member.scheduler, member.lock_offset
        )


class SessionRecord(Struct, eq=False, gc=False):
    id: str
    """The id that lists and the log show."""
    capability: str
    """The id with its secret, which only the answer to an attach has."""
    table_id: int
    instance: str
    label: str
    namespace: NamespaceRecord
    number: int
    """Rises from session to session; lists are in this order."""
    tenant: str
    is_bench: bool = False
    """The server's totals leave it out."""
    served_model_name: str = ""
    """The name of the model for the engine's users; empty: the engine has not named it."""
    members: dict[str, MemberRecord] = field(default_factory=dict)
    identities: tuple[Identity, ...] = ()
    """As whom its members were attached, and by which ways."""
    sums: Sums = field(default_factory=Sums)
    grants: int = 0
    """Open leases and reservations, or more: the service counts up, `prune` sets the true number."""

    @property
    def is_mover(self) -> bool:
        """Whether the names are those of a mover of lower tiers, of this server or an earlier one: it is no engine."""
        of_mover = self.tenant == OWN_TENANT and self.instance.startswith(f"{MOVER_NAME}-")
        return of_mover and self.label == MOVER_LABEL

    @property
    def all_sums(self) -> tuple[Sums, Sums]:
        """The sums that the session's calls are added to: its own, and its namespace's."""
        return self.sums, self.namespace.use.sums

    @property
    def who(self) -> dict[str, Any]:
        """The fields of events that name the session."""
        return {
            "tenant": self.tenant, "session": self.id, "label": self.label, "model": self.model
        }

    @property
    def model(self) -> str:
        """The model's name for people."""
        return self.served_model_name or self.namespace.manifest.model

    def is_open_to(self, identity: Identity) -> bool:
        """Whether a caller may use the session: with a token with which a member was attached, and by the same way."""
        return identity.token is None or identity in self.identities

    def may_be_joined_by(self, identity: Identity) -> bool:
        """Whether a member may be attached: by either way, because whoever attaches holds a byte of the lock file."""
        return identity.token is None or any(one.token == identity.token for one in self.identities)

    def member(self, member_id: str) -> MemberRecord:
        found = self.members.get(member_id)
        if found is None:
            raise ApiError("unknown_member", f"session {self.id} has no such member", found=member_id)
        return found


class Registry:
    """Sessions by wire id, instance and table id; namespaces by digest."""

    def __init__(self, pool: int, secret: bytes) -> None:
        """`secret` and the pool's number: all servers of this pool share them, and servers of other pools have
        others."""
        self._prefix, self._secret = f"{pool:06x}", secret
        self._by_id: dict[str, SessionRecord] = {}
        self._by_capability: dict[str, SessionRecord] = {}
        self._by_instance: dict[tuple[str, str], SessionRecord] = {}
        self._by_table_id: dict[int, SessionRecord] = {}
        self._by_lock: dict[int, MemberRecord] = {}
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        self._by_number: dict[int, NamespaceRecord] = {}
        """The same, by the table's numbers."""
        self._in_order: tuple[NamespaceRecord, ...] | None = None
        """The same, as lists show them; None: they have changed since."""
        self._opened = 0

    def sessions(self) -> list[SessionRecord]:
        """In the order in which they were opened."""
        return list(self._by_id.values())

    def session(self, capability: str, tenant: str | None, identity: Identity) -> SessionRecord:
        """For the calls of engines. Sessions of other tenants do not exist there, nor those that are not open to the
        caller's identity. Raises ApiError(unknown_session)."""
        found = self._by_capability.get(capability)
        if found is None or found.tenant != tenant or not found.is_open_to(identity):
            raise ApiError(
                "unknown_session", "attach again: this server does not know the session",
                found=without_secrets(capability),
            )
        return found

    def listed(self, session_id: str, sees: Callable[[str], bool]) -> SessionRecord:
        """For people: by the id in lists, or by the whole id. `sees`: as in `namespace`."""
        found = self._by_id.get(session_id) or self._by_capability.get(session_id)
        if found is None or not sees(found.tenant):
            raise ApiError("unknown_session", "no such session is attached", found=without_secrets(session_id))
        return found

    def of_instance(self, tenant: str, instance: str) -> SessionRecord | None:
        return self._by_instance.get((tenant, instance))

    def of_table_id(self, table_id: int) -> SessionRecord | None:
        return self._by_table_id.get(table_id)

    def namespaces(self) -> Sequence[NamespaceRecord]:
        """In rising order of their table ids."""
        if self._in_order is None:
            self._in_order = tuple(sorted(self._namespaces.values(), key=lambda record: record.table_id))
        return self._in_order

    def space_of(self, digest: bytes) -> NamespaceRecord | None:
        return self._namespaces.get(digest)

    def of_number(self, table_id: int) -> NamespaceRecord | None:
        """The namespace with that number in the table; None: there is none any more."""
        return self._by_number.get(table_id)

    def namespace(self, digest: bytes, sees: Callable[[str], bool]) -> NamespaceRecord:
        """`sees`: whether the caller may know of a tenant. Namespaces of other tenants do not exist for it."""
        found = self._namespaces.get(digest)
        if found is None or not sees(found.tenant):
            raise ApiError(
                "unknown_namespace", "no engine is attached with it, and nothing is stored in it", found=digest.hex()
            )
        return found

    def add_namespace(
        self, table_id: int, digest: bytes, manifest: Manifest, tenant: str = "", *, holds_chunks: bool = False,
        base: bytes = b"", weights: str | None = "",
    ) -> NamespaceRecord:
        """Adds a namespace, unless it is known under this number. Drops what was known under the number, because the
        table reuses numbers. `holds_chunks`: whether a namespace that is new here has chunks of an earlier server's
        engines. `base`: empty: the digest itself."""
        found = self._namespaces.get(digest)
        if found is None or found.table_id != table_id:
            for former in (found, self._by_number.get(table_id)):
                if former is not None:
                    self._forget_namespace(former)
            use = NamespaceUse(is_bench=not holds_chunks)
            found = NamespaceRecord(table_id, digest, manifest, tenant, base or digest, use)
            self._namespaces[digest] = self._by_number[table_id] = found
            self._in_order = None
        if weights is not None:
            found.use.weights = weights
        return found

    def _forget_namespace(self, record: NamespaceRecord) -> None:
        self._in_order = None
        self._namespaces.pop(record.digest, None)
        self._by_number.pop(record.table_id, None)

    def add_session(
        self, table_id: int, body: AttachSession, namespace: NamespaceRecord
    ) -> SessionRecord:
        """The session's id contains the pool's number, so an id of another pool is never found here. The table never
        uses an id twice, so an id that outlives its server names the same session in the next one, with the same proof.
        """
        self._opened += 1
        session_id = f"{self._prefix}-{table_id}"
        proof = hashlib.blake2b(session_id.encode(), digest_size=16, key=self._secret, person=b"kvdock session")
        record = SessionRecord(
            session_id, f"{session_id}-{proof.hexdigest()}", table_id, body.instance, body.label, namespace,
            self._opened, namespace.tenant, body.is_bench, body.served_model_name,
        )
        self.move_session(record, namespace)
        self._by_id[record.id] = self._by_capability[record.capability] = self._by_table_id[table_id] = record
        self._by_instance[record.tenant, record.instance] = record
        return record

    def move_session(self, session: SessionRecord, namespace: NamespaceRecord) -> None:
        """`namespace`: another one of the session's manifest and tenant."""
        session.namespace, use = namespace, namespace.use
        use.is_bench &= session.is_bench
        use.served_model_name = session.served_model_name or use.served_model_name

    def add_member(self, session: SessionRecord, member: MemberRecord) -> None:
        session.members[member.id] = self._by_lock[member.lock_offset] = member

    def drop_member(self, session: SessionRecord, member: MemberRecord) -> None:
        del session.members[member.id]
        self._forget_lock(member)

    def forget_member(self, session: SessionRecord, member: MemberRecord) -> None:
        """As `drop_member`, of one that may have left meanwhile, or whose id another process may have now."""
        if session.members.get(member.id) is member:
            self.drop_member(session, member)

    def others_lock(self, session: SessionRecord | None, wanted: Member) -> bool:
        """Whether another member that is not known to be dead has the lock byte: a byte proves that one member is
        alive."""
        holder = self._by_lock.get(wanted.lock_offset)
        itself = None if session is None else session.members.get(wanted.id)
        return holder is not None and not holder.dead and holder is not itself

    def _forget_lock(self, member: MemberRecord) -> None:
        if self._by_lock.get(member.lock_offset) is member:
            del self._by_lock[member.lock_offset]

    def drop_session(self, record: SessionRecord) -> None:
        if self._by_id.get(record.id) is not record:
            return  # it was dropped before, and its instance may have attached again
        del self._by_id[record.id], self._by_capability[record.capability], self._by_table_id[record.table_id]
        if self._by_instance.get((record.tenant, record.instance)) is record:
            del self._by_instance[record.tenant, record.instance]
        for member in record.members.values():
            self._forget_lock(member)

    async def left_by_benches(self) -> list[NamespaceRecord]:
        """Namespaces that benchmarks alone have used, and that no session uses any more. In slices."""
        of_benches = {one.table_id: one for one in self._namespaces.values() if one.use.is_bench}
        if of_benches:
            async for session in sliced(self.sessions()):
                of_benches.pop(session.namespace.table_id, None)
        return [one for one in of_benches.values() if one.use.is_bench]

    async def prune(self, table: Table) -> None:
        """Drops sessions that the table has closed, in slices; then namespaces without sessions and chunks."""
        records = deque(self._by_id.values())
        while records:  # each slice frees those that it drops: 2,500 at once take 4 ms
            self.drop_ended(table, [records.popleft() for _ in range(min(len(records), SLICE_SESSIONS))])
            await next_slice()
        left = -1
        while left != (left := self.drop_idle_namespaces(table)):
            await next_slice()

    def drop_idle_namespaces(self, table: Table) -> int:
        """Drops some of them, in the table as well. Returns how many namespaces the table has then."""
        live = set(table.drop_idle_namespaces(SLICE_NAMESPACES))
        for number in self._by_number.keys() - live:
            self._forget_namespace(self._by_number[number])
        return len(live)

    def drop_ended(self, table: Table, records: Sequence[SessionRecord]) -> None:
        """Drops those of the sessions that the table has closed; sets `grants` of the others to the true number."""
        views = table.sessions([record.table_id for record in records])
        grants = {view.session: view.leases + view.reservations for view in views}
        for record in records:
            if record.table_id not in grants:
                self.drop_session(record)
            else:
                record.grants = grants[record.table_id]


class Recent(Generic[K, V]):
    """A dict of about the last `keep` keys, and of no more. It is divided by the keys' hashes, because the dicts of
    Python are made anew as a whole now and then, which takes 3 ms with 32,768 keys."""

    def __init__(self, keep: int) -> None:
        self._parts: list[OrderedDict[K, V]] = [OrderedDict() for _ in range(1 + keep // KEYS_OF_PART)]
        self._count = len(self._parts)
        self._keep = keep // self._count

    def get(self, key: K) -> V | None:
        return self._parts[hash(key) % self._count].get(key)

    def put(self, key: K, value: V) -> None:
        """It is the last of its part now."""
        items = self._parts[hash(key) % self._count]
        items[key] = value
        items.move_to_end(key)
        if len(items) > self._keep:
            items.popitem(last=False)

    def pop(self, key: K) -> V | None:
        return self._parts[hash(key) % self._count].pop(key, None)

    def __contains__(self, key: K) -> bool:
        return key in self._parts[hash(key) % self._count]


class Names(Recent[bytes, str]):
    """The names of recent requests and stores, by their digests, for people to read."""

    def digest(self, name: str) -> bytes:
        digest = digest16(name)
        self.put(digest, name)
        return digest

    def name(self, digest: bytes) -> str:
        return self.get(digest) or digest.hex()


# --------------------------------------------------------------------------- names kept for the next server

# The names of the pool's namespaces, kept for the next server of the pool. The table has their digests alone, so
# without the names that server could not say what is stored until an engine of each namespace attaches.
#
# Used from the event loop only.



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
