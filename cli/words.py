"""Values as people read them in a terminal: sizes, durations, and text from other programs."""

from __future__ import annotations

from kvdock.protocol.words import size as size


def printable(text: str) -> str:
    """Without control characters: engines choose their labels, and no label may control the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)


def duration(seconds: float) -> str:
    """The two largest units: 3725 → 1 h 2 min."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""]
    given = [part for part in [*parts, f"{whole % 60} s"] if part]
    return " ".join(given[:2])
