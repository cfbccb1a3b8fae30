"""Judges the server: each rule looks at what the records say and returns a finding or none."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from kvdock.api.access.peer import Peer
from kvdock.api.pool.registry import Hits, NamespaceRecord, SessionRecord
from kvdock.api.pool.sessions import Sessions
from kvdock.api.record.hits import Whose
from kvdock.api.record.troubles import MOST_TROUBLES
from kvdock.api.reports.degraded import DRAINING
from kvdock.api.reports.recorded import Curves, Totals, Troubles
from kvdock.api.reports.status import LowerTiers, Probes
from kvdock.api.turns import next_slice, sliced
from kvdock.protocol.admin_schemas import TenantView
from kvdock.protocol.hits import COMPUTED, HitTotals
from kvdock.protocol.readable import percent, span
from kvdock.protocol.reports import REMEDIES, CurvePoint, DayOfHits, Effect, Finding, FindingCode, TroubleKind, Verdict
from kvdock.protocol.schemas import Group, Manifest

RECENT_S = 24 * 3600.0
"""How long an engine's death and damaged chunks are findings, unless somebody acknowledges them."""
THRASHING_FACTORS = (2.0, 4.0, 8.0)
THRASHING_POINTS = 0.10
"""A pool this many times as large would find this much more: the share of tokens."""
AS_GOOD_POINTS = 0.02
"""A pool that finds as much but for this share of tokens is as good as a larger one."""
SHARED_LEAST_TOKENS = 4096
"""Two engines share nothing once each has asked for so many tokens."""
APART = frozenset({"cache_salt", "adapter"})
"""Engines that differ in these alone are apart on purpose."""
FELL_TO, FELL_DAYS, FELL_LEAST_TOKENS = 0.6, 7, 100_000
"""Today's loaded share, as a share of that of the days before, and the tokens that both must have."""
SLOW_SHARE, SLOW_LEAST = 0.5, 20
"""The share of waits for tiers that ended without what was promised, and the least number of waits: where no engine
reports how requests end."""
SLOW_TOKENS, LATELY_LEAST_TOKENS = 0.2, 10_000
"""The share of the last hour's prompt tokens that lower tiers had and that were computed, and the least number of
prompt tokens."""
DEAR_S = 1.0
"""An engine's loads in the last hour took at least this much longer than computing."""
OLD_GRANT_S = 60.0
"""A copy takes seconds."""
TROUBLES: tuple[tuple[TroubleKind, FindingCode, str, str], ...] = (
    ("died", "engine_died", "An engine's process ended without leaving", "processes of engines ended without leaving"),
    ("damaged", "chunks_damaged", "A load found other bytes than were stored",
     "loads found other bytes than were stored"),
    ("misread", "engine_misreads", "An engine reports chunks as damaged that are whole, so its own memory or device is "
     "bad", "engines report chunks as damaged that are whole, so their own memory or devices are bad"),
    ("left_out", "pool_left_out", "The server started with an empty pool: it does not use the one that was left for it",
     "pools were left out"),
    ("failed", "server_failed", "Background work of the server failed, and the log has its cause",
     "times background work of the server failed, and the log has the causes"),
)
"""(kind, code, text for one, text for more)"""
ONE_TENANT_SHARE = 0.9
MOVER_SILENT_S = 10.0


@dataclass(frozen=True)
class Judged:
    """What rules look at."""

    peer: Peer
    hits: HitTotals
    """All, since the start."""
    lately: dict[Whose, Hits]
    """The last hour, of the tenants that the caller sees."""

    @property
    def lately_tokens(self) -> int:
        """Prompt tokens of the last hour."""
        return sum(hits.prompt_tokens for hits in self.lately.values())

    def share_lately(self, *why: str) -> float:
        """The share of these that were computed for one of the reasons; 0: there were none."""
        tokens = sum(hits.computed.get(one, 0) for hits in self.lately.values() for one in why)
        return tokens / self.lately_tokens if tokens else 0.0


