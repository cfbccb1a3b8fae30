"""Explains a recent request: what it asked for, where the prefix that was found ends and why, where its prompt came
from, how long loading took, and what may help.

The reason why the prefix ends there was recorded when the lookup was answered (kvdock/api/record/hits.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvdock._core import Table
from kvdock.api.access.peer import Peer
from kvdock.api.clock import ServerClock
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.api.record.requests import Detail
from kvdock.api.reports.contents import Contents
from kvdock.api.reports.lists import shown_manifest
from kvdock.api.reports.recorded import Beginnings, Recent
from kvdock.protocol.errors import ApiError
from kvdock.protocol.hits import COMPUTED, MEMORY, WAITED, ComputedWhy
from kvdock.protocol.keys import tokens_of
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.readable import duration, size, span
from kvdock.protocol.reports import (
    ADVICE,
    AdviceCode,
    Break,
    Explanation,
    LoadStory,
    LookupStory,
    OtherNamespace,
    Parting,
    PrefixView,
    RequestView,
    Sentence,
    TierLoad,
    TierView,
)
from kvdock.protocol.schemas import Manifest

LOADED_FROM = {MEMORY: "from memory", WAITED: "after another engine had stored them"}
NEW_POOL_MS = 1000
"""A pool is new if its server clock said less when the server began: otherwise it has the time of earlier servers."""
CAME: Final[dict[ComputedWhy, str]] = {
    "tier_slow": "a lower tier loaded them", "being_stored": "another engine computed and stored them",
}
HELPS: dict[ComputedWhy, AdviceCode] = {
    "room": "enlarge_pool", "ahead": "enlarge_pool", "shrunk": "enlarge_pool", "store_declined": "enlarge_pool",
    "quota": "raise_quota",
    "mismatched": "check_memory", "read": "keep_from_tiers", "unread": "keep_from_tiers",
    "tier_slow": "wait_for_tiers", "being_stored": "wait_for_stores", "held_bytes": "raise_session_cap",
    "pinning": "register_segments", "late": "check_server", "unverified": "wait_for_verification",
    "load_failed": "check_engine_log",
    "declined_short": "lower_min_load_tokens", "declined_dear": "check_copies", "short": "smaller_chunks",
    "bypassed_adapter": "see_engine_docs", "bypassed_media": "see_engine_docs",
    "bypassed_embeddings": "see_engine_docs", "bypassed_growing": "see_engine_docs",
    "bypassed_unready": "see_engine_docs",
}
"""What may help where tokens were computed for that reason."""
MOST_ROWS = 64
"""At most this many rows of one request are explained."""
MOST_CONTINUATIONS, MOST_ELSEWHERE = 3, 4
ENOUGH_TOKENS = 256
"""Prompts that begin alike for fewer tokens may have no more in common than their chat template; a prompt that is
shorter has to be the same as far as beginnings tell."""
APART = frozenset({"weights", "tenant", "cache_salt"})
"""Namespaces that differ in these are apart on purpose, so nobody is advised to make them alike."""


class Sources(NamedTuple):
    """What explanations are made from. `tiers`: the lower tiers, as the mover last reported them."""

    recent: Recent
    beginnings: Beginnings
    contents: Contents
    tiers: Callable[[], list[TierView]]


class Explainer:
    def __init__(self, sources: Sources, registry: Registry, table: Table, clock: ServerClock) -> None:
        self._recent, self._beginnings, self._contents, self._tiers = sources
        self._registry, self._table, self._clock = registry, table, clock
        self._started_ms = clock.now_ms()

    async def explain(self, peer: Peer, request: str, session: str = "") -> Explanation:
        """Explains the latest request of that id that the caller may see, or the session's. `request`: its id, the
        beginning of its id, or the id of its trace. Raises ApiError(unknown_request)."""
        found = await self._recent.named(request, peer.sees, MOST_ROWS)
        rows = [one for one in found if session in ("", one[0].session)]
        if not rows:
            raise ApiError(
                "unknown_request",
                "no request that the server remembers has this id, begins with it or has this trace: it "
                "remembers the last ones, and for hours a sample of those that computed something",
                found=request,
                wanted="an id of GET /v1/requests, its beginning, or the id of a trace",
            )
        newest, detail = rows[0]
        mine = [(row, more) for row, more in reversed(rows) if row.session == newest.session]
        lookups = [_story(row, more) for row, more in mine if row.kind == "lookup"]
        outcome = next((row.outcome for row, _ in reversed(mine) if row.outcome is not None), None)
        space = self._registry.space_of(detail.namespace)
        asked = next((more for row, more in rows if row.kind == "lookup" and row.session == newest.session), detail)
        goes_on = await self._goes_on(peer, asked)
        elsewhere: list[OtherNamespace] = []
        if space is not None and lookups:
            elsewhere = self._elsewhere(space, asked.beginnings, _had(lookups[-1], outcome), peer)
        tier_tokens, tier_loads = self._in_tiers(space, lookups, outcome)
        sentences = [
            *_sentences([row for row, _ in mine], lookups, outcome), *_of_tiers(tier_tokens, tier_loads),
            *_weights(detail.weights), *self._about_space(space, lookups), *_continuations(goes_on),
            *(sentence for one in elsewhere for sentence in _differs(one)),
            *_others([row for row, _ in found if row.session != newest.session]),
        ]
        return Explanation(
            request=newest.request, namespace=detail.namespace.hex(), model=space.model if space else "",
            weights=detail.weights, sentences=sentences,
            advice={one.advice: ADVICE[one.advice] for one in sentences if one.advice},
            lookups=lookups, outcome=outcome, load=_load_of(outcome),
            saved_s=outcome.saved_s if outcome is not None else None, tier_tokens=tier_tokens, tier_loads=tier_loads,
            goes_on=goes_on, elsewhere=elsewhere,
        )

    def _about_space(self, space: NamespaceRecord | None, lookups: Sequence[LookupStory]) -> Iterator[Sentence]:
        """How much the server can know of a prompt that, as far as it knows, was never stored."""
        breaks = [one.broke for one in lookups if one.broke is not None and one.broke.why == "never_stored"]
        if space is None or not breaks:
            return
        chunks = self._table.chunks_in(space.table_id)
        if not chunks:
            yield Sentence(code="nothing_stored", text="Nothing is stored in its namespace.")
        now_ms = self._clock.now_ms()
        is_new, up_s = self._started_ms < NEW_POOL_MS, (now_ms - self._started_ms) / 1000
        older = (
            "with a new pool, so nothing older is in it" if is_new else
            f"and its pool is {duration(now_ms / 1000)} old: what was evicted before the server started is not known"
        )
        yield Sentence(code="ages", text=f"The server started {duration(up_s)} ago, {older}.")

    def _in_tiers(
        self, space: NamespaceRecord | None, lookups: Sequence[LookupStory], outcome: OutcomeView | None
    ) -> tuple[int, list[TierLoad]]:
        """How many of the missing tokens lower tiers have, and what loading them from each would have taken."""
        if outcome is not None:
            tokens = sum(run.tokens for run in outcome.runs if run.why == "tier_slow")
        else:
            last = lookups[-1] if lookups else None
            broke, tokens = last.broke if last is not None else None, 0
            if last is not None and broke is not None and broke.why == "tier_slow":
                tokens = broke.tokens - _came(last, 0, None)
        if space is None or not tokens:
            return 0, []
        size_bytes = tokens * space.chunk_bytes / space.manifest.chunk_tokens
        return tokens, [
            TierLoad(tier=one.name, load_ms=(
                1000 * (one.load_latency_s + size_bytes / one.load_bytes_per_s)
                if one.state != "off" and one.load_bytes_per_s else None
            ))
            for one in self._tiers()
        ]

    async def _goes_on(self, peer: Peer, asked: Detail) -> list[PrefixView]:
        """What other prompts have behind the last chunk that the lookup found, the most used first."""
        if asked.parted is None or self._registry.space_of(asked.namespace) is None:
            return []
        last, own = asked.parted
        try:
            page = await self._contents.prefixes(
                peer, MOST_CONTINUATIONS + 1, namespace=asked.namespace.hex(), below=last.hex()
            )
        except ApiError:  # too many others search, or its namespace has just ended
            return []
        return [one for one in page.prefixes if one.key != own.hex()][:MOST_CONTINUATIONS]

    def _elsewhere(self, mine: NamespaceRecord, beginnings: str, had: int, peer: Peer) -> list[OtherNamespace]:
        """Other namespaces that the caller may see and that have more than the first `had` tokens of the prompt."""
        own = tokens_of(beginnings)
        found = []
        for other, tokens in self._beginnings.holding(beginnings):
            if other is mine or not peer.sees(other.tenant) or tokens <= had:
                continue
            alike = self._beginnings.alike(beginnings, other)
            if alike.tokens < min(ENOUGH_TOKENS, own):
                continue
            parts = Parting(after_tokens=alike.tokens, before_tokens=alike.before) if alike.before else None
            found.append(OtherNamespace(
                namespace=other.digest.hex(), tokens=tokens, parts=parts, differs=_differences(mine, other)
            ))
        return sorted(found, key=lambda one: (-one.tokens, len(one.differs)))[:MOST_ELSEWHERE]


def _had(last: LookupStory, outcome: OutcomeView | None) -> int:
    """How many of the prompt's first tokens were found, or had by the engine itself."""
    if outcome is None:
        return last.last_hit_tokens
    return max(outcome.asked_from + last.hit_tokens, outcome.found_tokens, outcome.local_tokens + outcome.loaded_tokens)


