"""Text for a terminal: numbers with units, and tables without trailing blanks."""

from __future__ import annotations

import re

from rich.console import Console, RenderableType

from kvdock.cli.printable import printable as printable
from kvdock.protocol.readable import duration as duration, percent as percent, size as size, span as span


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 lease, 2 leases."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def space(namespace: str, weights: str | None) -> str:
    """The first digits of a namespace, and the name of its weights if engines changed to them while they ran."""
    known = "weights unknown" if weights is None else weights if len(weights) <= 24 else f"{weights[:23]}…"
    return f"{namespace[:8]} ({known})" if known else namespace[:8]


def brief(amount: float) -> str:
    """Four digits at most: 12345 → 12.3 k."""
    for unit in ("", " k", " M", " G"):
        if amount < 999.5:
            return f"{amount:.0f}{unit}" if amount >= 99.95 or amount == int(amount) else f"{amount:.1f}{unit}"
        amount /= 1000
    return f"{amount:.1f} T"


_BLANKS = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)


def say(console: Console, *things: RenderableType) -> None:
    """Prints each thing on lines of its own. Text is printed as it is, without markup and highlighting."""
    with console.capture() as captured:
        for thing in things:
            console.print(thing, highlight=False, markup=False)
    console.file.write(_BLANKS.sub(r"\1", captured.get()))
    console.file.flush()
