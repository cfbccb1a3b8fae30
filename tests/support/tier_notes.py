"""What tiers in memory need to take part in clears."""

from __future__ import annotations

from collections.abc import Sequence

from kvdock.tiers.notes import Change, Note
from kvdock.tiers.record import PartName
from kvdock.tiers.tier import Deadline, Outcome, Usage


class KeptNotes:
    """Notes by namespace, of a tier that no other server uses."""

    poll_s = 0.0
    recheck_s = 60.0

    def __init__(self) -> None:
        self.notes_kept: dict[bytes, Note] = {}

    def notes(self, namespaces: Sequence[bytes], deadline: Deadline) -> list[Note | None]:
        return [self.notes_kept.get(namespace) for namespace in namespaces]

    def change(self, namespace: bytes, change: Change, deadline: Deadline) -> Note:
        note = self.notes_kept[namespace] = change(self.notes_kept.get(namespace))
        return note

    def namespaces(self, deadline: Deadline) -> list[bytes]:
        return list(self.notes_kept)


class BareTier(KeptNotes):
    """The verbs that tests of loads and notes seldom look at: deletions succeed, and nothing takes space."""

    def delete(self, names: Sequence[PartName], deadline: Deadline) -> list[Outcome]:
        return [Outcome.DONE] * len(names)

    def usage(self) -> Usage:
        return Usage(0, 0, 0, 0)

    def close(self, deadline: Deadline) -> None: ...