class Judge:
    """`curves`: None if the curve is switched off."""

    def __init__(
        self, probes: Probes, totals: Totals, troubles: Troubles, curves: Curves | None, sessions: Sessions,
        lower: LowerTiers,
    ) -> None:
        self._probes, self._totals, self._troubles, self._curves = probes, totals, troubles, curves
        self._sessions, self._registry, self._quotas = sessions, sessions.registry, sessions.quotas
        self._lower = lower

    async def verdict(self, peer: Peer) -> Verdict:
        await self._totals.catch_up()
        hits = self._totals.hits
        judged = Judged(peer, hits.total.view(), await hits.lately.sums(peer.sees))
        rules = self._not_ready, self._loads_cost_time, self._tiers, self._troubled, self._holds
        findings = list[Finding]()
        for rule in rules:
            findings += rule(judged)
            await next_slice()
        for walk in (self._share_fell, self._thrashing, self._silent, self._shares_nothing, self._one_tenant):
            findings += await walk(judged)
            await next_slice()
        findings.sort(key=lambda one: (one.severity != "bad", -one.cost_share))
        effect = self._effect(judged)
        return Verdict(effect=effect, headline=self._headline(effect, judged.hits), findings=findings)

    def _headline(self, effect: Effect, hits: HitTotals) -> str:
        if effect == "not_ready" and self._probes.is_drained:
            return "kvdock is up and drained: it gives out nothing new until `kvdock undrain`."
        return _headline(effect, hits, self._asked)

    @property
    def _asked(self) -> int:
        return self._totals.totals().lookup_tokens

    def _effect(self, judged: Judged) -> Effect:
        if self._probes.ready().status != "ok":
            return "not_ready"
        if not judged.hits.requests:
            return "not_reported" if self._asked else "idle"
        if not judged.hits.loaded_tokens and not judged.hits.reloaded_tokens:
            return "not_helping"
        return "costing" if (judged.hits.saved_s or 0.0) < 0 else "helping"

    # ---------------------------------------------------------------- rules

    def _not_ready(self, judged: Judged) -> Iterator[Finding]:
        for reason in self._probes.ready().reasons:
            finding = _finding("not_ready", "bad", f"No slot can be given out: {reason}.")
            if reason == DRAINING and self._probes.is_drained:
                finding.text, finding.remedy = "No slot can be given out: an operator has drained it.", "kvdock undrain"
            yield finding

    def _loads_cost_time(self, judged: Judged) -> Iterator[Finding]:
        dear = {engine: hits for engine, hits in judged.lately.items() if (hits.saved_s or 0.0) <= -DEAR_S}
        saved_s, hits = judged.hits.saved_s, judged.hits
        if dear:
            most = min(dear, key=lambda engine: dear[engine].saved_s or 0.0)
            lost_s = -sum(hits.saved_s or 0.0 for hits in dear.values())
            who = f" of {most.name}" if judged.peer.may("read") else ""
            who += f" and of {len(dear) - 1} other engines" if len(dear) > 1 else ""
            yield _finding(
                "loads_cost_time", "bad", f"In the last hour, loads{who} took {span(lost_s)} longer than computing the "
                "same tokens would have.",
                cost_share=sum(sum(hits.loaded.values()) for hits in dear.values()) / max(1, judged.lately_tokens),
            )
        elif saved_s is not None and saved_s < 0:
            yield _finding(
                "loads_cost_time", "bad",
                f"Since the start, loads took {span(-saved_s)} longer than computing the same tokens would have.",
                cost_share=hits.loaded_share or 0.0,
            )

    def _tiers(self, judged: Judged) -> Iterator[Finding]:
        mover, slow_share = self._lower.mover(), judged.share_lately("tier_slow")
        for tier in self._lower.tiers():
            if tier.state == "off":
                yield _finding(
                    "tier_off", "bad", f"The tier {tier.name} is not used: {tier.why or 'it fails'}.",
                    cost_share=slow_share,
                )
            elif tier.state == "read_only" or (tier.state == "open" and tier.why):
                what = "Nothing" if tier.state == "read_only" else "Not all"
                text = f"{what} is written to the tier {tier.name}: {tier.why}."
                yield _finding("tier_not_written", "warn", text, cost_share=0.0)
        if mover is None:
            return
        ended = mover.waits.get("fulfilled", 0) + (in_vain := sum(
            mover.waits.get(how, 0) for how in ("shortened", "expired")
        ))
        if slow_share > SLOW_TOKENS and judged.lately_tokens >= LATELY_LEAST_TOKENS:
            yield _finding(
                "tier_too_slow", "warn", f"In the last hour lower tiers had {percent(slow_share, 0)} of the prompt "
                "tokens, and requests did not wait until they were loaded.", cost_share=slow_share,
            )
        elif not judged.hits.requests and ended >= SLOW_LEAST and in_vain > SLOW_SHARE * ended:
            yield _finding(
                "tier_too_slow", "warn", f"{in_vain:,} of {ended:,} requests that waited for lower tiers got less than "
                "was promised, or nothing, in time.", cost_share=slow_share,
            )
        if mover.silent_s > MOVER_SILENT_S:
            yield _finding(
                "mover_silent", "bad", f"The process that serves lower tiers has reported nothing for "
                f"{span(mover.silent_s)}.", cost_share=slow_share,
            )

    def _troubled(self, judged: Judged) -> Iterator[Finding]:
        may_read = judged.peer.may("read")
        for kind, code, one_text, many_text in TROUBLES:
            found = self._troubles.within(kind, RECENT_S)
            seen = [one for one in found if judged.peer.sees(one.tenant)] if may_read else found
            if not seen:
                continue
            last = seen[-1]
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.at))
            who = f" ({last.who})" if may_read and last.who else ""
            least = "At least " if len(found) == MOST_TROUBLES else ""
            text = one_text if len(seen) == 1 else f"{least}{len(seen):,} {many_text}, the last"
            yield _finding(code, "warn" if kind == "died" else "bad", f"{text}{who} at {when}.", at=last.at)

    async def _silent(self, judged: Judged) -> list[Finding]:
        """Engines whose heartbeats are missing: they get nothing new until one comes. Looks at all sessions, in
        slices."""
        silent = list[SessionRecord]()
        async for session in sliced(self._registry.sessions()):
            is_silent = any(member.suspect and not member.dead for member in session.members.values())
            if is_silent and not session.is_mover and judged.peer.sees(session.tenant):
                silent.append(session)
        if not silent:
            return []
        names = ", ".join(session.label or session.id for session in silent[:3])
        who = f" ({names})" if judged.peer.may("read") else ""
        one = f"An engine sends no heartbeats{who}, and gets nothing new until it does."
        many = f"{len(silent)} engines send no heartbeats{who}, and get nothing new until they do."
        return [_finding("engine_silent", "warn", one if len(silent) == 1 else many)]

    def _holds(self, judged: Judged) -> Iterator[Finding]:
        """A grant that is open for longer than any copy takes: what it holds cannot be evicted."""
        oldest = self._sessions.pool.table.grants(limit=1)
        record = self._registry.of_table_id(oldest[0].session) if oldest else None
        age_s = (self._sessions.clock.now_ms() - oldest[0].opened_ms) / 1000 if oldest else 0.0
        if age_s <= OLD_GRANT_S:
            return
        is_seen = judged.peer.may("read") and record is not None and judged.peer.sees(record.tenant)
        who = f" of {record.label or record.id}" if is_seen and record is not None else ""
        yield _finding(
            "grants_old", "warn", f"A {oldest[0].kind}{who} is open for {span(age_s)}, and a copy takes seconds.",
        )

    async def _thrashing(self, judged: Judged) -> list[Finding]:
        if self._curves is None or not judged.peer.may("read"):
            return []
        total = await self._curves.total(judged.peer)
        now = total.hit_share
        larger = [point for point in total.points if point.factor in THRASHING_FACTORS and point.hit_share is not None]
        if now is None or not larger:
            return []
        most = max(map(_share_of, larger))
        enough = next(point for point in larger if most - _share_of(point) < AS_GOOD_POINTS)
        gain, size = _share_of(enough) - now, f"A pool {enough.factor:g} times as large"
        if gain < THRASHING_POINTS and total.points[-1].factor is None:
            enough = total.points[-1]
            gain, size = _share_of(enough) - now, "A far larger pool, or a lower tier that keeps what is evicted,"
        if gain - enough.error < THRASHING_POINTS:
            return []
        computed = judged.share_lately(*COMPUTED) if judged.lately_tokens else 1.0
        return [_finding(
            "thrashing", "warn", f"{size} would find {100 * gain:.0f} percentage points more of the tokens that "
            "engines ask for.", cost_share=min(gain, computed),
        )]

    async def _shares_nothing(self, judged: Judged) -> list[Finding]:
        """Engines of one model whose chunks are apart. Looks at all sessions, in slices."""
        if not judged.peer.may("read"):
            return []
        by_model: dict[tuple[Any, ...], dict[bytes, NamespaceRecord]] = {}
        async for session in sliced(self._registry.sessions()):
            space = session.namespace
            if judged.peer.sees(space.tenant) and space.use.sums.lookup_tokens >= SHARED_LEAST_TOKENS:
                name, shape = PurePosixPath(space.model).name.lower(), space.manifest
                # Another number of layers or heads is another model, whatever its folder is called.
                model = name, space.tenant, shape.layers, shape.kv_heads, shape.head_size
                by_model.setdefault(model, {})[space.base] = space
        findings = []
        async for (name, *_), spaces in sliced(tuple(by_model.items())):
            fields = await _differing([space.manifest for space in spaces.values()])
            if set(fields) - APART:
                findings.append(_finding(
                    "shares_nothing", "warn", f"{len(spaces)} kinds of engines of the model {name} share nothing: "
                    f"they differ in {', '.join(fields)}.",
                ))
        return findings

    async def _share_fell(self, judged: Judged) -> list[Finding]:
        """In slices: each of the models has a row on each of the days."""
        hits = self._totals.hits
        days, today = await hits.days(judged.peer.sees, FELL_DAYS + 1), hits.today
        fall, whose = fall_of(days, today), ""
        if fall is None and judged.peer.may("read"):  # one model may fall while others rise
            models, falls = {day.model for day in days if day.date == today}, dict[str, Fall]()
            async for name in sliced(models):
                if (found := fall_of(_of_model(days, name), today)) is not None:
                    falls[name] = found
            name = min(falls, key=lambda name: falls[name].now / falls[name].usual, default="")
            fall, whose = falls.get(name), f" of the model {name}"
        if fall is None:
            return []
        return [_finding(
            "share_fell", "warn", f"Today {percent(fall.now, 0)} of prompt tokens{whose} were loaded, and "
            f"{percent(fall.usual, 0)} on the {fall.days} {'day' if fall.days == 1 else 'days'} before.",
            cost_share=fall.usual - fall.now,
        )]

    async def _one_tenant(self, judged: Judged) -> list[Finding]:
        if not judged.peer.may("admin"):
            return []
        views = await self._quotas.views()
        used = {name: view.used.bytes or 0 for name, view in views.items()}
        total = sum(used.values())
        if not total:
            return []
        name, most = max(used.items(), key=lambda item: item[1])
        without_room = sum(
            hits.computed.get(why, 0) for engine, hits in judged.lately.items() if engine.tenant != name
            for why in ("room", "ahead", "store_declined")
        )
        if most < ONE_TENANT_SHARE * total or not without_room:
            return []
        whose = f"of the tenant {name}" if name else "of the server's own user"
        finding = _finding(
            "full_of_one_tenant", "warn", f"{percent(most / total, 0)} of what is stored is {whose}, and in the "
            f"last hour others computed {without_room:,} tokens for which there was no room.",
            cost_share=without_room / judged.lately_tokens,
        )
        finding.remedy = _limit(name, views[name])
        return [finding]


