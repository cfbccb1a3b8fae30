"""Options that several commands have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from kvdock.cli.help import COMMON
from kvdock.cli.outcome import WRONG, CommandError

if TYPE_CHECKING:
    from rich.console import Console

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
