"""Lists in pages: at most `limit` items, and a cursor from which the next page goes on.

A cursor is the id of the first item of the next page; for grants it is their position in the list of all grants.
Both rise and are never reused (a position only within its millisecond), so items that come or go between two pages
shift nothing: no item is shown twice, and none that was there all the time is missed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def page_of(
    items: Sequence[T], id_of: Callable[[T], int], limit: int, cursor: int
) -> tuple[Sequence[T], str | None]:
    """`items`, in rising order of their ids, from `cursor` on; and the next cursor, None after the last."""
    start = bisect_left(items, cursor, key=id_of)
    end = start + limit
    return items[start:end], str(id_of(items[end])) if end < len(items) else None