def _differences(mine: NamespaceRecord, other: NamespaceRecord) -> dict[str, list[Any]]:
    shown = [msgspec.to_builtins(shown_manifest(one.manifest)) for one in (mine, other)]
    differs: dict[str, list[Any]] = {
        name: [one.get(name) for one in shown]
        for name in Manifest.__struct_fields__ if getattr(mine.manifest, name) != getattr(other.manifest, name)
    }
    if mine.use.weights != other.use.weights:
        differs["weights"] = [mine.use.weights, other.use.weights]
    if mine.tenant != other.tenant:
        differs["tenant"] = [mine.tenant, other.tenant]
    return differs


def _story(row: RequestView, detail: Detail) -> LookupStory:
    return LookupStory(
        at=row.at, engine=row.label or row.session, tokens=row.tokens, hit_tokens=row.hit_tokens,
        last_hit_tokens=detail.hit_tokens, chunks=detail.chunks, bytes=detail.size_bytes, took_us=row.took_us,
        loaded_us=detail.loaded_us, broke=detail.broke,
    )


def _of_tiers(tokens: int, loads: Sequence[TierLoad]) -> Iterator[Sentence]:
    if not loads:
        return
    which = f"The lower tier {loads[0].tier} had" if len(loads) == 1 else "One of the lower tiers had"
    took = [
        f"from {one.tier} about {one.load_ms:,.1f} ms" if one.load_ms is not None else f"{one.tier} is off now"
        for one in loads
    ]
    yield Sentence(code="in_tiers", advice="wait_for_tiers", text=(
        f"{which} {tokens:,} of the missing tokens. Loading them would have taken, at the speed that the server "
        f"expects: {'; '.join(took)}."
    ))


