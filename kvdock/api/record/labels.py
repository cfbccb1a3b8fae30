"""The labels of prefixes: those that operators give (`kvdock keep --name`), and those that clients send with requests.
Both are kept for the next server of the pool.

Used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import msgspec

from kvdock._core import Table
from kvdock.api.pool.registry import NamespaceRecord, Registry
from kvdock.protocol.errors import ApiError
from kvdock.protocol.mover_schemas import split_keys
from kvdock.protocol.wire_types import MAX_LABEL, is_label

MOST_NAMES = 256
"""Labels of operators. Those of chunks that have gone make room; if there are none, no label is added."""
MOST_CLIENT_LABELS, MOST_LABELS_OF_TENANT = 512, 128
"""Labels of clients: the one that no request has had for longest makes room."""
MOST_LABEL_KEYS = 256
"""How many chunks a client's label covers at most."""


class Label(msgspec.Struct, omit_defaults=True):
    """`key`: that of the last chunk of what it names. `is_clients`: a client gave it, not an operator."""

    namespace: str
    text: str
    key: str
    is_clients: bool = False
    tenant: str = ""


class Chunk(NamedTuple):
    """A chunk with its labels. `space`: the namespace's number in the table."""

    space: int
    key: bytes
    labels: list[str]


class Labels:
    def __init__(self, registry: Registry, table: Table) -> None:
        self._registry, self._table = registry, table
        self._labels: dict[tuple[str, str], Label] = {}
        """By namespace and text; the labels that clients used last come last."""
        self._shared_keys: dict[tuple[str, str], list[bytes]] = {}
        """The keys of the chunks that clients' labels name, from the first chunk on, for requests of this server."""
        self._has_new_name = False

    def require_name(self, space: NamespaceRecord, text: str) -> None:
        """Raises ApiError(bad_argument) unless a prefix of the namespace may be given that name."""
        if not is_label(text):
            wanted = f"1 to {MAX_LABEL} characters that can be seen, without spaces at the ends"
            raise ApiError("bad_argument", "a prefix may not have that name", found=text[:MAX_LABEL], wanted=wanted)
        known = self._labels.get((space.digest.hex(), text))
        if known is None or known.is_clients:
            self._make_room()

    def last_stored(self, space: NamespaceRecord, keys: bytes) -> bytes | None:
        """The last of the keys that has a chunk. It looks at all of them, so give it few."""
        return next((key for key in reversed(split_keys(keys)) if self._is_stored(space.table_id, key)), None)

    def name(self, space: NamespaceRecord, key: bytes, text: str) -> None:
        """An operator names the prefix up to that chunk. A label of the same text moves there."""
        place = (space.digest.hex(), text)
        self._labels[place] = Label(*place, key.hex(), tenant=space.tenant)
        self._shared_keys.pop(place, None)
        self._has_new_name = True

    def unname(self, space: NamespaceRecord, keys: bytes) -> None:
        """Forgets the names that operators gave to these chunks."""
        ended, digest = {key.hex() for key in split_keys(keys)}, space.digest.hex()
        for place, label in list(self._labels.items()):
            if label.namespace == digest and label.key in ended and not label.is_clients:
                del self._labels[place]
                self._has_new_name = True

    def used(self, space: NamespaceRecord, keys: bytes, text: str) -> None:
        """A client gave that label to a request whose chunks have these keys: it names what all its requests share. A
        name that an operator gave stays where it is."""
        place, asked = (space.digest.hex(), text), split_keys(keys)[:MOST_LABEL_KEYS]
        known = self._labels.get(place)
        if not asked or (known is not None and not known.is_clients):
            return
        shared = asked if known is None else self._shared(known, asked) or asked
        self._labels.pop(place, None)
        self._labels[place] = Label(*place, shared[-1].hex(), is_clients=True, tenant=space.tenant)
        self._shared_keys[place] = shared
        if known is not None:
            return
        for tenant, most in ((space.tenant, MOST_LABELS_OF_TENANT), (None, MOST_CLIENT_LABELS)):
            if len(labels := self._of_clients(tenant)) > most:
                del self._labels[labels[0]]
                self._shared_keys.pop(labels[0], None)

    def _shared(self, known: Label, asked: list[bytes]) -> list[bytes]:
        """The chunks that a label's earlier requests and this one begin with."""
        if keys := self._shared_keys.get((known.namespace, known.text)):
            both = takewhile(lambda pair: pair[0] == pair[1], zip(keys, asked, strict=False))
            return [key for key, _ in both]
        last = bytes.fromhex(known.key)  # of an earlier server's label no more is known
        return asked[: asked.index(last) + 1] if last in asked else []

    def chunks(self) -> list[Chunk]:
        """All chunks with labels, as far as their namespaces exist."""
        numbers = {space.digest.hex(): space.table_id for space in self._registry.namespaces()}
        found: dict[tuple[int, bytes], Chunk] = {}
        for label in self._labels.values():
            if label.namespace in numbers:
                place = (numbers[label.namespace], bytes.fromhex(label.key))
                found.setdefault(place, Chunk(*place, [])).labels.append(label.text)
        return list(found.values())

    def _of_clients(self, tenant: str | None) -> list[tuple[str, str]]:
        """Where the labels of a tenant's clients are, or of all; the one that was unused for longest comes first."""
        return [
            place for place, label in self._labels.items()
            if label.is_clients and (tenant is None or label.tenant == tenant)
        ]

    def _make_room(self) -> None:
        names = [place for place, label in self._labels.items() if not label.is_clients]
        if len(names) < MOST_NAMES:
            return
        numbers = {space.digest.hex(): space.table_id for space in self._registry.namespaces()}
        for place in names:
            number = numbers.get(place[0])
            if number is None or not self._is_stored(number, bytes.fromhex(self._labels[place].key)):
                del self._labels[place]
        if sum(not label.is_clients for label in self._labels.values()) >= MOST_NAMES:
            raise ApiError(
                "bad_argument", "too many prefixes have names; one that is kept no longer loses its name",
                found=MOST_NAMES, wanted=f"fewer than {MOST_NAMES}",
            )

    def _is_stored(self, number: int, key: bytes) -> bool:
        return self._table.state_of(number, key) == "ready"

    # ---------------------------------------------------------------- kept with the pool

    @property
    def has_changed(self) -> bool:
        """Whether a name of an operator is new or has gone. Clients' labels are kept with the history's next values."""
        return self._has_new_name

    def kept(self) -> Iterator[bytes]:
        self._has_new_name = False
        yield msgspec.json.encode(list(self._labels.values()))

    def take_over(self, kept: msgspec.Raw) -> None:
        """Goes on with the labels of an earlier server. Raises msgspec.MsgspecError."""
        self._labels = {
            (label.namespace, label.text): label for label in msgspec.json.decode(kept, type=list[Label])
        }
