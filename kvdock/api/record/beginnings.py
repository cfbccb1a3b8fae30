"""Under which namespaces prompts with the same first tokens were stored: whether a prompt that missed is there under
another model name, tenant or manifest.

Used from the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvdock.api.pool.registry import NamespaceRecord, Registry

MOST_BEGINNINGS = 65_536
MOST_NAMESPACES = 16
"""Namespaces of one beginning: the ones stored to last."""


class Beginnings:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._stored: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()
        """By beginning (kvdock/protocol/keys.py), the digests of namespaces; the last ones come last."""

    def stored(self, beginning: str, space: NamespaceRecord) -> None:
        """A prompt that begins in this way was stored in the namespace."""
        spaces = self._stored.setdefault(beginning, OrderedDict())
        self._stored.move_to_end(beginning)
        spaces[space.digest] = None
        spaces.move_to_end(space.digest)
        if len(spaces) > MOST_NAMESPACES:
            spaces.popitem(last=False)
        if len(self._stored) > MOST_BEGINNINGS:
            self._stored.popitem(last=False)

    def is_in(self, beginning: str, space: NamespaceRecord) -> bool:
        """Whether such a prompt was stored in the namespace."""
        return space.digest in self._stored.get(beginning, ())

    def spaces_of(self, beginning: str) -> Iterator[NamespaceRecord]:
        """The namespaces to which such a prompt was stored, as far as they still exist."""
        digests = self._stored.get(beginning, ())
        return (space for space in self._registry.namespaces() if space.digest in digests)
