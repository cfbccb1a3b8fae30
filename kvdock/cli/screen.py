"""Output for people: what rich lays out, without the blanks that it puts at the end of lines."""

from __future__ import annotations

import re

from rich.console import Console, RenderableType

_BLANKS = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)


def say(console: Console, *things: RenderableType) -> None:
    """Prints each on lines of its own. Text in it is shown as it is: no markup, no colours by guess."""
    with console.capture() as captured:
        for thing in things:
            console.print(thing, highlight=False, markup=False)
    console.file.write(_BLANKS.sub(r"\1", captured.get()))
    console.file.flush()
