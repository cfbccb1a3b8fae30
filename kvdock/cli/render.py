"""Text for a terminal: numbers with units, and tables without trailing blanks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

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


GAP = 2
"""Spaces between two columns."""
TEXT_CELLS = 20
"""Longer names are folded where there is no space for them."""


def say_table(
    console: Console, heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, texts: Collection[str] = (),
    yields: Sequence[str] = (), title: str = "",
) -> None:
    """Prints a table in which no word of a head and no figure is cut. Columns of `texts` are aligned left and may be
    folded; the others are aligned right. Columns of `yields` are left out, in this order, until the others fit, and
    the last line names them."""
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    widest = [max([0, *(row[at].cell_len for row in cells)]) for at in range(len(heads))]
    least = [
        max(_longest_word(head), min(wide, TEXT_CELLS) if head in texts else wide)
        for head, wide in zip(heads, widest, strict=True)
    ]
    kept, left_out = list(range(len(heads))), list[str]()
    for head in yields:
        if sum(least[at] + GAP for at in kept) - GAP <= console.width:
            break
        kept.remove(heads.index(head))
        left_out.append(head)
    columns, spare = list[Column](), console.width - sum(least[at] + GAP for at in kept) + GAP
    for at in kept:
        more = max(0, min(spare, max(cell_len(heads[at]), widest[at]) - least[at]))
        spare -= more
        is_text = heads[at] in texts
        columns.append(Column(
            heads[at], justify="left" if is_text else "right", overflow="fold", width=least[at] + more
        ))
    table = Table(*columns, box=None, pad_edge=False, title=title or None, title_justify="left")
    for row in cells:
        table.add_row(*(row[at] for at in kept))
    say(console, table)
    if left_out:
        say(console, f"not shown, for want of space: {', '.join(left_out)}")


def _longest_word(head: str) -> int:
    return max((cell_len(word) for word in head.split()), default=0)