def _sentences(
    rows: Sequence[RequestView], lookups: Sequence[LookupStory], outcome: OutcomeView | None
) -> Iterator[Sentence]:
    start = outcome.asked_from if outcome is not None else 0
    for one in lookups:
        when = time.strftime("%H:%M:%S", time.localtime(one.at))
        found = f"the first {one.hit_tokens:,}" if one.hit_tokens else "none"
        yield Sentence(code="asked", text=(
            f"At {when} {one.engine} asked for {one.tokens:,} tokens, in whole chunks, and the server had {found} of "
            f"them at once; it took {one.took_us:,} µs to say so."
        ))
        if one.broke is not None and (came := _came(one, start, outcome)):
            yield Sentence(code="waited", text=(
                f"Of the {_which(one.broke, start)}, {came:,} came while the request waited: {CAME[one.broke.why]}."
            ))
        elif one.broke is not None:
            yield from _broke(one.broke, start, one.tokens)
        if one.loaded_us is not None:
            rate = f", {size(one.bytes / one.loaded_us * 1e6)}/s" if one.loaded_us and one.bytes else ""
            yield Sentence(code="given_back", text=(
                f"All ranks had given back what they read, {one.chunks:,} {'chunk' if one.chunks == 1 else 'chunks'} "
                f"({size(one.bytes)}), {one.loaded_us / 1000:,.1f} ms after that{rate}."
            ))
    for row in rows:
        if row.kind == "store":
            yield Sentence(code="stored", text=(
                f"{row.tokens:,} tokens were to be stored as {row.request}; {row.hit_tokens:,} of them were there "
                "already."
            ))
    if outcome is not None:
        yield from _prompt(outcome)
        yield from _load_sentences(outcome)
    elif lookups:
        yield Sentence(code="not_ended", text="Its engine has not reported that it has ended.")


