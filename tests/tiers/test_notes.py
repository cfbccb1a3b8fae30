"""Names of parts: after a clear or a deletion, nothing is found or stored under an older one."""

from __future__ import annotations

import pytest

from kvdock.tiers.notes import Note
from kvdock.tiers.record import PartName

pytestmark = pytest.mark.tiers

NAMESPACE, KEY, OTHER = bytes(32), b"k" * 32, b"o" * 32


def name(note: Note, key: bytes = KEY) -> PartName:
    return note.name(NAMESPACE, key, 0, 0)


def test_a_clear_gives_all_parts_new_names() -> None:
    before = Note.new(3)
    after = before.at_least(4)
    for key in (KEY, OTHER):
        assert name(after, key) != name(before, key)
        assert after.names(name(after, key)) and not after.names(name(before, key))
    assert before.at_least(2) == before, "a generation only rises"


def test_a_deletion_gives_the_parts_of_its_key_new_names() -> None:
    before = Note.new(3)
    after = before.without([KEY])
    assert name(after) != name(before) and not after.names(name(before))
    assert name(after, OTHER) == name(before, OTHER) and after.names(name(before, OTHER))
    assert name(after.without([KEY])) != name(after), "each time it is deleted"


def test_a_note_that_was_lost_gives_all_parts_new_names() -> None:
    assert name(Note.new(3)) != name(Note.new(3))
