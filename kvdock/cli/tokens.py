"""`kvdock token`: makes, lists, replaces and removes access tokens, in the server's access file. No server is asked: a
running one reads the file again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvdock.cli.errors import WRONG, CommandError
from kvdock.cli.help import COMMON, AsJson, console, parse_duration, parse_end

if TYPE_CHECKING:
    from kvdock.api.access.access_file import Token

SHOWN_DIGITS = 12
"""How much of a digest is shown: enough to tell tokens apart."""


def complete_name(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: the names in the access file."""
    from kvdock.api.access.access_file import tokens_in
    from kvdock.api.errors import AccessFileError, SettingsError

    try:
        tokens = tokens_in(_path(context.params.get("access_file") or ""))
    except (CommandError, AccessFileError, SettingsError):
        return []
    return sorted({token.name for token in tokens if token.name.startswith(incomplete)})


AccessFile = Annotated[str, typer.Option(
    "--access-file", metavar="FILE", help="The server's access file. [KVDOCK_ACCESS_FILE]", show_default=False,
    rich_help_panel=COMMON,
)]
NewName = Annotated[str, typer.Argument(
    metavar="NAME", help="The token's name, which the server writes to its log."
)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The token's name.", autocompletion=complete_name)]


class Shown(msgspec.Struct):
    """One token, as `--json` prints it."""

    name: str
    tenant: str
    scopes: list[str]
    created: str
    """Empty: not known. RFC 3339, as `expires`."""
    expires: str
    """Empty: it has no end."""
    is_expired: bool
    digest: str
    """The first digits of the token's SHA-256."""


def token() -> None:
    """Add, list, replace and revoke access tokens.

    The commands change the server's access file, which holds the tokens' digests; a running server reads it again. Run
    them as root or as a user that may write to the file and its folder.
    """


def token_add(
    name: NewName,
    scopes: Annotated[list[str], typer.Option(
        "--scope", metavar="health|read|engine|admin", help="What the token may do; may be given several times.",
    )] = ["read"],  # noqa: B006  # typer shows it as the default, and nothing changes it
    tenant: Annotated[str, typer.Option(
        "--tenant", metavar="TENANT", help="The tenant of the token; by default the server's own user.",
        show_default=False,
    )] = "",
    expires: Annotated[str, typer.Option(
        "--expires", metavar="WHEN", help="When it ends: a duration as 30d, a date or an ISO time; by default never.",
        show_default=False,
    )] = "",
    access_file: AccessFile = "",
    as_json: AsJson = False,
) -> None:
    """Create an access token and print it, once.

    Adds the token's name, digest and scopes to the access file, which is created if it is missing. Store the token in a
    file with mode 0600 and name that file in KVDOCK_ACCESS_TOKEN_FILE, or enter it in the status page.
    """
    from kvdock.api.access.access_file import add_token
    from kvdock.protocol.calls import INCLUDED

    known = [scope for scope in INCLUDED if scope in scopes]
    if wrong := [scope for scope in scopes if scope not in INCLUDED]:
        raise CommandError(f"--scope: found {wrong[0]!r}, wanted {', '.join(INCLUDED)}", WRONG)
    path, now = _path(access_file), datetime.now(UTC)
    end = parse_end("--expires", expires, now) if expires else None
    with _refusals():
        text = add_token(path, name, known, tenant, created=now, expires=end)
    _print(text, name, path, as_json=as_json)


def token_list(access_file: AccessFile = "", as_json: AsJson = False) -> None:
    """List the access tokens.

    Shows each token's name, tenant, scopes, dates, and the first digits of its digest; the tokens themselves are in no
    file of the server. A name has several tokens while a replaced one still works.
    """
    from rich.table import Column, Table
    from rich.text import Text

    from kvdock.api.access.access_file import tokens_in
    from kvdock.cli.client import print_json
    from kvdock.cli.render import say

    with _refusals(""):
        found = tokens_in(_path(access_file))
    tokens = [_shown(one, datetime.now(UTC)) for one in found]
    if as_json:
        print_json(console(), {"tokens": tokens})
        return
    if not tokens:
        say(console(), "the access file has no token")
        return
    table = Table("name", "tenant", "scopes", "created", "expires", Column("digest", no_wrap=True), box=None,
                  pad_edge=False)
    for one in tokens:
        end = Text(f"{one.expires} (expired)" if one.is_expired else one.expires or "never",
                   style="bold red" if one.is_expired else "")
        table.add_row(one.name, one.tenant or "(own user)", ", ".join(one.scopes), one.created or "not known", end,
                      f"{one.digest}…")
    say(console(), table)


def token_rotate(
    name: Name,
    grace: Annotated[str, typer.Option(
        "--grace", metavar="DURATION", help="How long the old token still works, as 1h; by default it ends at once.",
        show_default=False,
    )] = "",
    expires: Annotated[str, typer.Option(
        "--expires", metavar="WHEN", help="When the new token ends, as with `token add`, or never; by default when the "
        "old one would.", show_default=False,
    )] = "",
    access_file: AccessFile = "",
    as_json: AsJson = False,
) -> None:
    """Replace a token by a new one of the same name, and print it, once.

    The new token has the name, scopes, tenant and quota of the old one. With --grace, both work for that time; without
    it, the old one and all earlier ones of the name end at once, and with them the streams that they opened.
    """
    from kvdock.api.access.access_file import rotate_token

    path, now = _path(access_file), datetime.now(UTC)
    try:
        old_until = now + timedelta(seconds=parse_duration("--grace", grace)) if grace else None
    except OverflowError:
        raise CommandError(f"--grace: wanted a shorter time, found {grace!r}", WRONG) from None
    with _refusals():
        if not expires:
            text, made = rotate_token(path, name, now=now, old_until=old_until)
        else:
            end = None if expires == "never" else parse_end("--expires", expires, now)
            text, made = rotate_token(path, name, now=now, old_until=old_until, expires=end)
    _print(text, made.name, path, as_json=as_json)


def token_revoke(name: Name, access_file: AccessFile = "", as_json: AsJson = False) -> None:
    """Remove all tokens of a name.

    A running server refuses them once it has read the file again. Engines that use them keep the memory that they
    hold, and get no more: end their processes, too. A quota in the entry goes with it.
    """
    from kvdock.api.access.access_file import revoke_token
    from kvdock.cli.client import print_json
    from kvdock.cli.render import counted, printable, say

    path, now = _path(access_file), datetime.now(UTC)
    with _refusals():
        gone = revoke_token(path, name)
    if as_json:
        print_json(console(), {"revoked": [_shown(one, now) for one in gone]})
        return
    say(console(), f"{counted(len(gone), 'token')} of {printable(name)} removed from {printable(path)}")
    if any(one.caps is not None for one in gone):
        tenant = printable(gone[0].tenant) or "the server's own user"
        say(console(), f"the quota of {tenant} went with it: the default counts now, unless another was set by call")


TOKEN_COMMANDS: dict[str, Callable[..., None]] = {
    "add": token_add, "list": token_list, "rotate": token_rotate, "revoke": token_revoke,
}


def _path(access_file: str) -> str:
    """Raises CommandError, SettingsError."""
    from kvdock.api.settings import effective
    from kvdock.cli.client import warn_once

    path = access_file or effective(os.environ, on_unknown=warn_once, only="access_file").settings.access_file
    if not path:
        raise CommandError("name the server's access file: --access-file FILE", WRONG)
    return path


@contextmanager
def _refusals(rest: str = "; the file was not changed") -> Iterator[None]:
    from kvdock.api.errors import AccessFileError

    try:
        yield
    except AccessFileError as error:
        raise CommandError(f"{error}{rest}", WRONG) from error


def _shown(token: Token, now: datetime) -> Shown:
    from kvdock.api.access.access_file import shown

    return Shown(
        token.name, token.tenant, list(token.scopes), shown(token.created), shown(token.expires),
        token.until_s <= now.timestamp(), token.sha256[:SHOWN_DIGITS],
    )


def _print(text: str, name: str, path: str, *, as_json: bool) -> None:
    """Prints a new token, and with `--json` what the file says of it."""
    from kvdock.api.access.access_file import tokens_in
    from kvdock.cli.client import print_json

    if not as_json:
        typer.echo(text)
        return
    made = max((one for one in tokens_in(path) if one.name == name), key=lambda one: one.until_s)
    about = msgspec.to_builtins(_shown(made, datetime.now(UTC)))
    print_json(console(), {**about, "access_file": path, "access_token": text})
