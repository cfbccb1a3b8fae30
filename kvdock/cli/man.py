"""The man page kvdock(1), made from the commands' own help, so that each fact has one place.

    python -m kvdock.cli.man > man/kvdock.1        (`make man`)

The page is committed, because a wheel is built without what the commands import; tests/cli/test_man.py compares it with
what this module makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import typer.main

from kvdock import __version__
from kvdock.cli.help import EXAMPLES, record_of
from kvdock.cli.main import EPILOG, app

_ESCAPES = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", "…": "..."}
"""Without these, groff shows a hyphen, quotation marks or accents, which no shell understands, or nothing in ASCII."""
_ENVIRONMENT = (
    ("KVDOCK_ADDRESS", "The server that commands use if they have no --server."),
    ("KVDOCK_ACCESS_TOKEN_FILE", "A file with the access token that commands send."),
    ("KVDOCK_TRUSTED_UID", "The user id whose server root's commands and engines trust, too."),
    ("KVDOCK_CONFIG", "A TOML file of settings for kvdock serve."),
    ("KVDOCK_NAME", "The setting NAME, in capitals, such as KVDOCK_POOL_BYTES; options come first, then variables, "
     "then the file."),
)


def page() -> str:
    """The whole page in roff, for the macros of man(7)."""
    group: Any = typer.main.get_command(app)
    with group.make_context("kvdock", ["--version"], resilient_parsing=True) as context:
        lines = [
            f'.TH KVDOCK 1 "" "kvdock {_text(__version__)}" "User Commands"',
            ".SH NAME", f"kvdock \\- {_text(_lowered(group.help))}",
            ".SH SYNOPSIS", ".B kvdock", ".RI [ options ]", ".I command", ".RI [ arguments ]",
            ".SH DESCRIPTION", _text(group.help),
            ".SH OPTIONS", *_parameters(group, context),
            ".SH COMMANDS", *_commands(group, context),
            ".SH ENVIRONMENT", *_terms(_ENVIRONMENT),
            ".SH EXIT STATUS", _text(EPILOG.partition(": ")[2]),
            ".SH EXAMPLES", *_examples(""),
        ]
    return "\n".join(lines) + "\n"


def _lowered(sentence: str) -> str:
    """`The server.` as man's list of pages has it: without capital and full stop."""
    return sentence[0].lower() + sentence[1:].rstrip(".")


def _commands(group: Any, context: Any) -> Iterator[str]:
    for name, command in group.commands.items():
        with command.make_context(name, [], parent=context, resilient_parsing=True) as inner:
            path = inner.command_path.removeprefix("kvdock ")
            yield f".SS {_text(f'kvdock {path}')} {_text(' '.join(command.collect_usage_pieces(inner)))}"
            for at, paragraph in enumerate(_paragraphs(command.help)):
                yield from ([".PP"] if at else [])
                yield _text(paragraph)
            yield from _parameters(command, inner)
            yield from _examples(path)
            if hasattr(command, "commands"):
                yield from _commands(command, inner)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield " ".join(paragraph.split())


def _parameters(command: Any, context: Any) -> Iterator[str]:
    yield from _terms(filter(None, (record_of(param, context) for param in command.get_params(context))))


def _terms(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for head, text in pairs:
        yield from (".TP", f".B {_text(head)}", _text(text) or "\\&")


def _examples(path: str) -> Iterator[str]:
    for line, about in EXAMPLES.get(path, ()):
        yield from (".PP", *([f"{_text(about)}:"] if about else []), ".RS", ".nf", _text(line), ".fi", ".RE")


def _text(text: str) -> str:
    """As groff must read it to show it, on one line."""
    line = " ".join(text.split())
    shown = "".join(_ESCAPES.get(one, one if one.isascii() else f"\\[u{ord(one):04X}]") for one in line)
    return f"\\&{shown}" if shown.startswith(".") else shown


if __name__ == "__main__":
    print(page(), end="")
