"""Owns what tiers have: marks the namespaces that are served, keeps the limits of shared stores, and lists and removes
what an operator names.

Of all movers that share a store one keeps its limits: the one that holds the lease. The lease is a note
(kvdock/tiers/notes.py) of a namespace that nobody serves. Its birth is the holder, its generation the fencing number,
which rises with each new holder, and its deletions count how often the holder has renewed it. The clocks of machines
differ, so each mover measures by its own for how long the note has not changed, and takes the lease over after LEASE_S.
The holder renews the lease before each page that it removes, and stops where another one has it. If it hangs in the
midst of a page, at most that page is removed late, of parts that the next holder would remove too.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvdock.protocol.mover_schemas import ContentsAnswer, ContentsQuestion
from kvdock.protocol.reports import TierContents, TierNamespace
from kvdock.tiers.mover.namespaces import NamespaceSession
from kvdock.tiers.mover.tier_handle import TierHandle
from kvdock.tiers.notes import LEASE, Note
from kvdock.tiers.tier import AGE_S, Deadline, Holding, Limits, Owned, TierError

log = logging.getLogger("kvdock.tiers")

MARK_S: Final = 3600.0
"""How often a namespace that is served is marked. One that was marked within twice this time is in use."""
MARK_AGAIN_S: Final = 60.0
"""How long after a mark that failed it is tried again."""
ROUND_S: Final = 1800.0
"""How often a mover looks whether it is to keep the limits, and keeps them."""
LEASE_S: Final = 1.5 * ROUND_S
KEPT_SHARE: Final = 0.9
"""What is beyond a limit goes, and as much more as it takes to come to this share of it."""
CALL_S: Final = 10.0
CLOSE_S: Final = 2.0
LIST_S: Final = 300.0
"""How long a store may take to list all that it has."""
ANSWER_S: Final = 15.0
"""How long parts are removed for one question of an operator, who then asks again."""


class Removal(NamedTuple):
    """What is to go of a namespace: parts older than `older_s`, or, with 0, all, and its note and mark with them."""

    namespace: bytes
    older_s: float
    why: str


class Lease:
    """`change`: changes the note of LEASE, as Tier.change(). Not thread-safe."""

    def __init__(
        self, change: Callable[[Callable[[Note | None], Note]], Note], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._change, self._clock = change, clock
        self._me = secrets.randbits(64)
        self._seen: Note | None = None
        self._seen_s = 0.0
        self.fence = 0
        """The fencing number; 0: another mover has the lease."""

    def renew(self) -> bool:
        """Takes or renews the lease. False: another mover has it. Raises TierError."""
        note = self._change(self._renewed)
        if note != self._seen:
            self._seen, self._seen_s = note, self._clock()
        self.fence = note.generation if note.birth == self._me else 0
        return self.fence > 0

    def _renewed(self, note: Note | None) -> Note:
        if note is None:
            return Note(self._me, 1, 1)
        if note.birth == self._me:
            return Note(self._me, note.generation, note.deletions + 1)
        is_over = note == self._seen and self._clock() - self._seen_s >= LEASE_S
        return Note(self._me, note.generation + 1, 1) if is_over else note


def removals(holdings: Sequence[Holding], limits: Limits) -> list[Removal]:
    """What has to go: first what nobody has used for long; then, beyond a limit, the namespaces that nobody uses, the
    one that was used last at the end, then the oldest parts of all."""
    gone = {one.namespace: Removal(one.namespace, 0.0, "unused") for one in holdings
            if limits.unused_s and one.unused_s > max(limits.unused_s, 2 * MARK_S)}
    left = [one for one in holdings if one.namespace not in gone]
    scopes = [(limits.bytes, left, "the store's limit")] if limits.bytes else []
    if limits.tenant_bytes:
        tenants = dict.fromkeys(tenant_of(one.label) for one in left)
        scopes += [
            (limits.tenant_bytes, [one for one in left if tenant_of(one.label) == tenant], f"the limit of {tenant!r}")
            for tenant in tenants
        ]
    for most_bytes, scope, why in scopes:
        for removal in _beyond(most_bytes, scope, why):
            before = gone.get(removal.namespace)
            if before is None or removal.older_s < before.older_s:
                gone[removal.namespace] = removal
    return list(gone.values())


def _beyond(most_bytes: int, scope: Sequence[Holding], why: str) -> list[Removal]:
    found: list[Removal] = []
    left_bytes = sum(one.bytes for one in scope)
    if left_bytes <= most_bytes:
        return found
    for one in sorted(scope, key=lambda one: -one.unused_s):
        if left_bytes > KEPT_SHARE * most_bytes and one.unused_s > 2 * MARK_S:
            found.append(Removal(one.namespace, 0.0, why))
            left_bytes -= one.bytes
    used = [one for one in scope if one.unused_s <= 2 * MARK_S]
    ages = Counter[int]()
    for one in used:
        ages.update(one.by_age)
    for age in sorted(ages, reverse=True):
        if left_bytes <= KEPT_SHARE * most_bytes or age == 0:  # what was stored just now is not known to be cold
            break
        left_bytes -= ages[age]
        found = [one for one in found if not one.older_s]
        found += [Removal(one.namespace, age * AGE_S, why) for one in used if max(one.by_age, default=0) >= age]
    return found


def label_of(space: NamespaceSession) -> bytes:
    """What a namespace is, for people."""
    return json.dumps({"model": space.manifest.model, "tenant": _user()}).encode()


def tenant_of(label: bytes) -> str:
    return _read_label(label)[1]


def _read_label(label: bytes) -> tuple[str, str]:
    """(model, tenant); "" where a label does not say it."""
    try:
        found = json.loads(label)
        return str(found["model"]), str(found["tenant"])
    except (ValueError, KeyError, TypeError):
        return "", ""


def _user() -> str:
    """The name of the user as which the server runs; its number if it has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class Owner:
    """A thread for one tier. `served`: the namespaces that are served. `emptied`: called with a namespace of which
    parts were removed. `answered`: reports to the server."""

    def __init__(
        self, handle: TierHandle, served: Callable[[], Sequence[NamespaceSession]], emptied: Callable[[bytes], None],
        answered: Callable[[ContentsAnswer], None], *, round_s: float = ROUND_S,
    ) -> None:
        self._handle, self._served, self._emptied, self._answered = handle, served, emptied, answered
        self._round_s = round_s
        self._lease = Lease(lambda change: handle.change(LEASE, change, Deadline(CALL_S)))
        self._marked_s: dict[bytes, float] = {}
        self._questions: list[ContentsQuestion] = []
        self._changed, self._is_closed = threading.Condition(), False
        self._next_s = time.monotonic() + round_s * random.uniform(0.5, 1)
        """When the next round begins: not for all movers at the same time."""
        self._thread = threading.Thread(target=self._run, name=f"kvdock-{handle.name}-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, question: ContentsQuestion) -> None:
        with self._changed:
            self._questions.append(question)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._questions and not self._is_closed:
                    self._changed.wait(1.0)
                if self._is_closed:
                    return
                questions, self._questions = self._questions, []
            for question in questions:
                self._answered(ContentsAnswer(question.number, self._answer(question)))
            if isinstance(self._handle.tier, Owned) and not self._handle.breaker.is_open:
                try:
                    self._mark(self._handle.tier)
                    self._keep_limits(self._handle.tier)
                except TierError as error:
                    log.info("%s: its limits are not kept now: %s", self._handle.name, error)
                except Exception:  # else nobody would keep them any more
                    log.exception("%s: its limits are not kept now", self._handle.name)

    def _mark(self, tier: Owned) -> None:
        now_s = time.monotonic()
        for space in self._served():
            if now_s - self._marked_s.get(space.digest, -MARK_S) >= MARK_S:
                self._marked_s[space.digest] = now_s - MARK_S + MARK_AGAIN_S  # if it fails
                tier.mark(space.digest, label_of(space), Deadline(CALL_S))
                self._marked_s[space.digest] = now_s

    def _keep_limits(self, tier: Owned) -> None:
        if time.monotonic() < self._next_s or not any(tier.limits):
            return
        self._next_s = time.monotonic() + self._round_s
        if not self._lease.renew():
            return
        for removal in removals(tier.holdings(Deadline(LIST_S)), tier.limits):
            removed = 0
            while self._lease.renew() and not self._is_closed:
                if not (count := tier.empty(removal.namespace, removal.older_s, Deadline(CALL_S))):
                    break
                removed += count
            if not self._lease.fence or self._is_closed:
                return
            if not removal.older_s:
                tier.forget(removal.namespace, Deadline(CALL_S))
            self._emptied(removal.namespace)
            log.info("%s: %d records of namespace %s were removed: %s (lease %d)", self._handle.name, removed,
                     removal.namespace.hex()[:12], removal.why, self._lease.fence)

    def _answer(self, question: ContentsQuestion) -> TierContents:
        """What the tier has, after what the question names was removed."""
        name, tier = self._handle.name, self._handle.tier
        if not isinstance(tier, Owned):
            return TierContents(tier=name, error="it cannot list what it has")
        try:
            removed, until = 0, Deadline(ANSWER_S)
            for namespace in map(bytes.fromhex, question.remove):
                while not until.is_over and (count := tier.empty(namespace, 0.0, Deadline(CALL_S))):
                    removed += count
                self._emptied(namespace)
            found = tier.holdings(Deadline(LIST_S))
        except TierError as error:
            return TierContents(tier=name, error=error.why)
        served = {space.digest for space in self._served()}
        namespaces = [_view(one, is_served=one.namespace in served) for one in found if one.objects]
        return TierContents(tier=name, namespaces=namespaces, removed=removed)


def _view(one: Holding, *, is_served: bool) -> TierNamespace:
    model, tenant = _read_label(one.label)
    return TierNamespace(
        namespace=one.namespace.hex(), model=model, tenant=tenant, objects=one.objects, bytes=one.bytes,
        unused_s=round(one.unused_s, 3) if one.unused_s < float("inf") else None, is_served=is_served,
    )
