"""Attaching a member: manifest → namespace → session → member. Everything is checked before anything is made."""

from __future__ import annotations

import msgspec

from kvdock.api.pool.pool import Pool
from kvdock.api.pool.quotas import Quotas, tenant_id
from kvdock.api.pool.registry import MemberRecord, NamespaceRecord, Registry, SessionRecord, digest16, owned
from kvdock.protocol.errors import ApiError
from kvdock.protocol.keys import filed_in, namespace_digest
from kvdock.protocol.schemas import SECRET_FIELDS, AttachSession, Manifest, Member


def attach(
    body: AttachSession, tenant: str, *, pool: Pool, registry: Registry, quotas: Quotas, now_ms: int
) -> SessionRecord:
    """The session that `body.member` now belongs to; repeating the call changes nothing.

    Raises ApiError: bad_argument, pool_too_small, layout_mismatch, id_reused, rank_taken,
    lock_not_visible, quota_exceeded; and what the table refuses (member_dead, table_full).
    """
    manifest, member = _canonical(body.manifest), body.member
    _check_manifest(manifest, pool)
    session = registry.of_instance(tenant, body.instance)
    if session is not None:
        _check_same_manifest(session, manifest)
    _check_member(session, member)
    nonce = digest16(owned(tenant, member.id))
    if registry.others_lock(session, member) or pool.unheard_has_lock(nonce, member.lock_offset):
        raise ApiError("lock_not_visible", "hold a byte of your own: a live member has this one", wanted="another byte")
    if not pool.lock_held(member.lock_offset):
        raise ApiError(
            "lock_not_visible",
            f"hold byte lock_offset of {pool.lock_path} (same file, same machine) before attaching",
            wanted="a held byte",
        )
    if session is None:
        session = _open_session(body, manifest, tenant, pool, registry, quotas, now_ms)
    table_id = pool.table.add_member(
        session.table_id, nonce, member.ranks, member.scheduler, now_ms, member.lock_offset
    )
    came_back = pool.unheard.pop(table_id, None) is not None
    if member.pinned_through is not None:
        pool.table.report_pinned(table_id, member.pinned_through)
    if member.id not in session.members:
        registry.add_member(session, MemberRecord(
            member.id, table_id, tuple(member.ranks), member.scheduler, member.lock_offset,
            retired_before=0 if came_back else pool.removed.count,
        ))
    session.members[member.id].heard_ms = now_ms
    if member.scheduler:
        run_weights(session, body.weights, pool=pool, registry=registry, quotas=quotas, now_ms=now_ms)
    return session


def _canonical(manifest: Manifest) -> Manifest:
    """One form of each manifest, and so one namespace: a group with the manifest's block size leaves it out."""
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
    plain: object = "a secret" if name in SECRET_FIELDS else msgspec.to_builtins(getattr(manifest, name))
    return plain


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


def _open_session(
    body: AttachSession, manifest: Manifest, tenant: str, pool: Pool, registry: Registry, quotas: Quotas, now_ms: int
) -> SessionRecord:
    base, nonce = namespace_digest(msgspec.to_builtins(manifest), tenant), digest16(owned(tenant, body.instance))
    weights = body.weights if body.member.scheduler else ""
    quotas.check_session(tenant, nonce)
    if known := pool.table.session_of(nonce):  # of the server before: it stays where it is
        namespace = _namespace_of(known, base, manifest, tenant, pool, registry)
    else:
        namespace = _add_namespace(base, weights, manifest, tenant, pool, registry, quotas)
    table_id = pool.table.open_session(nonce, namespace.table_id, now_ms)
    return registry.add_session(table_id, body.instance, body.label, namespace, is_bench=body.is_bench)


def run_weights(
    session: SessionRecord, weights: str, *, pool: Pool, registry: Registry, quotas: Quotas, now_ms: int
) -> None:
    """What the session looks up and stores from now on is filed under these weights; repeating it changes nothing.

    Raises ApiError(quota_exceeded), and what the table refuses (table_full); then it stays where it is.
    """
    before = session.namespace
    if before.digest == filed_in(before.base, weights):
        before.use.weights = weights
        return
    after = _add_namespace(
        before.base, weights, before.manifest, session.tenant, pool, registry, quotas, moves=session
    )
    pool.table.move_session(session.table_id, after.table_id, now_ms)
    registry.move_session(session, after)


def _add_namespace(
    base: bytes, weights: str, manifest: Manifest, tenant: str, pool: Pool, registry: Registry, quotas: Quotas,
    moves: SessionRecord | None = None,
) -> NamespaceRecord:
    digest = filed_in(base, weights)
    quotas.check_namespace(tenant, digest, moves)
    space = pool.table.add_namespace(
        digest,
        chunk_tokens=manifest.chunk_tokens,
        block_tokens=manifest.block_tokens,
        writers=manifest.writers,
        groups=[(group.kind, group.window_tokens, group.part_bytes) for group in manifest.groups],
        tenant=tenant_id(tenant),
        base=base,
    )
    return registry.add_namespace(
        space, digest, manifest, tenant, holds_chunks=pool.table.chunks_in(space) > 0, base=base, weights=weights
    )


def _namespace_of(
    session: int, base: bytes, manifest: Manifest, tenant: str, pool: Pool, registry: Registry
) -> NamespaceRecord:
    """In which the table has the session. Raises ApiError(id_reused) if that is of another manifest."""
    space = pool.table.sessions([session])[0].namespace
    view = next(one for one in pool.table.namespaces() if one.namespace == space)
    if view.base != base:
        raise ApiError(
            "id_reused", "the instance attached with another manifest", found=base.hex(), wanted=view.base.hex()
        )
    return registry.add_namespace(
        space, view.digest, manifest, tenant, holds_chunks=pool.table.chunks_in(space) > 0, base=base,
        weights="" if view.digest == base else None,
    )