class Fall(NamedTuple):
    """Loaded shares of prompt tokens: on the last day, and on the `days` before it."""

    now: float
    usual: float
    days: int


def fall_of(of_days: Sequence[DayOfHits], today: str) -> Fall | None:
    """Whether today's share has fallen far below that of the week before; None: it has not, or there were too few
    tokens to say."""
    prompts: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    for day in of_days:
        prompts[day.date] += day.hits.prompt_tokens
        loaded[day.date] += day.hits.loaded_tokens
    now_day = date.fromisoformat(today)
    week = {str(now_day - timedelta(days=back)) for back in range(1, FELL_DAYS + 1)}
    before = sorted(week & prompts.keys())
    tokens = sum(prompts[day] for day in before)
    if min(tokens, prompts[today]) < FELL_LEAST_TOKENS:
        return None
    usual, now = sum(loaded[day] for day in before) / tokens, loaded[today] / prompts[today]
    return Fall(now, usual, len(before)) if now < FELL_TO * usual else None


def _finding(
    code: FindingCode, severity: str, text: str, *, cost_share: float = 0.0, at: float | None = None
) -> Finding:
    return Finding(
        code=code, severity="bad" if severity == "bad" else "warn", text=text, remedy=REMEDIES[code],
        cost_share=cost_share, at=at,
    )


