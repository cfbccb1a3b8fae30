"""`kvdock config`: every setting that `kvdock serve` would use, and its source."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvdock.api.settings import Effective
from kvdock.cli.meanings import exact_bytes
from kvdock.cli.operator import print_json
from kvdock.cli.screen import say
from kvdock.cli.words import printable


def show_config(effective: Effective, *, as_json: bool, console: Console) -> None:
    values = {name: getattr(effective.settings, name) for name in effective.origins}
    if as_json:
        print_json(console, {"settings": {
            name: {"value": values[name], "source": origin.source, "where": origin.where}
            for name, origin in effective.origins.items()
        }})
        return
    table = Table(Column("setting", no_wrap=True), "value", "from", box=None, pad_edge=False)
    for name, origin in effective.origins.items():
        value = exact_bytes(values[name]) if name.endswith("_bytes") else str(values[name])
        place = f"{origin.source}: {origin.where}" if origin.where else origin.source
        style = "" if origin.source == "default" else "bold"
        table.add_row(name, Text(printable(value) or "(empty)", style=style, overflow="fold"),
                      Text(printable(place), overflow="fold"))
    say(console, table)
