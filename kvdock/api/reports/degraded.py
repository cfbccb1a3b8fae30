"""What the server cannot give or do now, who has most of what is full, and since when: for the status and the log.

Every reason is a sentence that docs/operate/not_ready.md explains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvdock.api.access.peer import Peer, of_user
from kvdock.protocol.reports import Degraded

log = logging.getLogger("kvdock.api")

STARTING = "the first segment is being allocated"
DRAINING = "draining"
NAMES_GONE = "no engine can attach any more, somebody removed from shared memory"
ALL_HELD = "every byte of the pool is held by engines or waits for their release"
ALL_KEPT = "pins keep all that engines do not hold: nothing may be evicted"
CAP_REACHED = "engines hold as much of the pool as total_cap lets them"
GRANTS_HELD = "all leases and reservations that there may be are open: no lookup and no store gets another one"
MEMBERS_HELD = "every place for processes of engines is taken: no engine can attach any more"
SESSIONS_HELD = "every session that there may be is open: no other engine can attach"
NAMESPACES_HELD = "every namespace is in use: no engine with another manifest, or other weights, can attach"
CONNECTIONS_HELD = "all {} connections that there may be are open: new ones are refused until one ends"
TABLE_HELD = "every record of the chunk table is held: serve with more table_records"
CANNOT_GROW = "the pool cannot grow now"
NOT_KEPT = "quotas that calls have put and the history are not kept for the next server"


class Most(NamedTuple):
    """Who has most of something. `tenant`: whose name that is; None: nobody's who is here."""

    text: str
    tenant: str | None

    def told(self, peer: Peer) -> str:
        """Empty if the caller may not know of it."""
        may = peer.may("admin") if self.tenant is None else peer.may("read") and peer.sees(self.tenant)
        return self.text if may else ""


def tenant_with_most(what: str, counts: Mapping[str, int]) -> Most | None:
    """`counts`: how many of it each tenant has."""
    tenant = max(counts, key=lambda name: counts[name], default=None)
    if tenant is None or not counts[tenant]:
        return None
    who = "tenant " + tenant if tenant else "the own user"
    return Most(f"most are of {who}: {counts[tenant]} {what}", tenant)


async def nobody() -> None:
    """For what nobody has more of than others."""


class Lack(NamedTuple):
    """Something that the server cannot give or do now. `reason` is the same as long as that lasts, `detail` may change.
    `stops`: whether it keeps slots from being given out. `is_logged`: whether it is for the log to say, where nobody
    else says it."""

    reason: str
    detail: str = ""
    find_most: Callable[[], Awaitable[Most | None]] = nobody
    stops: bool = False
    is_logged: bool = True

    @property
    def text(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class _Known(NamedTuple):
    """`since`: Unix seconds."""

    since: float
    most: Most | None
    is_logged: bool


class Rounds:
    """Looks again and again at what is lacking. `wall_s`: Unix seconds, for people."""

    def __init__(self, lacks: Callable[[], list[Lack]], wall_s: Callable[[], float]) -> None:
        self._lacks, self._wall_s = lacks, wall_s
        self._known: dict[str, _Known] = {}
        """By reason, as the last round has found it."""

    async def look(self) -> None:
        """One round. Logs what is lacking, with who has most of it, when that begins and when it ends."""
        before, known = self._known, dict[str, _Known]()
        for lack in self._lacks():
            most = await lack.find_most()
            since = before[lack.reason].since if lack.reason in before else self._wall_s()
            known[lack.reason] = _Known(since, most, lack.is_logged)
            if lack.is_logged and lack.reason not in before:
                whose = most.told(of_user(os.geteuid())) if most is not None else ""
                log.warning("%s", "; ".join(filter(None, (lack.text, whose))))
        for reason in before.keys() - known.keys():
            if before[reason].is_logged:
                log.info("this is over: %s", reason)
        self._known = known

    def told(self, lacks: list[Lack], peer: Peer) -> list[Degraded]:
        """These, with what the last round knows of them, as far as the caller may know it."""
        found = list[Degraded]()
        for lack in lacks:
            known = self._known.get(lack.reason)
            found.append(Degraded(
                reason=lack.text, since=self._wall_s() if known is None else known.since,
                most="" if known is None or known.most is None else known.most.told(peer),
            ))
        return found