def _of_model(days: Sequence[DayOfHits], model: str) -> list[DayOfHits]:
    return [day for day in days if day.model == model]


def _limit(tenant: str, view: TenantView) -> str:
    """The command that limits a tenant's bytes, and leaves its other limits as they are."""
    limits = {name: getattr(view.quota, name) for name in view.quota.__struct_fields__}
    others = (f" --{name} {limit}" for name, limit in limits.items() if limit is not None and name != "bytes")
    return f"kvdock quota {shlex.quote(tenant)} --bytes 50%{''.join(others)}"


def _share_of(point: CurvePoint) -> float:
    return point.hit_share or 0.0


async def _differing(manifests: Sequence[Manifest]) -> list[str]:
    """The fields in which not all are equal. In slices: there may be a thousand with long lists of groups."""
    first, raw, found = manifests[0], _raw_groups(manifests[0]), set[str]()
    are_packed_otherwise = True
    async for one in sliced(manifests):
        found |= {name for name in Manifest.__struct_fields__ if getattr(one, name) != getattr(first, name)}
        are_packed_otherwise &= one.groups == first.groups or _raw_groups(one) == raw
    in_words = {"groups": "whether and how KV is packed (the connectors' setting pack)"} if are_packed_otherwise else {}
    return [in_words.get(name, name) for name in Manifest.__struct_fields__ if name in found]


def _raw_groups(manifest: Manifest) -> list[Group]:
    return [replace(group, packed=UNSET) for group in manifest.groups]


def _headline(effect: Effect, hits: HitTotals, asked_tokens: int) -> str:
    if effect == "not_ready":
        return "kvdock is up and gives out no slots."
    if effect == "idle":
        return "kvdock is up. No request has ended yet."
    if effect == "not_reported":
        return f"kvdock is up. Engines asked for {asked_tokens:,} tokens, and have reported no request that has ended."
    if effect == "not_helping":
        helping = "not helping yet" if hits.prompt_tokens < LATELY_LEAST_TOKENS else "not helping"
        return f"kvdock is up and {helping}: none of {hits.prompt_tokens:,} prompt tokens was loaded."
    shares = (
        f"{percent(hits.loaded_share or 0)} of prompt tokens were loaded; {percent(hits.local_share or 0)} were in the "
        "engines' own caches"
    )
    if hits.saved_s is None:
        return f"kvdock is up: {shares}."
    if hits.saved_s < 0:
        return f"kvdock is up and costs time: {shares}. Loads took {span(-hits.saved_s)} longer than computing."
    return f"kvdock is up and helping: {shares}. That saved {span(hits.saved_s)} of computing."
