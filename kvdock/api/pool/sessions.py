"""Sessions: which members may attach, in which namespace a session is, and whether it gets one more grant.

An attach finds or makes the namespace of the manifest, then the session in it, then the member. Manifest and member are
checked before anything is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from kvdock._core import MAX_NAMESPACES, TableError
from kvdock.api.clock import ServerClock
from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas, tenant_id
from kvdock.api.pool.registry import MemberRecord, Names, NamespaceRecord, Registry, SessionRecord, digest16, owned
from kvdock.api.settings import Settings
from kvdock.api.turns import next_slice
from kvdock.protocol.access import Identity
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import filed_in, namespace_digest
from kvdock.protocol.schemas import SECRET_FIELDS, AttachSession, Manifest, Member

SLICE_EMPTIED_CHUNKS = 64
A = TypeVar("A")


class Sessions:
    """The sessions of a pool. Used from the event loop only."""

    def __init__(
        self, pool: Pool, registry: Registry, names: Names, quotas: Quotas, drain: Drain, clock: ServerClock
    ) -> None:
        self.pool, self.registry, self.names, self.quotas, self.clock = pool, registry, names, quotas, clock
        self._table, self.drain = pool.table, drain

    # ---------------------------------------------------------------- attaching

    async def with_namespace(self, ask: Callable[[], A]) -> A:
        """What `ask` returns. If the table has no room for one more namespace, those that sessions have left are
        emptied before it is asked again, the oldest first."""
        while True:
            try:
                return ask()
            except TableError as error:
                if error.code != "table_full" or error.found != MAX_NAMESPACES:
                    raise
                if not self._table.empty_left(0, SLICE_EMPTIED_CHUNKS):
                    raise
            self.registry.drop_idle_namespaces(self._table)
            await next_slice()

    def attach(self, body: AttachSession, tenant: str, identity: Identity) -> SessionRecord:
        """The session that `body.member` now belongs to; repeating the call changes nothing. `identity`: of the caller.
        Another token than those of its living members may not join a session.

        Raises ApiError: not_ready, bad_argument, pool_too_small, layout_mismatch, id_reused, rank_taken,
        lock_not_visible, foreign_session, quota_exceeded; and what the table refuses (member_dead, table_full).
        """
        self._admit(tenant, body.instance)
        pool, registry, now_ms = self.pool, self.registry, self.clock.now_ms()
        manifest, member = _canonical(body.manifest), body.member
        _check_manifest(manifest, pool)
        session = registry.of_instance(tenant, body.instance)
        if session is not None:
            self._check_identity(session, identity)
            _check_same_manifest(session, manifest)
        _check_member(session, member)
        nonce = digest16(owned(tenant, member.id))
        if registry.others_lock(session, member) or pool.unheard_has_lock(nonce, member.lock_offset):
            raise ApiError(
                "lock_not_visible", "lock a byte of its own: a live member has this one", wanted="another byte"
            )
        if not pool.lock_held(member.lock_offset):
            raise ApiError(
                "lock_not_visible",
                f"lock byte lock_offset of {pool.lock_path} (same file, same machine) before attaching",
                wanted="a held byte",
            )
        if session is None or member.id not in session.members:
            self.quotas.check_member(tenant, comes_back=lambda: pool.is_unheard(nonce))
        if session is None:
            session = self._open(body, manifest, tenant, now_ms)
        table_id = self._table.add_member(
            session.table_id, nonce, member.ranks, member.scheduler, now_ms, member.lock_offset
        )
        came_back = pool.unheard.pop(table_id, None) is not None
        if member.pinned_through is not None:
            self._table.report_pinned(table_id, member.pinned_through)
        if member.id not in session.members:
            registry.add_member(session, MemberRecord(
                member.id, table_id, tuple(member.ranks), member.scheduler, member.lock_offset,
                retired_before=0 if came_back else pool.removed.count,
            ))
        session.members[member.id].heard_ms = now_ms
        if identity not in session.identities:
            session.identities += (identity,)
        if member.scheduler:
            self.run_weights(session, body.weights)
        return session

    def _check_identity(self, session: SessionRecord, identity: Identity) -> None:
        """An engine that was started anew may have got another token, but then its former processes have ended."""
        if session.may_be_joined_by(identity):
            return
        if any(self.pool.lock_held(member.lock_offset) for member in session.members.values()):
            raise ApiError(
                "foreign_session", "the instance's living members attached with another access token: use theirs, or "
                "another instance", found=identity.token,
            )
        session.identities = ()  # nobody uses it as they did any more

    def _admit(self, tenant: str, instance: str) -> None:
        """Raises ApiError(not_ready): there is no memory yet, or the server is about to end and does not know the
        instance."""
        if not self.pool.ready:
            raise ApiError("not_ready", "the first segment is being allocated: attach again in a moment")
        known = self.registry.of_instance(tenant, instance)
        self.registry.drop_ended(self._table, [known] if known else [])
        if self.drain.begun and self.registry.of_instance(tenant, instance) is None:
            raise ApiError("not_ready", "the server is draining: attach to the next one")

    def _open(self, body: AttachSession, manifest: Manifest, tenant: str, now_ms: int) -> SessionRecord:
        base, nonce = namespace_digest(msgspec.to_builtins(manifest), tenant), digest16(owned(tenant, body.instance))
        weights = body.weights if body.member.scheduler else ""
        self.quotas.check_session(tenant, nonce)
        if known := self._table.session_of(nonce):  # of the server before: it stays in its namespace
            namespace = self._namespace_of(known, base, manifest, tenant)
        else:
            namespace = self._add_namespace(base, weights, manifest, tenant)
        table_id = self._table.open_session(nonce, namespace.table_id, now_ms)
        return self.registry.add_session(table_id, body, namespace)

    # ---------------------------------------------------------------- namespaces

    def run_weights(self, session: SessionRecord, weights: str) -> None:
        """From now on the session looks up and stores in the namespace of these weights; repeating it changes nothing.

        Raises ApiError(quota_exceeded), and what the table refuses (table_full); then the session stays in its
        namespace."""
        before = session.namespace
        if before.digest == filed_in(before.base, weights):
            before.use.weights = weights
            return
        after = self._add_namespace(before.base, weights, before.manifest, session.tenant, moves=session)
        self._table.move_session(session.table_id, after.table_id, self.clock.now_ms())
        self.registry.move_session(session, after)

    def _add_namespace(
        self, base: bytes, weights: str, manifest: Manifest, tenant: str, moves: SessionRecord | None = None
    ) -> NamespaceRecord:
        digest = filed_in(base, weights)
        self.quotas.check_namespace(tenant, digest, moves, drop_idle=self._drop_idle_namespaces)
        space = self._table.add_namespace(
            digest,
            chunk_tokens=manifest.chunk_tokens,
            block_tokens=manifest.block_tokens,
            writers=manifest.writers,
            groups=[(group.kind, group.window_tokens, group.part_bytes) for group in manifest.groups],
            packed_bytes=[0 if group.packed is msgspec.UNSET else group.packed.bytes for group in manifest.groups],
            tenant=tenant_id(tenant),
            base=base,
        )
        return self.registry.add_namespace(
            space, digest, manifest, tenant, holds_chunks=self._table.chunks_in(space) > 0, base=base, weights=weights
        )

    def _drop_idle_namespaces(self) -> None:
        self.registry.drop_idle_namespaces(self._table)

    def _namespace_of(self, session: int, base: bytes, manifest: Manifest, tenant: str) -> NamespaceRecord:
        """The namespace in which the table has the session. Raises ApiError(id_reused) if its manifest is another."""
        space = self._table.sessions([session])[0].namespace
        view = self._table.namespace(space)
        if view.base != base:
            raise ApiError(
                "id_reused", "the instance attached with another manifest", found=base.hex(), wanted=view.base.hex()
            )
        return self.registry.add_namespace(
            space, view.digest, manifest, tenant, holds_chunks=self._table.chunks_in(space) > 0, base=base,
            weights="" if view.digest == base else None,
        )

    # ---------------------------------------------------------------- grants

    def may_grant(self, session: SessionRecord, request: bytes) -> bool:
        """Whether the call may get a new grant; False: the server drains. A session that has as many as it may is
        refused with ApiError(too_many_grants), one whose tenant has as many as it may with ApiError(quota_exceeded).
        Retrying a call that already holds its grant does not count.

        `session.grants` is never below the true number, so the table is asked only near the limit.
        """
        limit, draining = self.pool.limits.session_grants, self.drain.refuses_new
        over_quota = self.quotas.grants_refusal(session)
        if session.grants < limit and not draining and over_quota is None:
            return True
        session.grants, known = self._table.open_grants(session.table_id, request)
        if known:
            return True
        if draining:
            return False
        if session.grants >= limit:
            raise ApiError(
                "too_many_grants", "release leases and finish reservations first", found=session.grants,
                wanted=f"< {limit}",
            )
        if over_quota is not None:
            raise over_quota
        return True


async def work_off(step: Callable[[], bool]) -> None:
    """Calls `step`, which works on a member in the table, as long as it says that something is left to do: each time in
    a slice of its own. The member may be gone meanwhile."""
    try:
        while step():
            await next_slice()
    except TableError as error:
        if error.code != "unknown_member":
            raise


def _canonical(manifest: Manifest) -> Manifest:
    """The one form of a manifest, so that it has one namespace: a group with the manifest's block size leaves it
    out."""
    groups = tuple(
        msgspec.structs.replace(group, block_tokens=msgspec.UNSET)
        if group.block_tokens == manifest.block_tokens else group
        for group in manifest.groups
    )
    return msgspec.structs.replace(manifest, groups=groups)


def _check_manifest(manifest: Manifest, pool: Pool) -> None:
    if manifest.chunk_tokens % manifest.block_tokens:
        raise ApiError(
            "bad_argument", "chunk_tokens is a multiple of block_tokens",
            found=manifest.chunk_tokens, wanted=f"a multiple of {manifest.block_tokens}",
        )
    for index, (group, block_tokens) in enumerate(zip(manifest.groups, manifest.block_sizes, strict=True)):
        if manifest.block_tokens % block_tokens:
            raise ApiError(
                "bad_argument", f"groups[{index}]: the manifest's block_tokens is a multiple of the group's",
                found=block_tokens, wanted=f"a divisor of {manifest.block_tokens}",
            )
        if (group.kind == "window") != (group.window_tokens > 0):
            raise ApiError(
                "bad_argument", f"groups[{index}]: window_tokens goes with kind window, and only with it",
                found=f"{group.kind}, {group.window_tokens}", wanted="window and > 0, or neither",
            )
        if group.packed is not msgspec.UNSET and group.packed.bytes >= group.part_bytes:
            raise ApiError(
                "bad_argument", f"groups[{index}]: packed parts are smaller than raw ones", found=group.packed.bytes,
                wanted=f"less than {group.part_bytes}",
            )
    largest = max(group.part_bytes for group in manifest.groups)
    chunk_bytes = sum(group.part_bytes for group in manifest.groups) * manifest.writers
    if largest > pool.largest_part_bytes or chunk_bytes > pool.limit_bytes:
        raise ApiError(
            "pool_too_small", "not even one chunk of this manifest fits: raise pool_bytes and segment_bytes",
            found=f"part {largest}, chunk {chunk_bytes} bytes",
            wanted=f"part <= {pool.largest_part_bytes}, chunk <= {pool.limit_bytes} bytes",
        )


def _check_same_manifest(session: SessionRecord, manifest: Manifest) -> None:
    attached = session.namespace.manifest
    differing = [name for name in Manifest.__struct_fields__ if getattr(attached, name) != getattr(manifest, name)]
    if differing:
        raise ApiError(
            "layout_mismatch", f"instance {session.instance} is attached with another manifest",
            found={name: _plain(manifest, name) for name in differing},
            wanted={name: _plain(attached, name) for name in differing},
        )


def _plain(manifest: Manifest, name: str) -> object:
    """A field as JSON has it; None: absent."""
    return "a secret" if name in SECRET_FIELDS else msgspec.to_builtins(manifest).get(name)


def _check_member(session: SessionRecord | None, member: Member) -> None:
    if len(set(member.ranks)) != len(member.ranks):
        raise ApiError("bad_argument", "each rank once", found=member.ranks, wanted=sorted(set(member.ranks)))
    if session is None:
        return
    known = session.members.get(member.id)
    if known is not None and not known.same_as(member):
        raise ApiError(
            # The answer does not name the lock offset: whoever knows it could attach in the member's name.
            "id_reused", f"member {member.id} is attached with other ranks or another lock",
            found=[*member.ranks, member.scheduler], wanted=[*known.ranks, known.scheduler],
        )


# --------------------------------------------------------------------------- draining

# Draining: there are no new grants, and calls, leases and reservations in progress may finish.
#
# While the server drains, `/readyz` says so; lookups and reservations that do not have their grant yet get none, and
# their answers say `draining`; everything else is answered: commits, releases, heartbeats.
#
# An operator drains a server that stays up, until an operator ends the drain. SIGTERM begins the drain with which the
# server ends: new sessions are refused with `not_ready`, too. That one has ended when no lease or reservation is open
# and the calls that were running when it began are answered, or when `drain_s` is over, and when no chunk waits to be
# written to lower tiers, or `tier_drain_s` is over. The keeper still notices members that die meanwhile.
#
# Handing over (kvdock/api/pool/adopt.py) is a drain that leaves leases to the next server, and what waits to be written
# as well. It waits only for reservations, because the next server would abort those.
#
# Invariant: a server that ends keeps its pool only after a drain without SIGINT, and only if the pool is ready.



class Drain:
    """`begin`, `hand_over` and `remove_pool` only set flags: signal handlers call them. `is_asked_for`: an operator has
    drained the server; the next server of the pool is not drained."""

    def __init__(self, settings: Settings, pool: Pool, now_s: Callable[[], float]) -> None:
        self._pool = pool
        self._drain_s, self._tier_drain_s = settings.drain_s, settings.tier_drain_s
        self._keep_wanted = settings.on_exit == "keep"
        self._now_s = now_s
        self.is_asked_for = False
        self.has_written: Callable[[], bool] = lambda: True
        """Whether no chunk waits to be written to lower tiers. A server with a mover sets it."""
        self._begun_s: float | None = None
        self._running: list[asyncio.Task[Any]] = []
        self._remove = False
        self._handing_over = False

    @property
    def begun(self) -> bool:
        """The server is about to end."""
        return self._begun_s is not None

    @property
    def refuses_new(self) -> bool:
        """Whether nothing new is given out, until the server ends or an operator has ended the drain."""
        return self.begun or self.is_asked_for

    @property
    def is_takeover(self) -> bool:
        return self._handing_over

    @property
    def keeps_pool(self) -> bool:
        wanted = self._handing_over or self._keep_wanted
        return self.begun and not self._remove and wanted and self._pool.ready

    def begin(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """`running`: calls that are not answered yet. Later ones are short: uvicorn's grace period covers them."""
        self._running = list(running)
        self._begun_s = self._now_s()

    def hand_over(self, running: Iterable[asyncio.Task[Any]]) -> None:
        """As `begin`, but the next server takes the leases over. May be called after `begin`."""
        self._handing_over = True
        if not self.begun:
            self.begin(running)

    def remove_pool(self) -> None:
        """Removes the pool at the end, even with `on_exit=keep`."""
        self._remove = True

    def ended(self) -> bool:
        """Whether the drain with which the server ends is over; False before it has begun."""
        if self._begun_s is None:
            return False
        passed_s = self._now_s() - self._begun_s
        if passed_s < self._drain_s and self._is_held():
            return False
        return self._handing_over or passed_s >= self._tier_drain_s or self.has_written()

    def _is_held(self) -> bool:
        stats = self._pool.table.stats()
        held = stats["reservations"] or (stats["leases"] and not self._handing_over)
        return bool(held) or not all(call.done() for call in self._running)
