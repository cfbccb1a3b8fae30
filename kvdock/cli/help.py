"""How `--help` looks: options in groups, commands in groups, and examples; plain text, as wide as the terminal.

A group is the `rich_help_panel` of an option or a command, which typer shows only with rich, whose import takes longer
than the rest of `--help`.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from kvdock.cli.examples import EXAMPLES

_TYPE = re.compile(r"(?<=\S) <\w+(\[\w+\])?>$")
"""The type of an argument, such as `<list[str]>`; its name and help say it better."""
_DEFAULT = re.compile(r"\[default: \((.*)\)\]$")
COMMON = "Common options"
"""The group of what nearly every command takes; it comes last."""


class Command(TyperCommand):
    """A command whose help has its options in groups, and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(ctx, formatter)
        super().format_epilog(ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help has them in groups too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        width = formatter.width - 4 - max(map(len, self.commands))
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            groups.setdefault(panel, []).append((name.ljust(max(map(len, self.commands))),
                                                 command.get_short_help_str(width)))
        for panel, rows in groups.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(ctx, formatter)
        super().format_epilog(ctx, formatter)


def _write_options(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    common: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is None:
            continue
        record = (_TYPE.sub("", record[0]), _DEFAULT.sub(r"[default: \1]", record[1]))
        panel = getattr(param, "rich_help_panel", None)
        if panel == COMMON or "--help" in param.opts:
            common.append(record)
        else:
            own = "Arguments" if param.param_type_name == "argument" else "Options"
            groups.setdefault(panel if isinstance(panel, str) else own, []).append(record)
    shown = {**groups, COMMON if any(groups.values()) else "Options": common}
    for panel, rows in shown.items():
        if rows:
            with formatter.section(panel):
                formatter.write_dl(rows)


def _write_examples(ctx: Any, formatter: Any) -> None:
    examples = EXAMPLES.get(ctx.command_path.removeprefix("kvdock").strip(), ())
    if not examples:
        return
    width = max(len(line) for line, _ in examples)
    with formatter.section("Examples"):
        for line, about in examples:
            formatter.write(f"  {line.ljust(width)}  # {about}\n" if about else f"  {line}\n")
