"""Counts the requests to an object store, which bills them, and what they have cost.

The counts are of requests as obstore is asked for them; those that it repeats after a failure are not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple

_CHEAP: Final = frozenset({"get", "head"})
"""What stores bill as reads. Writes and lists cost about ten times as much; deletions cost nothing."""
_OF_UPLOAD: Final = 2
"""The requests of a multipart upload beside its pieces: one begins it, and one ends it."""
MILLION: Final = 1e6


class Prices(NamedTuple):
    """Dollars for a million requests; 0: not known, or free."""

    writes: float = 0.0
    reads: float = 0.0


NO_PRICES: Final = Prices()


class Requests:
    """The module obstore, with those of its functions that are used here. To be called on one event loop."""

    def __init__(self, obstore: Any, prices: Prices) -> None:
        self._obstore, self._prices, self.exceptions = obstore, prices, obstore.exceptions
        self._counts = Counter[str](dict.fromkeys(("get", "head", "put", "list", "delete"), 0))

    def counts(self) -> Mapping[str, int]:
        """How many requests there were so far, by verb. From any thread."""
        return dict(self._counts)

    @property
    def dollars(self) -> float:
        """What they have cost. From any thread."""
        counts = self.counts()
        reads = sum(count for verb, count in counts.items() if verb in _CHEAP)
        writes = counts["put"] + counts["list"]
        return (reads * self._prices.reads + writes * self._prices.writes) / MILLION

    async def get_async(self, store: Any, path: str, **options: Any) -> Any:
        self._counts["get"] += 1
        return await self._obstore.get_async(store, path, **options)

    def sent_get(self) -> None:
        """One was sent without obstore, to a URL of sign_async()."""
        self._counts["get"] += 1

    async def sign_async(self, store: Any, paths: Sequence[str], expires_in: timedelta) -> Sequence[str]:
        """URLs with which the objects can be read for so long."""
        found: Sequence[str] = await self._obstore.sign_async(store, "GET", paths, expires_in)
        return found

    async def head_async(self, store: Any, path: str) -> Any:
        self._counts["head"] += 1
        return await self._obstore.head_async(store, path)

    async def put_async(
        self, store: Any, path: str, data: bytes | Sequence[Any], *, use_multipart: bool, **options: Any
    ) -> None:
        self._counts["put"] += 1
        if use_multipart:
            size = len(data) if isinstance(data, bytes) else sum(map(len, data))
            self._counts["put"] += -(-size // options["chunk_size"]) + _OF_UPLOAD - 1
        await self._obstore.put_async(store, path, data, use_multipart=use_multipart, **options)

    async def delete_async(self, store: Any, paths: str | Sequence[str]) -> None:
        self._counts["delete"] += 1
        await self._obstore.delete_async(store, paths)

    async def list_with_delimiter_async(self, store: Any, path: str) -> Any:
        self._counts["list"] += 1
        return await self._obstore.list_with_delimiter_async(store, path)

    async def list(self, store: Any, path: str, *, chunk_size: int) -> AsyncIterator[Any]:
        """Pages of at most `chunk_size` objects."""
        self._counts["list"] += 1
        pages = 0
        async for page in self._obstore.list(store, path, chunk_size=chunk_size):
            pages += 1
            self._counts["list"] += pages > 1
            yield page
