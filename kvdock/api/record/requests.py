"""The most recent lookups and stores, and what became of their requests. All of it is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from kvdock.protocol.reports import Break, RequestView


@dataclass(slots=True)
class Detail:
    """What explanations of a request need beyond its row in lists."""

    namespace: bytes
    broke: Break | None = None
    loaded_us: int | None = None
    """From the answer to the lookup until all ranks had read the chunks that it leased. None: they have not."""
    weights: str | None = ""
    """The weights that its engine ran then."""


class RecentRequests:
    """The most recent lookups and stores, newest first, and the outcomes that engines have reported."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ring: deque[tuple[str, RequestView, Detail]] = deque()
        """Each with its tenant, newest first."""
        self._count = 0
        """How many were added: the newest has this number, and numbers are the cursors of pages."""
        self._without_outcome: dict[tuple[str, str], deque[RequestView]] = {}
        """By session and request, the lookups of the ring that have no outcome yet, oldest first."""
        self._with_outcome: dict[tuple[str, str], RequestView] = {}
        """By session and request, the newest row of the ring that has an outcome."""

    def add(self, tenant: str, request: RequestView, detail: Detail) -> None:
        if len(self._ring) == self._keep:
            self._forget(self._ring.pop()[1])
        self._count += 1
        self._ring.appendleft((tenant, request, detail))
        if request.outcome is not None:
            self._with_outcome[_name(request)] = request
        elif request.kind == "lookup":
            self._without_outcome.setdefault(_name(request), deque()).append(request)

    def _forget(self, oldest: RequestView) -> None:
        name = _name(oldest)
        if self._with_outcome.get(name) is oldest:
            del self._with_outcome[name]
        if oldest.kind == "lookup" and oldest.outcome is None:
            self._without_outcome[name].popleft()
            if not self._without_outcome[name]:
                del self._without_outcome[name]

    def ended(self, tenant: str, ended: RequestView, detail: Detail) -> None:
        """`ended` has the outcome of a request: its lookups get it. If there are none, it is a row of its own, unless
        that outcome was reported before."""
        name = _name(ended)
        lookups = self._without_outcome.pop(name, ())
        for lookup in lookups:
            lookup.outcome = ended.outcome
            self._with_outcome[name] = lookup
        if not lookups and (name not in self._with_outcome or self._with_outcome[name].outcome != ended.outcome):
            self.add(tenant, ended, detail)

    def view(
        self, limit: int, cursor: int, sees: Callable[[str], bool], request: str = ""
    ) -> tuple[list[RequestView], str | None]:
        """From request number `cursor` (0: the newest) backwards, those of tenants that the caller sees whose ids begin
        with `request`; and the cursor of the next page."""
        start = max(0, self._count - cursor) if cursor else 0
        shown: list[RequestView] = []
        for at, (tenant, one, _) in enumerate(islice(self._ring, start, None), start):
            if sees(tenant) and one.request.startswith(request):
                if len(shown) == limit:
                    return shown, str(self._count - at)
                shown.append(one)
        return shown, None

    def named(self, request: str, sees: Callable[[str], bool], most: int) -> list[tuple[RequestView, Detail]]:
        """The rows of one request, newest first."""
        found = ((one, detail) for tenant, one, detail in self._ring if one.request == request and sees(tenant))
        return list(islice(found, most))


def _name(request: RequestView) -> tuple[str, str]:
    return request.session, request.request
