"""Values as people read them, in the log and in a terminal."""

from __future__ import annotations


def size(size_bytes: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """The two largest units: 3725 → 1 h 2 min."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else "", f"{minutes} min" if minutes else ""]
    given = [part for part in [*parts, f"{whole % 60} s"] if part]
    return " ".join(given[:2])


def span(seconds: float) -> str:
    """A time that may be short: 0.0123 → 12.3 ms, 2.34 → 2.3 s, and from a minute on as `duration` has it."""
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
