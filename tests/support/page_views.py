"""Bodies of the status page's tests for what is cached, the curve, limits, explanations and events."""

from __future__ import annotations

from typing import Any

import msgspec

from kvdock.protocol import admin_schemas as a, events as e, schemas as s
from kvdock.protocol.hits import COMPUTED, HitTotals, PromptRun
from kvdock.protocol.outcomes import Outcome, view_of
from kvdock.protocol.reports import (
    ADVICE,
    REMEDIES,
    Break,
    Curve,
    CurvePoint,
    DayOfHits,
    Explanation,
    Finding,
    HitDays,
    LoadStory,
    LookupStory,
    NamespaceCurve,
    OtherNamespace,
    Prefixes,
    PrefixView,
    Sentence,
    SpaceCurve,
    TenantCurve,
    UseTotals,
    Verdict,
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


def hits(prompt: int = 1_000_000, *, requests: int = 900, saved_s: float | None = 5_400.0) -> HitTotals:
    """A tenth of the prompt tokens was in the engines' own caches, a quarter came from memory, a twentieth from the
    disk; of the computed ones most were never stored."""
    return HitTotals(
        requests=requests, prompt_tokens=prompt, local_tokens=prompt // 10,
        loaded={"memory": prompt // 4, "disk": prompt // 20},
        computed={"never_stored": prompt // 2, "room": prompt // 20, "tail": prompt // 20}, saved_s=saved_s,
    )


NO_HITS = HitTotals()


def hit_days() -> HitDays:
    """Two models on one day and one on the next, of which the loads took longer than computing."""
    rows = (
        ("2026-11-24", "", MODELS[0], hits(2_000_000)), ("2026-11-24", "research", MODELS[1], hits(500_000)),
        ("2026-11-25", "", MODELS[0], hits(1_000_000, saved_s=-50.0)),
    )
    return HitDays(days=[DayOfHits(date=date, tenant=who, model=model, hits=one) for date, who, model, one in rows])


def finding(code: Any, severity: Any, text: str, **more: Any) -> Finding:
    return Finding(code=code, severity=severity, text=text, remedy=REMEDIES[code], **more)


HEADLINE = "kvdock is up and helping: 30 % of prompt tokens were loaded."


def verdict() -> Verdict:
    return Verdict(effect="helping", headline=HEADLINE, findings=[
        finding("tier_off", "bad", "The tier redis is not used: its calls fail or are late.", cost_share=0.12),
        finding("engine_died", "warn", "An engine's process ended without leaving at 2026-11-25 03:12:00.", at=1.7e9),
    ])


def namespace(number: int, model: str, **more: Any) -> a.NamespaceView:
    """One that holds `number` * 100 chunks."""
    used = UseTotals(lookups=number, lookup_tokens=number * 1_000_000, hits=hits(number * 1_000_000))
    view = a.NamespaceView(
        namespace=f"{number:02x}" * 32, base=f"{number:02x}" * 32, model=model, manifest=manifest(model),
        chunk_bytes=2 * MIB, sessions=1, chunks=number * 100, bytes=number * 200 * MIB, oldest_s=7200.0 * number,
        unused_s=3.0 * number, totals=used,
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
        fork_key=f"{number:02x}" * 16 + "fa" * 16, shared_tokens=2048 * number, shared_bytes=16 * number * MIB,
        branches=0, branch_bytes=0, labels=[], is_kept=False,
    )
    return msgspec.structs.replace(view, **more)


def prefixes(count: int = 12) -> Prefixes:
    listed = [prefix(number) for number in range(1, count + 1)]
    return Prefixes(prefixes=listed, prefix_count=count, counted_s=1.0)


def curve(shares: tuple[float | None, ...] = (0.31, 0.48, 0.63, 0.71, 0.74, 0.75, 0.75)) -> Curve:
    """Seven shares: from a quarter of the pool to no bound."""
    factors = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, None)
    points = [
        CurvePoint(
            factor=factor, pool_bytes=None if factor is None else int(16 * GIB * factor), hit_share=share, error=0.012,
        )
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
    used = a.Amounts(bytes=9 * GIB, chunks=4731, namespaces=3, sessions=3, members=4, grants=4)
    none = a.Amounts(bytes=None, chunks=None, namespaces=None, sessions=None, members=None, grants=None)
    quota = msgspec.structs.replace(none, bytes=4 * GIB, sessions=4)
    tenants = {
        "": a.TenantView(used=used, quota=none),
        "research": a.TenantView(used=msgspec.structs.replace(used, bytes=GIB), quota=quota),
    }
    return a.Config(limits=limits(**changes), settings={}, retiring=[], tenants=tenants)


RUNS = [
    PromptRun(tokens=1024, origin="local"), PromptRun(tokens=2048, origin="loaded", source="memory"),
    PromptRun(tokens=1024, origin="loaded", source="disk"), PromptRun(tokens=2048, origin="computed", why="room"),
    PromptRun(tokens=512, origin="computed", why="never_stored"), PromptRun(tokens=1536, origin="computed", why="room"),
    PromptRun(tokens=8, origin="computed", why="tail"),
]
"""A prompt of 8,200 tokens."""


def explanation(request: str, **more: Any) -> Explanation:
    """A lookup that was answered with half of its tokens, because the rest was evicted."""
    broke = Break(
        at_tokens=4096, tokens=2048, why="room", in_words=COMPUTED["room"], gone_s=95.0, unused_s=4_000.0,
    )
    looked = LookupStory(
        at=1_700_000_000.0, engine="vllm-prod-0", tokens=8192, hit_tokens=4096, last_hit_tokens=4096, chunks=16,
        bytes=32 * MIB, took_us=420, loaded_us=12_300, broke=broke,
    )
    told = Outcome(request=request, prompt_tokens=8200, local_tokens=1024, found_tokens=4096, loaded_tokens=3072)
    body = Explanation(
        request=request, namespace="01" * 32, model=MODELS[0], lookups=[looked], outcome=view_of(told, RUNS),
        sentences=[
            Sentence(code="asked", text="The lookup was answered with 4,096 of 8,192 tokens."),
            Sentence(code="not_given", text=f"The rest was not given: {COMPUTED['room']}.", advice="enlarge_pool"),
        ],
        advice={"enlarge_pool": ADVICE["enlarge_pool"]},
        elsewhere=[OtherNamespace(namespace="02" * 32, tokens=4096, differs={"kv_dtype": ["bfloat16", "fp8_e4m3"]})],
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
        e.Evicted(chunks=40, by_operator=0, total=4_440),
        e.LimitsChanged(changed={"pool_bytes": [8 * GIB, 16 * GIB]}, source="call"),
        e.Dead(session="s3", label="", member="d0"),
        e.LookedUp(**who, request="chatcmpl-1", tokens=8192, hit_tokens=4096, why="room", took_us=420),
        e.RequestEnded(
            **who, request="chatcmpl-1", prompt_tokens=8200, local_tokens=1024, loaded={"memory": 2048, "disk": 1024},
            computed={"room": 4104}, reloaded_tokens=0, saved_s=-0.4,
        ),
    ), 1)]
