"""The server's counters in words, grouped by what they mean. A counter that is 0 says nothing and is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, get_type_hints

from kvdock.api.views.history import Counters
from kvdock.cli.words import size

GROUPS: Final[dict[str, dict[str, str]]] = {
    "lookups": {
        "lookups": "{} made", "lookup_renewals": "{} repeated", "peeks": "{} without a session",
        "lookup_tokens": "{} token|s looked up", "hit_tokens": "{} found",
    },
    "hits cut short": {
        "limited_lookups": "{} by a byte cap", "unpinned_lookups": "{} by a rank that had not registered memory",
        "unpinned_chunks": "{} chunk|s lost so", "unpinned_tokens": "{} token|s lost so",
    },
    "loaded": {"loaded_chunks": "{} chunk|s", "loaded_bytes": "{}", "loaded_tokens": "{} token|s, as engines tell"},
    "stored": {
        "stored_chunks": "{} chunk|s", "stored_bytes": "{}", "reservations": "{} reservation|s",
        "aborted_chunks": "{} chunk|s given up",
    },
    "stores cut short": {
        "short_reservations": "{} for want of memory", "quota_reservations": "{} by a quota",
        "unpinned_reservations": "{} for want of memory that every rank had registered",
    },
    "made room": {"evicted_chunks": "{} chunk|s evicted", "refused_retains": "{} not retained, as too many were"},
    "loaded ahead": {
        "prefetched_chunks": "{} chunk|s", "prefetches": "asked {} time|s", "prefetches_refused": "{} refused",
        "prefetches_dropped": "{} not done",
    },
    "requests": {"outcomes": "{} ended and told of", "dropped_outcomes": "{} ended and not told of"},
    "engines": {"attached_members": "{} process|es attached", "dead_members": "{} found dead"},
    "trouble": {
        "mismatches": "{} chunk|s with a wrong checksum", "refusals": "{} call|s refused",
        "refused_connections": "{} connection|s refused",
    },
}
"""By group: counters, and how their totals are said. What is behind a `|` is left out where there is one."""


def value_of(counter: str, total: int) -> str:
    return size(total) if counter.endswith("_bytes") else f"{total:,}"


def folded(counters: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(group, its counters in words) of the groups that have something to say. A counter that a newer server has is in
    the group "others"."""
    known: set[str] = set()
    for group, phrases in GROUPS.items():
        known |= phrases.keys()
        said = [_said(phrase, name, counters[name]) for name, phrase in phrases.items() if counters.get(name)]
        if said:
            yield group, ", ".join(said)
    others = [f"{value_of(name, total)} {name.replace('_', ' ')}" for name, total in counters.items()
              if total and name not in known]
    if others:
        yield "others", ", ".join(others)


def _said(phrase: str, counter: str, total: int) -> str:
    return re.sub(r"\|(\w+)", "" if total == 1 else r"\1", phrase).format(value_of(counter, total))


def meaning_of(counter: str) -> str:
    """As `/metrics` describes it; empty for one that this version does not know."""
    hint = get_type_hints(Counters, include_extras=True).get(counter)
    return "" if hint is None else str(hint.__metadata__[0].description)
