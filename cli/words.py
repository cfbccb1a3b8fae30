"""Values as people read them in a terminal: sizes, durations, and text from other programs."""

from __future__ import annotations

from kvdock.protocol.words import duration as duration, size as size


def printable(text: str) -> str:
    """Without control characters: engines choose their labels, and no label may control the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)
