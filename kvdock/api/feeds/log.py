"""The log's sentences for events: one for each kind of event that operators should know of.

Messages with one template are folded by the log's handler (kvdock/api/log.py), so that a storm of refusals is two
lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from kvdock.api.log import shown
from kvdock.protocol import events as e
from kvdock.protocol.readable import EVENT, size

log = logging.getLogger("kvdock.events")


class Sentence(NamedTuple):
    level: int
    template: str
    values: Callable[[Any], tuple[object, ...]]
    """The values of the template's placeholders, from the event."""

    def template_of(self, event: e.Event) -> str:
        """The template. Each code of refusals has its own, so that many refusals of one code hide no others."""
        return self.template.format(code=event.code) if isinstance(event, e.Refused) else self.template


def _member_of(event: Any) -> tuple[str, str, str]:
    return event.session, shown(event.label), shown(event.member)


SENTENCES: dict[type[e.Event], Sentence] = {
    e.Attached: Sentence(
        logging.INFO, "session %s (%s): member %s has attached with ranks %s of the model %s",
        lambda event: (*_member_of(event), event.ranks, shown(event.model)),
    ),
    e.Suspect: Sentence(
        logging.WARNING, "session %s (%s): member %s has sent nothing for %.1f s, and gets nothing new until it does",
        lambda event: (*_member_of(event), event.silent_s),
    ),
    e.Recovered: Sentence(logging.INFO, "session %s (%s): member %s sends heartbeats again", _member_of),
    e.Dead: Sentence(logging.WARNING, "session %s (%s): member %s is dead", _member_of),
    e.Left: Sentence(logging.INFO, "session %s (%s): member %s has left", _member_of),
    e.Refused: Sentence(
        logging.INFO, "a call was refused: {code} (%s): %s",
        lambda event: (event.route or "no route", shown(event.detail)),
    ),
    e.Evicted: Sentence(
        logging.INFO, "chunks are evicted from now on, for room in the pool or in a tenant's quota: %d since the start",
        lambda event: (event.total,),
    ),
    e.Mismatched: Sentence(
        logging.ERROR, "session %s (%s): %d chunks of lease %s did not have the bytes that were stored, and are no "
        "longer found", lambda event: (event.session, shown(event.label), event.chunks, event.lease),
    ),
    e.MismatchRefuted: Sentence(
        logging.ERROR, "session %s (%s) reported %d chunks of lease %s as damaged, but their bytes are right: they "
        "stay. The memory or the device of that engine is bad%s",
        lambda event: (event.session, shown(event.label), event.chunks, event.lease,
                       ", and its reports are refused for an hour" if event.is_refused else ""),
    ),
    e.Grown: Sentence(
        logging.INFO, "segment %d added: the pool has %s",
        lambda event: (event.segment, size(event.allocated_bytes)),
    ),
    e.GrowthFailed: Sentence(
        logging.WARNING, "the pool cannot grow beyond %s, next try in %g s: %s",
        lambda event: (size(event.allocated_bytes), event.retry_s, event.why),
    ),
    e.Shrunk: Sentence(
        logging.INFO, "segment %d removed: the pool has %s",
        lambda event: (event.segment, size(event.allocated_bytes)),
    ),
    e.GenerationRaised: Sentence(
        logging.INFO, "namespace %s was cleared: its generation is %d",
        lambda event: (event.namespace[:12], event.generation),
    ),
    e.TiersPending: Sentence(
        logging.WARNING, "these lower tiers have not carried out a clear or deletion yet, and are not used for its "
        "namespace until they have: %s",
        lambda event: (", ".join(event.tiers),),
    ),
    e.LimitsChanged: Sentence(
        logging.INFO, "limits changed: %s",
        lambda event: (", ".join(f"{name} {was} → {now}" for name, (was, now) in event.changed.items()),),
    ),
    e.Adopted: Sentence(
        logging.INFO, "took over pool %s: it keeps %d chunks, %d sessions and %d leases, and drops %d chunks that were "
        "being stored",
        lambda event: (event.pool, event.chunks, event.sessions, event.leases, event.aborted),
    ),
    e.Ready: Sentence(
        logging.INFO, "ready for engines at %s, with a pool of at most %s",
        lambda event: (event.address, size(event.pool_bytes)),
    ),
    e.Reread: Sentence(
        logging.INFO, "settings and access tokens were read again%s",
        lambda event: (f"; these count from the next start: {', '.join(event.needs_restart)}"
                       if event.needs_restart else "",),
    ),
    e.Draining: Sentence(
        logging.INFO, "the server %s: %d leases and %d reservations are open",
        lambda event: ("hands its pool to another one" if event.is_takeover else "drains", event.leases,
                       event.reservations),
    ),
    e.Ended: Sentence(
        logging.INFO, "the server has ended, and pool %s %s",
        lambda event: (event.pool, "stays in shared memory for the next server at this socket" if event.keeps_pool
                       else "is removed"),
    ),
}


BY_OPERATOR = Sentence(
    logging.INFO, "an operator has evicted %d chunks", lambda event: (event.by_operator,),
)
QUIET_S = 3600.0
"""A full pool evicts all the time. That is logged when it begins: after so long without an eviction."""


class EventLog:
    name = "log"
    kinds: Collection[type[e.Event]] = frozenset(SENTENCES)

    def __init__(self) -> None:
        self._evicted_at = -QUIET_S

    def take(self, event: e.Event) -> None:
        sentence = SENTENCES[type(event)]
        if isinstance(event, e.Evicted) and event.by_operator:
            sentence = BY_OPERATOR
        elif isinstance(event, e.Evicted):
            is_news, self._evicted_at = event.at - self._evicted_at >= QUIET_S, event.at
            if not is_news:
                return
        if log.isEnabledFor(sentence.level):
            log.log(sentence.level, sentence.template_of(event), *sentence.values(event), extra={EVENT: event})