def _prompt(outcome: OutcomeView) -> Iterator[Sentence]:
    """Where the prompt's tokens came from, in their order."""
    yield Sentence(
        code="ended", text=f"It has ended. Its prompt had {outcome.prompt_tokens:,} tokens, in this order:"
    )
    for run in outcome.runs:
        tokens = f"{run.tokens:,} {'token' if run.tokens == 1 else 'tokens'}"
        if run.origin == "local":
            yield Sentence(code="local", text=f"{tokens} that the engine's own cache had.")
        elif run.origin == "loaded":
            source = LOADED_FROM.get(run.source, f"from the tier {run.source}")
            yield Sentence(code="loaded", text=f"{tokens} loaded {source}.")
        elif run.why:
            yield Sentence(
                code="computed", text=f"{tokens} computed: {COMPUTED[run.why]}.", advice=HELPS.get(run.why, "")
            )
    if outcome.why and outcome.why not in COMPUTED:
        yield Sentence(
            code="engine_reason", text=f"The engine's reason why no more was loaded is {outcome.why!r}.",
            advice="check_engine_log",
        )
    if outcome.reloaded_tokens:
        yield Sentence(
            code="reloaded",
            text=f"It was preempted, and loaded {outcome.reloaded_tokens:,} tokens when it came back.",
        )


def _load_of(outcome: OutcomeView | None) -> LoadStory | None:
    if outcome is None or outcome.load_us is None:
        return None
    copy_us = outcome.copy_us
    return LoadStory(
        tokens=outcome.loaded_tokens + outcome.reloaded_tokens, bytes=outcome.loaded_bytes,
        took_ms=outcome.load_us / 1000,
        queue_ms=None if copy_us is None else max(0, outcome.load_us - copy_us) / 1000,
        copy_ms=None if copy_us is None else copy_us / 1000,
        bytes_per_s=outcome.loaded_bytes / copy_us * 1e6 if copy_us else None,
    )


def _load_sentences(outcome: OutcomeView) -> Iterator[Sentence]:
    load = _load_of(outcome)
    if load is None:
        return
    text = f"Loading took the engine {load.took_ms:,.1f} ms"
    if load.copy_ms is not None and load.queue_ms is not None:
        rate = f" ({size(load.bytes)}, {size(load.bytes_per_s)}/s)" if load.bytes_per_s else ""
        text += f": {load.queue_ms:,.1f} ms of waiting and {load.copy_ms:,.1f} ms of copying{rate}"
    yield Sentence(code="load_time", text=f"{text}.")
    saved = outcome.saved_s
    if saved is None:
        return
    computing = f"At the {outcome.prefill_tokens_per_s:,.0f} tokens/s that the engine computes"
    if saved >= 0:
        yield Sentence(code="saved", text=f"{computing}, it saved {span(saved)}.")
    else:
        yield Sentence(
            code="cost_time", text=f"{computing}, it took {span(-saved)} longer than computing.", advice="check_copies"
        )


def _came(asked: LookupStory, start: int, outcome: OutcomeView | None) -> int:
    """How many of the tokens that a lookup was not given were there before the request ended, because it waited."""
    broke = asked.broke
    if broke is None or broke.why not in CAME:
        return 0
    end = asked.last_hit_tokens if outcome is None else outcome.local_tokens + outcome.loaded_tokens - start
    return max(0, min(broke.tokens, end - broke.at_tokens))


def _which(broke: Break, start: int) -> str:
    at = start + broke.at_tokens
    return f"{broke.tokens:,} tokens after the first {at:,}" if at else f"first {broke.tokens:,} tokens"


