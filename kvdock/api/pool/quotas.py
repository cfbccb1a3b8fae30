"""How much each tenant may use. The table limits bytes and chunks itself; sessions, members, namespaces and grants
beyond the quota are refused here.

Ownership: the table forgets quotas with the server. They are kept with the pool, and the next server of the pool puts
them again, before it serves; those of the access file, if the file has changed since, as it has them now.
Invariant: each quota that was put is in force in the table, and the default is for all other tenants. The server's own
user has no limits unless they are put. Used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

import msgspec

from kvdock._core import MAX_MEMBERS, MAX_NAMESPACES, MAX_SESSIONS, Table, TenantView as TableView
from kvdock.api.pool.registry import Recent, SessionRecord, digest16
from kvdock.api.settings import Settings
from kvdock.api.turns import Slices
from kvdock.protocol.admin_schemas import MAX_QUOTAS, Amounts, Quota, TenantView
from kvdock.protocol.errors import ApiError
from kvdock.protocol.wire_types import OWN_TENANT, Tenant

UNLIMITED = Quota()
DEFAULT_SHARE = 0.5
"""The share that one tenant may have of the namespaces, sessions, members and grants that the table has room for."""
KEPT_NAMES = 8192
"""How many of the tenants that attached last are known by name, for lists."""


def tenant_id(tenant: str) -> bytes:
    """The table's 16-byte id of a tenant; zeros for the server's own user."""
    return digest16(tenant) if tenant != OWN_TENANT else bytes(16)


def default_quota(settings: Settings) -> Quota:
    """The quota of tenants that have none of their own. In settings, 0 is the default: no limit of bytes and chunks,
    which can be evicted, and a share of all else, which one tenant could keep from others for ever."""
    shares = {
        "namespaces": int(DEFAULT_SHARE * MAX_NAMESPACES), "sessions": int(DEFAULT_SHARE * MAX_SESSIONS),
        "members": int(DEFAULT_SHARE * MAX_MEMBERS), "grants": int(DEFAULT_SHARE * settings.table_grants),
    }
    return Quota(**{
        name: getattr(settings, f"tenant_{name}") or shares.get(name) for name in Quota.__struct_fields__
    })


class _Kept(msgspec.Struct):
    """Quotas by tenant: those that were in force, and those that the access file had."""

    put: dict[Tenant, Quota]
    of_file: dict[Tenant, Quota]


class Quotas:
    """The quota of every tenant, and the checks before a tenant gets more."""

    def __init__(self, table: Table, default: Quota) -> None:
        self._table = table
        self._default = default
        self._put: dict[str, Quota] = {}
        self._of_file: dict[str, Quota] = {}
        """The quotas in the access file when it was last read."""
        self._names: Recent[bytes, str] = Recent(keep=KEPT_NAMES)
        """Tenants that have attached to this server, by the table's id."""
        self.has_changed = False
        """Whether quotas were put since they were last kept."""
        self.on_changed: Callable[[], None] = lambda: None
        """Called after a tenant has got another quota."""
        self.keep: Callable[[], Awaitable[None]] = _keep_nothing
        """Writes what is kept with the pool, at once."""
        table.set_default_quota(bytes=default.bytes, chunks=default.chunks)

    def of(self, tenant: str) -> Quota:
        return self._put.get(tenant) or (UNLIMITED if tenant == OWN_TENANT else self._default)

    def put(self, tenant: str, quota: Quota) -> None:
        """Replaces the tenant's quota, at once. A tenant that uses more keeps what engines hold; the keeper evicts the
        rest."""
        before, self._put[tenant] = self.of(tenant), quota
        self._enforce(tenant, before)

    def put_back(self, tenant: str) -> None:
        """Replaces the tenant's quota with the one in the access file, or else with the default."""
        if tenant in self._of_file:
            self.put(tenant, self._of_file[tenant])
        else:
            self._reset(tenant)

    def _reset(self, tenant: str) -> None:
        before = self.of(tenant)
        self._put.pop(tenant, None)
        self._enforce(tenant, before)

    def _enforce(self, tenant: str, before: Quota) -> None:
        quota = self.of(tenant)
        self.has_changed = True
        self._table.set_quota(tenant_id(tenant), bytes=quota.bytes, chunks=quota.chunks)
        if quota != before:
            self.on_changed()

    def follow(self, caps: Mapping[str, Quota]) -> None:
        """Takes over the quotas of the access file: puts those that are new, and gives the default back to tenants that
        the file no longer names. A quota that a call has put stays until the file's quota for that tenant changes."""
        for tenant, quota in self._of_file.items():
            if tenant not in caps and self._put.get(tenant) == quota:
                self._reset(tenant)
        for tenant, quota in caps.items():
            if self._of_file.get(tenant) != quota:
                self.put(tenant, quota)
        self._of_file = dict(caps)

    def check_count(self, wanted: Mapping[str, Quota | None]) -> None:
        """Raises ApiError(bad_argument) if, with these, too many tenants have a quota by calls."""
        named = {tenant for tenant, quota in wanted.items() if quota is not None}
        count = len((self._put.keys() | named) - self._of_file.keys())
        if count > MAX_QUOTAS:
            raise ApiError("bad_argument", "too many tenants have a quota of their own", found=count, wanted=MAX_QUOTAS)

    # ---------------------------------------------------------------- kept with the pool

    def kept(self) -> Iterator[bytes]:
        self.has_changed = False
        yield msgspec.json.encode(_Kept(self._put, self._of_file))

    def take_over(self, kept: msgspec.Raw) -> None:
        """Puts what an earlier server has kept. To be called before `follow`. Raises msgspec.MsgspecError."""
        found = msgspec.json.decode(kept, type=_Kept)
        for tenant, quota in found.put.items():
            self.put(tenant, quota)
        self._of_file = found.of_file

    # ---------------------------------------------------------------- checks

    def check_session(self, tenant: str, nonce: bytes) -> None:
        """Before a session is opened; `nonce`: as the table has it. A session from before a
        restart, which the table knows, does not count as new. Raises ApiError(quota_exceeded)."""
        self._names.put(tenant_id(tenant), tenant)
        used, limit = self._used(tenant).sessions, self.of(tenant).sessions
        if limit is None or used < limit:
            return
        if not self._table.session_of(nonce):
            raise _exceeded("sessions", used, limit)

    def check_member(self, tenant: str, comes_back: Callable[[], bool]) -> None:
        """Before a member attaches that has not attached to this server. `comes_back`: whether the table has it from
        before a restart; then it does not count as new. Raises ApiError(quota_exceeded)."""
        used, limit = self._used(tenant).members, self.of(tenant).members
        if limit is not None and used >= limit and not comes_back():
            raise _exceeded("members", used, limit)

    def check_namespace(
        self, tenant: str, digest: bytes, moves: SessionRecord | None = None, *, drop_idle: Callable[[], None]
    ) -> None:
        """Before a namespace is used, new or not. Namespaces that sessions have left do not count: they are removed
        when others are needed. `moves`: the session that changes from another namespace to this one. `drop_idle`:
        drops namespaces that have neither sessions nor chunks. Raises ApiError(quota_exceeded)."""
        limit = self.of(tenant).namespaces
        if limit is None or self._table.has_namespace(digest):
            return
        leaving = {} if moves is None else {"leaving": moves.namespace.table_id}
        in_use = self._table.namespaces_in_use(tenant_id(tenant), **leaving)
        if in_use >= limit:
            drop_idle()
            in_use = self._table.namespaces_in_use(tenant_id(tenant), **leaving)
        if in_use >= limit:
            raise _exceeded("namespaces", in_use, limit)

    def empty_left(self, max_chunks: int) -> int:
        """Evicts chunks of namespaces that were left by tenants with more namespaces than they may have. Returns how
        many."""
        limits = [quota.namespaces for quota in (self._default, *self._put.values()) if quota.namespaces is not None]
        least = min(limits, default=MAX_NAMESPACES)
        many = [view for view in self._table.tenants() if view.namespaces > least]
        put = {tenant_id(tenant): tenant for tenant in self._put} if many else {}
        for view in many:
            tenant = self._names.get(view.tenant) or put.get(view.tenant)
            if tenant is None:
                continue
            limit = self.of(tenant).namespaces
            is_over = limit is not None and view.namespaces > limit
            if is_over and (gone := self._table.empty_left(0, max_chunks, view.tenant)):
                return gone
        return 0

    def grants_refusal(self, session: SessionRecord) -> ApiError | None:
        """The reason why the session's tenant may open no further grant; None: it may."""
        limit = self.of(session.tenant).grants
        if limit is None:
            return None  # the table is not asked
        used = self._used(session.tenant).grants
        return _exceeded("grants", used, limit) if used >= limit else None

    # ---------------------------------------------------------------- views

    async def views(self) -> dict[str, TenantView]:
        """Tenants that use something or have a quota of their own, by name; by the table's id in hex those that have
        not attached since the server was started. In slices."""
        slices, names, out = Slices(), dict[bytes, str](), dict[str, TenantView]()
        for known in (OWN_TENANT, *self._put):
            names[tenant_id(known)] = known
            await slices.give_turn()
        for view in self._table.tenants():
            await slices.give_turn()
            number = view.tenant
            name = names.get(number, self._names.get(number))
            quota = self._default if name is None else self.of(name)
            out[number.hex() if name is None else name] = TenantView(
                used=_amounts(view), quota=Amounts(**msgspec.structs.asdict(quota))
            )
        return out

    def _used(self, tenant: str) -> TableView:
        return self._table.tenant(tenant_id(tenant))


async def _keep_nothing() -> None:
    """What quotas do without a history that keeps them."""


def _amounts(view: TableView) -> Amounts:
    return Amounts(**{name: getattr(view, name) for name in Amounts.__struct_fields__})


def _exceeded(what: str, used: int, limit: int) -> ApiError:
    return ApiError(
        "quota_exceeded", f"the tenant has as many {what} as it may have", found=used, wanted=f"< {limit}"
    )
