"""When servers of the pool were started and limits were changed, kept with the history: charts mark these moments,
because the series may look otherwise from then on.

Used from the event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from kvdock.protocol.events import Event, LimitsChanged
from kvdock.protocol.reports import Mark

MOST_MARKS = 256
TOGETHER_S = 1.0
"""Changes of limits within this time are one mark."""
QUOTAS: Final = "quotas"


class _Kept(msgspec.Struct, omit_defaults=True):
    """`at`: Unix seconds."""

    at: float
    kind: Literal["started", "limits"]
    limits: list[str] = []
    pool_bytes: int | None = None


class Marks:
    """The last MOST_MARKS; a subscriber of the journal. `wall_s`: Unix seconds."""

    name = "marks"
    kinds = (LimitsChanged,)

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._known: deque[_Kept] = deque(maxlen=MOST_MARKS)
        self._has_changed = False

    def started(self) -> None:
        """A server of the pool begins."""
        self._known.append(_Kept(self._wall_s(), "started"))
        self._has_changed = True

    def take(self, event: Event) -> None:
        """An operator has changed limits."""
        if isinstance(event, LimitsChanged):
            size = event.changed.get("pool_bytes", [None])[-1]
            self._add(list(event.changed), size if isinstance(size, int) else None)

    def quotas_changed(self) -> None:
        """Those of one tenant or more."""
        self._add([QUOTAS], None)

    def _add(self, names: Sequence[str], pool_bytes: int | None) -> None:
        now, last = self._wall_s(), self._known[-1] if self._known else None
        if last is not None and last.kind == "limits" and 0 <= now - last.at < TOGETHER_S:
            last.limits += [name for name in names if name not in last.limits]
            last.pool_bytes = last.pool_bytes if pool_bytes is None else pool_bytes
        else:
            self._known.append(_Kept(now, "limits", list(names), pool_bytes))
        self._has_changed = True

    def within(self, seconds: float) -> list[Mark]:
        """Those of the last `seconds`, oldest first."""
        now = self._wall_s()
        return [
            Mark(age_s=max(0.0, now - one.at), kind=one.kind, limits=one.limits, pool_bytes=one.pool_bytes)
            for one in self._known if now - one.at <= seconds
        ]

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """Whether there are other marks than those last kept."""
        return self._has_changed

    def kept(self) -> Iterator[bytes]:
        self._has_changed = False
        yield msgspec.json.encode(list(self._known))

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with the marks of an earlier server. Raises msgspec.MsgspecError."""
        self._known.extend(msgspec.json.decode(kept, type=list[_Kept]))