def _broke(broke: Break, start: int, asked_tokens: int) -> Iterator[Sentence]:
    """`start`: the position in the prompt of the first of the `asked_tokens` tokens that the lookup names."""
    at = start + broke.at_tokens
    left = "; they had left the pool" if broke.why == "tier_slow" else ","
    gone = "" if broke.gone_s is None else f"{left} {duration(broke.gone_s)} before this lookup"
    unused = "" if broke.unused_s is None else f"; they had been unused for {duration(broke.unused_s)} by then"
    yield Sentence(code="not_given", advice=HELPS.get(broke.why, ""), text=(
        f"The {_which(broke, start)} were not given: {COMPUTED[broke.why]}{gone}{unused}."
    ))
    if broke.why != "never_stored":
        return
    is_early = asked_tokens - broke.at_tokens > at
    if broke.at_tokens and broke.parts is not None:
        yield Sentence(code="diverges", advice="move_what_varies" if is_early else "", text=(
            f"What was stored goes on in {_ways(broke.others)} after the first {at:,} tokens. "
            f"{_parting(broke.parts, start, 'whole chunks')}"
        ))
    elif broke.at_tokens:
        yield Sentence(code="longer_than_stored", text=(
            f"No prompt that begins with these {at:,} tokens was stored with more of them."
        ))
    elif broke.parts is not None and not start:
        others = f", and goes on in {_ways(broke.others)} there" if broke.others else ""
        yield Sentence(code="parts_early", advice="move_what_varies", text=(
            f"What was stored in its namespace has the same first {broke.parts.after_tokens:,} tokens{others}. Unless "
            f"that had another adapter, image or salt: {_parting(broke.parts, 0, 'a few positions')}"
        ))
    elif broke.same_tokens and not start:
        yield Sentence(code="same_beginning", text=(
            f"A prompt with the same first {broke.same_tokens:,} tokens was stored in its namespace: it had another "
            "adapter, image or salt, or its chunks went so long ago that the server has forgotten them."
        ))
    elif not start:
        yield Sentence(
            code="starts_anew", text="No prompt that was stored in its namespace then had the same first chunk.",
        )
    if is_early and broke.parts is not None and (broke.at_tokens or not start):
        after = max(at, start + broke.parts.after_tokens)
        yield Sentence(code="changes_early", advice="steady_beginning", text=(
            f"It parts from them early: {start + asked_tokens - after:,} of its tokens lie behind the first {after:,}. "
            "If these prompts are meant to have a longer beginning in common, look there for what differs, such as "
            "the chat template or the system prompt."
        ))



def _ways(others: int) -> str:
    return "another way" if others == 1 else f"{others:,} other ways"


def _parting(parts: Parting, start: int, known: str) -> str:
    """`known`: of what the server knows whether it is the same."""
    return (
        f"They part at one of the tokens {start + parts.after_tokens:,} to {start + parts.before_tokens - 1:,}, "
        f"counted from 0: the server compares {known} alone."
    )


def _others(rows: Sequence[RequestView]) -> list[Sentence]:
    """`rows`: of the same id, by other engines."""
    engines = {row.session: row.label or row.session for row in rows}
    if not engines:
        return []
    others = ", ".join(
        f"{name} (session {session})" if name != session else session for session, name in engines.items()
    )
    return [Sentence(code="other_engines", text=(
        f"Other engines had requests with this id, which are explained if their session is named: {others}."
    ))]


def _weights(weights: str | None) -> list[Sentence]:
    if not weights:
        return []
    return [Sentence(
        code="weights", text=f"Its engine ran the weights {weights!r}, whose chunks are apart from those of others."
    )]


def _continuations(goes_on: Sequence[PrefixView]) -> Iterator[Sentence]:
    if not goes_on:
        return
    each = [
        f"{', '.join(map(repr, one.labels)) or one.key[:12]} ({size(one.bytes)}, "
        f"{one.uses:,} {'use' if one.uses == 1 else 'uses'}{_last_used(one.unused_s)})"
        for one in goes_on
    ]
    yield Sentence(code="goes_on", text=(
        f"What is stored behind the part that they share, by the keys of the chunks and the most used first: "
        f"{'; '.join(each)}."
    ))


def _last_used(unused_s: float | None) -> str:
    return "" if unused_s is None else f", last used {duration(unused_s)} ago"


def _differs(other: OtherNamespace) -> Iterator[Sentence]:
    fields = "; ".join(f"{name}: {mine!r} here, {there!r} there" for name, (mine, there) in other.differs.items())
    yield Sentence(code="other_namespace", advice="same_identity" if other.differs.keys() - APART else "", text=(
        f"Another namespace has the first {other.tokens:,} tokens of this prompt, or more, and this request cannot use "
        f"them: {other.namespace[:12]} differs in {fields}."
    ))
    if other.parts is not None:
        yield Sentence(code="other_prompt", advice="steady_beginning", text=(
            f"Even so, the prompts stored there go on otherwise. {_parting(other.parts, 0, 'a few positions')}"
        ))
