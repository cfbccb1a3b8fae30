"""Under which namespaces prompts with the same first tokens were stored: how far a prompt that missed goes on like one
that was stored, and whether it is there under another model name, tenant or manifest.

Used from the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvdock._core import Table
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.protocol.keys import BEGINNING_DIGITS, BEGINNINGS
from kvdock.protocol.wire_types import KEY_BYTES

MOST_BEGINNINGS = 65_536
MOST_NAMESPACES = 16
"""Namespaces of one beginning: the ones stored to last."""


@dataclass(slots=True)
class _Begun:
    """Prompts with one beginning that were stored in one namespace."""

    key: bytes = b""
    """The key of the chunk that has the last of these first tokens, or of the last one before it that was stored.
    Empty: not known."""
    chunks: int = 0
    """How many chunks end with that one."""
    ways: int = 0
    """How many different longer beginnings such prompts had."""


class Alike(NamedTuple):
    """What a namespace has of a prompt, as far as beginnings tell."""

    tokens: int
    """This many first tokens are those of a prompt that was stored."""
    before: int | None
    """The first token that differs comes before this one. None: not known."""
    ways: int
    """In how many different ways such prompts go on before `before`; 0: not known."""


class Held(NamedTuple):
    """A namespace that has the first chunks of a prompt. `tokens`: at least so many of the prompt's first tokens
    are stored there."""

    space: NamespaceRecord
    tokens: int


class Beginnings:
    """By the beginnings of prompts (beginnings_of() in kvdock/protocol/keys.py)."""

    def __init__(self, registry: Registry, table: Table) -> None:
        self._registry, self._table = registry, table
        self._stored: OrderedDict[str, OrderedDict[bytes, _Begun]] = OrderedDict()
        """By one beginning and the digest of a namespace; the last ones come last."""

    def stored(self, beginnings: str, space: NamespaceRecord, keys: bytes, start: int) -> None:
        """Chunks of a prompt that begins in this way are stored in the namespace. `start`: how many of its chunks come
        before `keys`."""
        shorter: _Begun | None = None
        for tokens, one in _split(beginnings):
            spaces = self._stored.setdefault(one, OrderedDict())
            self._stored.move_to_end(one)
            begun = spaces.get(space.digest)
            if begun is None:
                begun = spaces[space.digest] = _Begun()
                if shorter is not None:
                    shorter.ways += 1
                if len(spaces) > MOST_NAMESPACES:
                    spaces.popitem(last=False)
            spaces.move_to_end(space.digest)
            _reach(begun, -(-tokens // space.manifest.chunk_tokens), keys, start)
            shorter = begun
        while len(self._stored) > MOST_BEGINNINGS:
            self._stored.popitem(last=False)

    def alike(self, beginnings: str, space: NamespaceRecord) -> Alike:
        """How far a prompt with these beginnings was like one that was stored in the namespace."""
        tokens = ways = 0
        for end, one in _split(beginnings):
            spaces = self._stored.get(one)
            begun = spaces.get(space.digest) if spaces is not None else None
            if begun is None:
                return Alike(tokens, end, ways)
            tokens, ways = end, begun.ways
        return Alike(tokens, None, 0)

    def holding(self, beginnings: str) -> Iterator[Held]:
        """The namespaces that have chunks of such a prompt now."""
        found: dict[bytes, int] = {}
        for end, one in _split(beginnings):
            for digest, begun in self._stored.get(one, {}).items():
                space = self._registry.space_of(digest)
                if space is not None and begun.key and self._has(space, begun.key):
                    found[digest] = min(end, begun.chunks * space.manifest.chunk_tokens)
        for digest, tokens in found.items():
            if (space := self._registry.space_of(digest)) is not None:
                yield Held(space, tokens)

    def _has(self, space: NamespaceRecord, key: bytes) -> bool:
        return self._table.state_of(space.table_id, key) == "ready"


def _split(beginnings: str) -> Iterator[tuple[int, str]]:
    """(tokens, their digest), the shortest first."""
    for number, tokens in enumerate(BEGINNINGS[: len(beginnings) // BEGINNING_DIGITS]):
        yield tokens, beginnings[number * BEGINNING_DIGITS : (number + 1) * BEGINNING_DIGITS]


def _reach(begun: _Begun, wanted: int, keys: bytes, start: int) -> None:
    """The chunks of `keys` follow the first `start` ones. `wanted`: as many chunks have all tokens of the beginning."""
    end = min(wanted, start + len(keys) // KEY_BYTES)
    if start < end and begun.chunks <= end:
        begun.key, begun.chunks = bytes(keys[(end - start - 1) * KEY_BYTES : (end - start) * KEY_BYTES]), end
