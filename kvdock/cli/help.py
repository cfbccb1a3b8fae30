"""How `--help` looks: options in groups, commands in groups, and examples; plain text, as wide as the terminal. And
the options that several commands have.

A group is the `rich_help_panel` of an option or a command, which typer shows only with rich, whose import takes longer
than the rest of `--help`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvdock.cli.errors import WRONG, CommandError

if TYPE_CHECKING:
    from rich.console import Console

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


EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("kvdock serve --pool-bytes 8GiB", "start a server"),
        ("kvdock status", "is it up, is it helping"),
        ("kvdock top", "the same, live"),
        ("kvdock COMMAND --help", "what a command does"),
    ),
    "serve": (
        ("kvdock serve --pool-bytes 64GiB --growth ahead", "beside engines with GPUs"),
        ("kvdock serve --config /etc/kvdock.toml", "settings from a file"),
        ("kvdock serve --takeover --on-exit keep", "replace a running server"),
    ),
    "status": (
        ("kvdock status", "this user's server"),
        ("kvdock status --server localhost:7410", "another one"),
        ("kvdock status --json | jq .hit_rate", "for scripts"),
    ),
    "top": (
        ("kvdock top", "live; q ends it"),
        ("kvdock top --once", "one picture"),
        ("kvdock top --json --interval 10 >> kvdock.log", "an object every 10 s"),
    ),
    "explain": (
        ("kvdock explain cmpl-7f3a", "why it missed"),
        ("kvdock explain cmpl-7f3a --json", "all figures"),
    ),
    "events": (
        ("kvdock events", "what has happened lately"),
        ("kvdock events --follow --kinds attached,left,dead", "engines that come and go"),
    ),
    "cached": (
        ("kvdock cached", "what fills the pool"),
        ("kvdock cached --json --limit 256", "all figures"),
    ),
    "history": (
        ("kvdock history", "the last half day"),
        ("kvdock history --over days", "the last two weeks"),
    ),
    "size": (
        ("kvdock size", "what other sizes would find"),
        ("kvdock size --users 50 --tokens-each 8000", "without any traffic yet"),
    ),
    "doctor": (
        ("kvdock doctor", "what helps or hinders here"),
        ("kvdock doctor --config /etc/kvdock.toml", "before a server starts with it"),
    ),
    "lookup": (
        ("kvdock lookup --tokens-file tokens.json", "a prompt's token ids"),
        ("echo 1 2 3 | kvdock lookup --tokens-file -", "from standard input"),
    ),
    "keep": (
        ("kvdock keep --tokens-file system.json --for 12h", "for half a day"),
        ("kvdock keep --tokens-file system.json --end", "no longer"),
    ),
    "evict": (
        ("kvdock evict --bytes 2GiB", "what is worth least"),
        ("kvdock evict --free 8GiB", "until so much is free"),
        ("kvdock evict --tokens-file old.json --yes", "a prompt, without asking"),
    ),
    "clear": (
        ("kvdock clear --namespace 5e1c", "what one model's engines stored"),
        ("kvdock clear --all", "everything"),
    ),
    "sessions": (("kvdock sessions", "engines, their processes, what they hold"),),
    "leases": (("kvdock leases --limit 20", "the oldest first"),),
    "requests": (
        ("kvdock requests", "the last lookups and stores"),
        ("kvdock requests cmpl-7f3a", "what became of one request"),
    ),
    "access-token": (
        ("kvdock access-token me --scope admin --access-file FILE", ""),
        ("kvdock access-token team-a --scope engine --tenant a > token", ""),
    ),
    "bench": (("kvdock bench --mib 256 --threads 4", "some seconds"),),
    "demo": (("kvdock demo --port 0", "any free port"),),
    "config": (
        ("kvdock config --config /etc/kvdock.toml", "of a server started with it"),
        ("kvdock config get", "of the running server"),
        ("kvdock config set pool_bytes=16GiB", "change the running server"),
    ),
    "config get": (
        ("kvdock config get", "this user's server"),
        ("kvdock config get --json | jq .limits", "what can be changed live"),
    ),
    "config set": (
        ("kvdock config set pool_bytes=16GiB", "a larger pool"),
        ("kvdock config set session_cap=0.25 total_cap=0.9", "both, or neither"),
        ("kvdock config set 'tenants={\"a\": {\"sessions\": 4}}'", "a quota"),
    ),
}


Server = Annotated[str, typer.Option(
    "--server", metavar="ADDRESS", show_default=False, rich_help_panel=COMMON,
    help="localhost:7410, http://host:port or unix:/path; by default this user's socket. A server that wants an access "
    "token gets the one in the file that KVDOCK_ACCESS_TOKEN_FILE names.",
)]
AsJson = Annotated[bool, typer.Option(
    "--json", rich_help_panel=COMMON,
    help="One JSON object on standard output, also if the command fails: then an RFC 9457 problem.",
)]
ListLimit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Show at most N.")]
ListAll = Annotated[bool, typer.Option("--all", help="Show all.")]
Namespace = Annotated[str, typer.Option(
    "--namespace", metavar="HEX", help="The namespace, or its first hex digits.", show_default=False,
)]
Keys = Annotated[list[str] | None, typer.Option(
    "--keys", metavar="HEX", help="Chunk keys of 64 hex digits, in order; separated by commas, or several --keys.",
    show_default=False,
)]
TokensFile = Annotated[str, typer.Option(
    "--tokens-file", metavar="FILE", help="File of token ids: a JSON list, or numbers; - is standard input.",
    show_default=False,
)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

FREE_COLUMNS = 200
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(option: str, text: str) -> float:
    """'90', '90s', '15min', '12h' or '7d' in seconds. Raises CommandError naming the option and the text."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise CommandError(f"{option}: wanted a duration like 90s, 15min, 12h or 7d, found {text!r}", WRONG)
    return float(match[1]) * _SECONDS[match[2] or ""]


def console() -> Console:
    """Where the output is no terminal, lines are as long as they have to be: ids can be searched for."""
    import os
    import sys

    from rich.console import Console

    is_free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=FREE_COLUMNS) if is_free else Console()
