"""Bodies of the status page's tests for what is cached, the curve, limits, explanations and events."""

from __future__ import annotations

from typing import Any

import msgspec

from kvdock.protocol import admin_schemas as a, events as e, schemas as s
from kvdock.protocol.outcomes import Outcome, view_of
from kvdock.protocol.reports import (
    BREAKS,
    Break,
    Curve,
    CurvePoint,
    Explanation,
    LoadStory,
    LookupStory,
    NamespaceCurve,
    OtherNamespace,
    Prefixes,
    PrefixView,
    SpaceCurve,
    TenantCurve,
    UseTotals,
)

GIB = 1 << 30
MIB = 1 << 20
MODELS = ("Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.3-70B-Instruct", "deepseek-ai/DeepSeek-V3.2")


def manifest(model: str, **changes: Any) -> s.Manifest:
    plain = s.Manifest(
        model=model, kv_dtype="bfloat16", layers=2, kv_heads=2, head_size=64, chunk_tokens=256, block_tokens=16,
        groups=(s.Group(part_bytes=MIB),),
    )
    return msgspec.structs.replace(plain, **changes)


def namespace(number: int, model: str, **more: Any) -> a.NamespaceView:
    """One that holds `number` * 100 chunks."""
    used = UseTotals(lookups=number, lookup_tokens=number * 1_000_000, hit_tokens=number * 700_000)
    view = a.NamespaceView(
        namespace=f"{number:02x}" * 32, base=f"{number:02x}" * 32, manifest=manifest(model), chunk_bytes=2 * MIB,
        sessions=1, chunks=number * 100, bytes=number * 200 * MIB, oldest_s=7200.0 * number, unused_s=3.0 * number,
        totals=used,
    )
    return msgspec.structs.replace(view, **more)


def namespaces() -> a.Namespaces:
    return a.Namespaces(namespaces=[
        namespace(1, MODELS[0]), namespace(2, MODELS[0], tenant="research"), namespace(3, MODELS[1]),
        namespace(4, "kvdock-bench-1024", is_bench=True),
    ])


def prefix(number: int, **more: Any) -> PrefixView:
    view = PrefixView(
        namespace="01" * 32, model=MODELS[0], tenant="", key=f"{number:02x}" * 32, tokens=2048 * number,
        chunks=8 * number, bytes=16 * number * MIB, age_s=5400.0, unused_s=12.0, uses=1000 // number,
        last_key=f"{number:02x}" * 16 + "fe" * 16, last_tokens=512 * number,
    )
    return msgspec.structs.replace(view, **more)


def prefixes(count: int = 12) -> Prefixes:
    listed = [prefix(number) for number in range(1, count + 1)]
    return Prefixes(prefixes=listed, prefix_count=count, counted_s=1.0)


def curve(shares: tuple[float | None, ...] = (0.31, 0.48, 0.63, 0.71, 0.74, 0.75, 0.75)) -> Curve:
    """Seven shares: from a quarter of the pool to no bound."""
    factors = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, None)
    points = [
        CurvePoint(factor=factor, pool_bytes=None if factor is None else int(16 * GIB * factor), hit_share=share)
        for factor, share in zip(factors, shares, strict=True)
    ]
    whole: dict[str, Any] = {
        "lookups": 18_402, "tokens": 61_204_512, "sampled_chunks": 9_000, "hit_share": 0.62, "points": points
    }
    return Curve(
        eviction="adaptive", pool_bytes=16 * GIB, covers_s=7_300.0, half_life_s=86_400.0, sampled_share=0.25,
        total=SpaceCurve(**whole),
        tenants=[TenantCurve(tenant="", **whole), TenantCurve(tenant="research", **(whole | {"points": []}))],
        namespaces=[NamespaceCurve(
            namespace="01" * 32, tenant="", model=MODELS[0], chunk_tokens=256, chunk_bytes=2 * MIB, **whole
        )],
    )


def limits(**changes: Any) -> a.Limits:
    plain = a.Limits(
        pool_bytes=16 * GIB, session_cap=0.8, total_cap=0.9, grow_water=0.1, low_water=0.05, high_water=0.1,
        session_grants=4096, eviction="adaptive",
    )
    return msgspec.structs.replace(plain, **changes)


def config(**changes: Any) -> a.Config:
    used = a.Amounts(bytes=9 * GIB, chunks=4731, namespaces=3, sessions=3, grants=4)
    none = a.Amounts(bytes=None, chunks=None, namespaces=None, sessions=None, grants=None)
    quota = msgspec.structs.replace(none, bytes=4 * GIB, sessions=4)
    tenants = {
        "": a.TenantView(used=used, quota=none),
        "research": a.TenantView(used=msgspec.structs.replace(used, bytes=GIB), quota=quota),
    }
    return a.Config(limits=limits(**changes), settings={}, retiring=[], tenants=tenants)


def explanation(request: str, **more: Any) -> Explanation:
    """A lookup that found half of its tokens, because the rest was evicted."""
    broke = Break(at_tokens=4096, why="room", in_words=BREAKS["room"], gone_s=95.0, unused_s=4_000.0)
    looked = LookupStory(
        at=1_700_000_000.0, engine="vllm-prod-0", tokens=8192, hit_tokens=4096, chunks=16, bytes=32 * MIB, took_us=420,
        loaded_us=12_300, broke=broke,
    )
    told = Outcome(request=request, prompt_tokens=8200, local_tokens=1024, found_tokens=4096, loaded_tokens=3072)
    body = Explanation(
        request=request, namespace="01" * 32, model=MODELS[0], lookups=[looked], outcome=view_of(told),
        sentences=["The lookup found 4,096 of 8,192 tokens.", f"Behind them the prefix ends: {BREAKS['room']}."],
        nearest=OtherNamespace(namespace="02" * 32, differs={"kv_dtype": ["bfloat16", "fp8_e4m3"]}),
    )
    load = LoadStory(tokens=3072, bytes=24 * MIB, took_ms=12.0, queue_ms=4.0, copy_ms=8.0, bytes_per_s=3.1e9)
    return msgspec.structs.replace(body, load=load, saved_s=0.84, **more)


def event(seq: int, body: e.Event) -> e.Event:
    return msgspec.structs.replace(body, seq=seq, at=1_700_000_000.0 + seq, tenant="")


def events() -> list[e.Event]:
    who: dict[str, Any] = {"session": "s1", "label": "vllm-prod-0"}
    return [event(seq, body) for seq, body in enumerate((
        e.Attached(**who, member="ms", instance="instance-s1", namespace="7c" * 32, model=MODELS[0], ranks=[0, 1]),
        e.Grown(segment=2, bytes=4 * GIB, allocated_bytes=12 * GIB),
        e.Suspect(**who, member="m5", silent_s=7.2),
        e.Evicted(chunks=40, total=4_440),
        e.LimitsChanged(changed={"pool_bytes": [8 * GIB, 16 * GIB]}, source="call"),
        e.Dead(session="s3", label="", member="d0"),
        e.LookedUp(**who, request="chatcmpl-1", tokens=8192, hit_tokens=4096, why="room", took_us=420),
    ), 1)]
