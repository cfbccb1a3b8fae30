"""What pools of other sizes would find: the answer of `GET /v1/curve`."""

from __future__ import annotations

from kvdock.protocol.wire_types import Answer, Tenant


class CurvePoint(Answer, kw_only=True):
    """The share of tokens that lookups would find in a pool of that size, under the same eviction policy."""

    factor: float | None
    """Times the pool's size; None: without bound."""
    pool_bytes: int | None
    hit_share: float | None
    """None: the simulated pool is too small to say."""


class SpaceCurve(Answer, kw_only=True):
    """What was asked for, and how much of it was found and would be found."""

    lookups: int
    """Repeats of a request within its epoch are not counted."""
    tokens: int
    sampled_chunks: int
    """How many of the chunks that were asked for the simulated pools saw."""
    hit_share: float | None
    """Found in the pool itself, as far as it was counted; None: nothing was asked for."""
    points: list[CurvePoint]
    """From the smallest pool to the one without bound. Empty where too few chunks were sampled."""


class TenantCurve(SpaceCurve, kw_only=True):
    tenant: Tenant


class NamespaceCurve(SpaceCurve, kw_only=True):
    namespace: str
    """The namespace of the weights that engines start with; it stands for all weights of the manifest."""
    tenant: Tenant
    model: str
    chunk_tokens: int
    chunk_bytes: int


class Curve(Answer, kw_only=True):
    """Predicted hit shares by the size of the pool, of what the caller may see. It begins anew with the server, and
    when the pool's size or its eviction policy is changed."""

    eviction: str
    pool_bytes: int
    covers_s: float
    """Since it began."""
    half_life_s: float
    """What was asked for so long ago counts for half, in all counts and shares."""
    sampled_share: float
    """How much of all chunks is sampled now. It falls when they become many."""
    total: SpaceCurve
    tenants: list[TenantCurve]
    namespaces: list[NamespaceCurve]
    """Those that were asked last: at most 256 are kept apart."""
