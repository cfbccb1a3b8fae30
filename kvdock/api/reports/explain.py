"""Explains a recent request: what it asked for, where the prefix that was found ends and why, how long loading took.

The reason why the prefix ends there was recorded when the lookup was answered (kvdock/api/record/tally.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvdock._core import Table
from kvdock.api.access.peer import Peer
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.api.record.requests import Detail
from kvdock.api.reports.lists import shown_manifest
from kvdock.api.reports.recorded import Recent
from kvdock.protocol.errors import ApiError
from kvdock.protocol.outcomes import OutcomeView
from kvdock.protocol.readable import duration, size, span
from kvdock.protocol.reports import Break, Explanation, LoadStory, LookupStory, OtherNamespace, RequestView
from kvdock.protocol.schemas import Manifest

MOST_ROWS = 64
"""At most this many rows of one request are explained."""


class Explainer:
    def __init__(self, recent: Recent, registry: Registry, table: Table) -> None:
        self._recent, self._registry, self._table = recent, registry, table

    def explain(self, peer: Peer, request: str, session: str = "") -> Explanation:
        """Explains the latest request of that id that the caller may see, or the session's. Raises
        ApiError(unknown_request)."""
        found = self._recent.named(request, peer.sees, MOST_ROWS)
        rows = [one for one in found if session in ("", one[0].session)]
        if not rows:
            raise ApiError(
                "unknown_request", "no recent lookup, store or ended request has this id", found=request,
                wanted="an id of GET /v1/requests",
            )
        newest, detail = rows[0]
        mine = [(row, more) for row, more in reversed(rows) if row.session == newest.session]
        lookups = [_story(row, more) for row, more in mine if row.kind == "lookup"]
        outcome = next((row.outcome for row, _ in reversed(mine) if row.outcome is not None), None)
        space = next((one for one in self._registry.namespaces() if one.digest == detail.namespace), None)
        nearest = None
        if space is not None and lookups and not any(one.hit_tokens for one in lookups):
            nearest = self._nearest(space)
        return Explanation(
            request=newest.request, namespace=detail.namespace.hex(), model=space.manifest.model if space else "",
            weights=detail.weights,
            sentences=[
                *_sentences([row for row, _ in mine], lookups, outcome), *_weights(detail.weights), *_differs(nearest),
                *_others([row for row, _ in found if row.session != newest.session]),
            ],
            lookups=lookups, outcome=outcome, load=_load_of(outcome),
            saved_s=outcome.saved_s if outcome is not None else None, nearest=nearest,
        )

    def _nearest(self, mine: NamespaceRecord) -> OtherNamespace | None:
        """Another namespace of the tenant and model with chunks, with the fewest other differences."""
        best: OtherNamespace | None = None
        for other in self._registry.namespaces():
            is_like = other.tenant == mine.tenant and other.manifest.model == mine.manifest.model
            if other is mine or not is_like or not self._table.chunks_in(other.table_id):
                continue
            differs = _differences(mine, other)
            if best is None or len(differs) < len(best.differs):
                best = OtherNamespace(namespace=other.digest.hex(), differs=differs)
        return best


def _differences(mine: NamespaceRecord, other: NamespaceRecord) -> dict[str, list[Any]]:
    shown, others = shown_manifest(mine.manifest), shown_manifest(other.manifest)
    differs = {
        name: [msgspec.to_builtins(getattr(one, name)) for one in (shown, others)]
        for name in Manifest.__struct_fields__ if getattr(mine.manifest, name) != getattr(other.manifest, name)
    }
    return differs if mine.use.weights == other.use.weights else {
        **differs, "weights": [mine.use.weights, other.use.weights]
    }


def _story(row: RequestView, detail: Detail) -> LookupStory:
    return LookupStory(
        at=row.at, engine=row.label or row.session, tokens=row.tokens, hit_tokens=row.hit_tokens, chunks=row.chunks,
        bytes=row.bytes, took_us=row.took_us, loaded_us=detail.loaded_us, broke=detail.broke,
    )


def _sentences(
    rows: Sequence[RequestView], lookups: Sequence[LookupStory], outcome: OutcomeView | None
) -> list[str]:
    sentences = []
    for one in lookups:
        when = time.strftime("%H:%M:%S", time.localtime(one.at))
        found = f"the first {one.hit_tokens:,}" if one.hit_tokens else "none"
        sentences.append(
            f"At {when} {one.engine} asked for {one.tokens:,} tokens, in whole chunks, and the server had {found} of "
            f"them; it took {one.took_us:,} µs to say so."
        )
        if one.broke is not None:
            sentences.append(_broke(one.broke))
        if one.loaded_us is not None:
            rate = f", {size(one.bytes / one.loaded_us * 1e6)}/s" if one.loaded_us and one.bytes else ""
            sentences.append(
                f"All ranks had given back what they read, {one.chunks:,} {'chunk' if one.chunks == 1 else 'chunks'} "
                f"({size(one.bytes)}), {one.loaded_us / 1000:,.1f} ms after that{rate}."
            )
    stored = [row for row in rows if row.kind == "store"]
    for row in stored:
        sentences.append(
            f"{row.tokens:,} tokens were to be stored as {row.request}; {row.hit_tokens:,} of them were there already."
        )
    if outcome is not None:
        sentences.append(
            f"It has ended: of {outcome.prompt_tokens:,} prompt tokens the engine's own cache had "
            f"{outcome.local_tokens:,}, and {outcome.loaded_tokens:,} were loaded."
        )
        sentences += _load_sentences(outcome)
        if outcome.why:
            sentences.append(f"Not more were loaded: {outcome.why_in_words}.")
    elif lookups:
        sentences.append("Its engine has not reported yet what became of it.")
    return sentences


def _load_of(outcome: OutcomeView | None) -> LoadStory | None:
    if outcome is None or outcome.load_us is None:
        return None
    copy_us = outcome.copy_us
    return LoadStory(
        tokens=outcome.loaded_tokens, bytes=outcome.loaded_bytes, took_ms=outcome.load_us / 1000,
        queue_ms=None if copy_us is None else max(0, outcome.load_us - copy_us) / 1000,
        copy_ms=None if copy_us is None else copy_us / 1000,
        bytes_per_s=outcome.loaded_bytes / copy_us * 1e6 if copy_us else None,
    )


def _load_sentences(outcome: OutcomeView) -> list[str]:
    load = _load_of(outcome)
    if load is None:
        return []
    text = f"Loading took the engine {load.took_ms:,.1f} ms"
    if load.copy_ms is not None and load.queue_ms is not None:
        rate = f" ({size(load.bytes)}, {size(load.bytes_per_s)}/s)" if load.bytes_per_s else ""
        text += f": {load.queue_ms:,.1f} ms of waiting and {load.copy_ms:,.1f} ms of copying{rate}"
    saved = outcome.saved_s
    if saved is None:
        return [f"{text}."]
    computing = f"At the {outcome.prefill_tokens_per_s:,.0f} tokens/s that the engine computes"
    effect = f"it saved {span(saved)}" if saved >= 0 else f"it took {span(-saved)} longer than computing"
    return [f"{text}.", f"{computing}, {effect}."]


def _broke(broke: Break) -> str:
    gone = "" if broke.gone_s is None else f", {duration(broke.gone_s)} before this lookup"
    unused = "" if broke.unused_s is None else f"; it had been unused for {duration(broke.unused_s)} by then"
    return f"The chunk after the first {broke.at_tokens:,} tokens was not given: {broke.in_words}{gone}{unused}."


def _others(rows: Sequence[RequestView]) -> list[str]:
    """`rows`: of the same id, by other engines."""
    engines = {row.session: row.label or row.session for row in rows}
    if not engines:
        return []
    others = ", ".join(
        f"{name} (session {session})" if name != session else session for session, name in engines.items()
    )
    return [f"Other engines had requests with this id, which are explained if their session is named: {others}."]


def _weights(weights: str | None) -> list[str]:
    return [f"Its engine ran the weights {weights!r}, whose chunks are apart from those of others."] if weights else []


def _differs(nearest: OtherNamespace | None) -> list[str]:
    if nearest is None:
        return []
    fields = "; ".join(f"{name}: {mine!r} here, {other!r} there" for name, (mine, other) in nearest.differs.items())
    return [
        f"Another namespace of the model has chunks, which it cannot use: {nearest.namespace[:12]} differs in {fields}."
    ]
